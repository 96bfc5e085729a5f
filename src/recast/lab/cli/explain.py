"""`recast explain RUN|MODEL IMAGE…`: a page, or a picture, of where a network looks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.config.evaluation import parse_size
from recast.lab.config.explain import ExplainOptions
from recast.lab.folder.run import RunFolder
from recast.models.trust import trusting

if TYPE_CHECKING:
    from recast.lab.explain.scene import Scene

EXAMPLES = """  recast explain runs/mine cat.jpg
  recast explain runs/mine photos/                (a folder: one page with all images)
  recast explain runs/mine val:17 val:18          (validation images of the run's own data)
  recast explain runs/mine                        (four validation images of different classes)
  recast explain runs/mine --neighbours           (and the training images nearest to them)
  recast explain deit_tiny_patch16_224 cat.jpg --pretrained
  recast explain patchconvnet_s60_multi photos/ --checkpoint s60_multi.pth
  recast explain torchvision:resnet50 cat.jpg --checkpoint FILE --classes names.txt --num-classes 37
  recast explain child.safetensors cat.jpg        (a file of recast.save that says how to build its network)
"""


def explain(subject: str, /, *images: str, trust: bool = False, options: Typed[ExplainOptions], output: Compute) -> int:
    """Write one self-contained HTML page that shows where a network looks in an image. In layers with a query, click
    a pixel to see where every head looks. Attention pooling and class tokens have a map for each likely class or
    head. For a run, the page compares the predictions of the arms.

    Args:
        subject: Run folder of recast train; or a model: timm:NAME (or NAME), torchvision:NAME,
            upernet|maskrcnn|fasterrcnn|retinanet:NAME, pkg.module:function, or a file of recast.save.
        images: Files and folders; for a run also val:N, its validation image N. Default: four of these.
        trust: Allow code that the files name (pkg.module:function) to run.
    """
    settings = options.over({"subject": subject, "images": list(images)})
    size = None if settings.img_size is None else parse_size(settings.img_size, "--img-size")
    if settings.neighbours and not RunFolder(subject).is_run:
        raise RecastError(f"--neighbours requires a run folder, got {subject}")
    with trusting(subject, trust=trust):
        if settings.neighbours:
            from recast.lab.explain.neighbours import neighbours_page  # needs torch, which the help does without

            page, summary = neighbours_page(settings, size), dict[str, Any]()
        else:
            from recast.lab.explain.pages import explain_page

            page, scene, notes = explain_page(settings, size)
            summary = _summary(scene, settings.layer)
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
    if output.as_json:
        print_json({"page": str(page), **summary})
    else:
        print(f"page: {page}")
    return 0


COMMAND = Command(explain, "RUN|MODEL [IMAGE…] [options]", EXAMPLES)


def _summary(scene: Scene, layer: str | None) -> dict[str, Any]:
    """Return the layers and the predictions."""
    unit = "logit" if scene.scale == "logits" else "probability"
    return {
        "layers": [layer.name for layer in scene.layers],
        "opens": scene.first_layer(layer),
        "outputs": scene.scale,
        "images": [
            {
                "name": picture.name,
                "label": picture.label,
                "predictions": {
                    arm: [{"class": best.name, unit: best.probability} for best in ranking]
                    for arm, ranking in picture.predictions.items()
                },
            }
            for picture in scene.pictures
        ],
        "notes": list(scene.notes),
    }
