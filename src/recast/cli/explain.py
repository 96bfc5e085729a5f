"""`recast explain RUN IMAGE…`: a page on which a clicked pixel shows what every head attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recast.cli.options import new_parser, parse, parse_size, print_json
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.explain.page.run_pages import Explained

EXAMPLES = """  recast explain runs/mine cat.jpg
  recast explain runs/mine photos/                (a folder: one page with all images, or one for each)
  recast explain runs/mine val:17 val:18          (validation images of the run's own data)
  recast explain runs/mine                        (four of them, of different classes)
"""


def run(argv: Sequence[str]) -> int:
    """Write the pages and say where they are."""
    parser = new_parser(
        "explain",
        "RUN [IMAGE …] [options]",
        "One self-contained HTML page: click a pixel of the image, and every head of the chosen layer shows where\n"
        "it looks, beside its gates and the predictions of the arms. A slider goes over the epochs whose weights were\n"
        "kept (recast train … --keep-every N). Images that do not fit into one page get one each, and a page that\n"
        "lists them.",
        EXAMPLES,
    )
    parser.add_argument("run", type=str, help="run folder of recast train")
    parser.add_argument(
        "images", type=str, nargs="*", default=[], help="files, folders, or val:N; default four validation images"
    )
    parser.add_argument("--out", type=str | None, default=None, help="the HTML file; default RUN/explain/IMAGE.html")
    parser.add_argument(
        "--img_size", type=str | None, default=None, help="224, or 224x160 (height x width); default the run's own"
    )
    parser.add_argument("--num_images", type=int, default=16, help="at most this many images")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parse(parser, argv)
    if options.num_images < 1:
        raise RecastError(f"--num-images must be at least 1, got {options.num_images}")
    size = None if options.img_size is None else parse_size(options.img_size, 0)

    from recast.explain.page.run_pages import explain_run

    done = explain_run(options.run, options.images, options.out, size=size, num_images=options.num_images)
    if options.json:
        print_json(_summary(done))
    else:
        first, *others = done.pages
        print(f"page: {first}" + (f" and {len(others)} in {others[0].parent}" if others else ""))
    return 0


def _summary(done: Explained) -> dict[str, Any]:
    """The pages, and the predictions at the last epoch."""
    scene = done.scene
    return {
        "pages": [str(path) for path in done.pages],
        "layers": list(scene.layer_order),
        "epochs": [state.epoch for state in scene.states if state.epoch is not None],
        "images": [
            {
                "name": picture.name,
                "label": picture.label,
                "predictions": {
                    arm: [{"class": name, "probability": probability} for name, probability in ranked]
                    for arm, ranked in picture.predictions[-1].items()
                },
            }
            for picture in scene.pictures
        ],
        "notes": list(scene.notes),
    }
