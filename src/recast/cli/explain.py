"""`recast explain RUN|MODEL IMAGE…`: a page, or a picture, of where a network looks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from recast.cli.help import Command
from recast.cli.options import JsonOption, Words, parse, parse_size, print_json
from recast.errors import RecastError
from recast.run.config import ModelConfig
from recast.run.fields import Count, Positive, Probability, Share

if TYPE_CHECKING:
    from recast.explain.write import Explained

EXAMPLES = """  recast explain runs/mine cat.jpg
  recast explain runs/mine photos/                (a folder: one page with all images, or one for each)
  recast explain runs/mine val:17 val:18          (validation images of the run's own data)
  recast explain runs/mine                        (four of them, of different classes)
  recast explain deit_tiny_patch16_224 cat.jpg --pretrained
  recast explain patchconvnet_s60_multi photos/ --checkpoint s60_multi.pth --out maps.png
  recast explain torchvision:resnet50 cat.jpg --checkpoint FILE --classes names.txt --num-classes 37
  recast explain child.safetensors cat.jpg        (a file of recast.save that says how to build its network)
"""
OF_MODELS = ("checkpoint", "pretrained", "num_classes", "classes", "mean", "std", "crop_pct")
ABOUT = """One self-contained HTML page: where a network looks in an image. Of attention pooling and class tokens it
shows a map for each likely class or head; in layers with a query, click a pixel and every head shows where
it looks. Of a run, the predictions of the arms stand beside each other, and a slider goes over the epochs
whose weights were kept (recast train … --keep-every N). Images that do not fit into one page get one each,
and a page that lists them. --out FILE.png draws one layer's maps as a contact sheet, a row an image."""


@dataclass
class ExplainOptions(JsonOption):
    """What `recast explain` is asked for."""

    WORDS: ClassVar[Words] = {"subject": "1", "images": "*"}
    subject: str = ""
    """run folder of recast train; or a model: timm:NAME (or NAME), torchvision:NAME, pkg.module:function, or a file of
    recast.save"""
    images: list[str] = field(default_factory=list)
    """files, folders; of a run val:N, default four of those"""
    out: str | None = None
    """the file, .html or .png; default RUN/explain/IMAGE.html, or here"""
    layer: str | None = None
    """the layer to open first, or to draw in a PNG"""
    img_size: str | None = None
    """224, or 224x160 (height x width); default the network's own"""
    num_images: Count = 16
    """at most this many images"""
    checkpoint: str | None = None
    """of a model: weights, .safetensors or .pth"""
    pretrained: bool = False
    """of a model: fetch the registry's own weights"""
    num_classes: int | None = None
    """of a model: classes of the head"""
    classes: str | None = None
    """of a model: names of its classes, a text file, one a line; default ImageNet's for 1,000, else numbers"""
    mean: list[Probability] | None = None
    """of a model: its normalisation, R G B in [0, 1] pixels; default what it says (timm's do), else ImageNet's"""
    std: list[Positive] | None = None
    """of a model: as for the mean"""
    crop_pct: Share | None = None
    """of a model: share of the short side that the centre crop keeps; default what it says, else 0.875, and 1 for small
    images"""
    device: str = "cpu"
    """auto, cpu, cuda or mps"""


def run(argv: Sequence[str]) -> int:
    """Write the pages and say where they are."""
    usage = "RUN|MODEL [IMAGE …] [options]"
    options = parse(Command("explain", usage, ABOUT, EXAMPLES), ExplainOptions(), argv)
    size = None if options.img_size is None else parse_size(options.img_size, 0)
    done = _explain(options, size)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print_json(_summary(done, options.layer))
    else:
        first, *others = done.pages
        kind = "picture" if first.suffix.lower() == ".png" else "page"
        print(f"{kind}: {first}" + (f" and {len(others)} in {others[0].parent}" if others else ""))
    return 0


def _explain(options: ExplainOptions, size: tuple[int, int] | None) -> Explained:
    from recast.explain.open import names_a_run
    from recast.explain.pages import explain_model, explain_run

    rest: dict[str, Any] = {
        "size": size, "num_images": options.num_images, "layer": options.layer, "device": options.device,
    }  # fmt: skip
    if names_a_run(options.subject):
        if given := [name for name in OF_MODELS if getattr(options, name) != getattr(ExplainOptions(), name)]:
            option = given[0].replace("_", "-")
            raise RecastError(f"{options.subject} is a run folder, which knows its own: leave --{option} away")
        return explain_run(options.subject, options.images, options.out, **rest)
    config = ModelConfig(options.subject, options.checkpoint, options.pretrained, options.num_classes)
    told = {name: getattr(options, name) for name in ("classes", "mean", "std", "crop_pct")}
    return explain_model(config, options.images, options.out, **told, **rest)


def _summary(done: Explained, layer: str | None) -> dict[str, Any]:
    """The pages, and the predictions at the last epoch."""
    from recast.explain.pack import first_layer

    scene = done.scene
    return {
        "pages": [str(path) for path in done.pages],
        "layers": list(scene.layer_order),
        "opens": first_layer(scene, layer),
        "epochs": [state.epoch for state in scene.states if state.epoch is not None],
        "images": [
            {
                "name": picture.name,
                "label": picture.label,
                "predictions": {
                    arm: [{"class": one.name, "probability": one.probability} for one in ranked]
                    for arm, ranked in picture.predictions[-1].items()
                },
            }
            for picture in scene.pictures
        ],
        "notes": list(scene.notes),
    }
