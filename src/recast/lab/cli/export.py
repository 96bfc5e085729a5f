"""`recast export RUN|FILE`: an ONNX file or an exported program, checked against the module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recast.config import FilePath
from recast.errors import RecastError
from recast.files import check_place
from recast.lab.cli.command import Command, Compute, print_json
from recast.models.config import ModelConfig
from recast.models.trust import trusting

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """  recast export runs/mine                                  (runs/mine/model.onnx)
  recast export child.safetensors --out child.pt2        (a torch.export program)

The file takes any batch size, and any height and width that the network takes. Normalise images as in training.
ONNX needs pip install 'recast-vision[export]'. To run the files from Python:
  onnxruntime.InferenceSession("model.onnx"), torch.export.load("model.pt2").module()
"""


def export(
    subject: str,
    /,
    *,
    out: FilePath | None = None,
    img_size: str | None = None,
    fold: bool = True,
    any_size: bool | None = None,
    data_dir: FilePath | None = None,
    trust: bool = False,
    output: Compute,
) -> int:
    """Export the recast network of a run, or a saved network. The file is then run on 1 and 3 images at two sizes
    and compared with the module; a difference above 1e-4 is an error. Closed heads are folded first (exact), so a
    layer whose heads stayed closed is exported as a convolution.

    Args:
        subject: A run folder, or a file of recast.save.
        out: The file: .onnx, for ONNX Runtime and others, or .pt2, a torch.export program. None: model.onnx
            beside the subject.
        img_size: Pixels of the example, 224 or 224x160 (height x width). None: the run's, the network's own, or 224.
        fold: Fold closed heads first.
        any_size: Height and width are free. None: if the network takes others, and at most two of its strided
            convolutions have SAME padding: with more, torch takes many minutes.
        data_dir: Folder of the images of a run if they moved.
        trust: Allow code that the files name (pkg.module:function) to run.
    """
    folder = Path(subject) if Path(subject).is_dir() else Path(subject).parent
    path = Path(out) if out else folder / "model.onnx"
    check_place(path, "--out", "model.onnx")

    import torch

    from recast import exporting
    from recast.lab.cli.plan import example_shape
    from recast.surgery.folding.model import fold_

    if path.exists() and not (path.is_file() and exporting.is_export(path)):
        raise RecastError(f"{path} exists and was not written by recast export: choose another --out, or move it")
    with trusting(subject, trust=trust):
        model, side = _open(subject, data_dir)
    torch.manual_seed(0)
    example = torch.randn(1, *example_shape(model, img_size or side))
    if fold:
        fold_(model)
    exported = exporting.export(model, example, path, any_size=any_size)
    print_json(exported.to_dict()) if output.as_json else print(exported)
    return 0


COMMAND = Command(export, "RUN|FILE [options]", EXAMPLES)


def _open(subject: str, data_dir: str | None) -> tuple[nn.Module, str | None]:
    """Return the network, and of a run the side of its images."""
    from recast.lab.open import names_a_run, open_model, open_run

    if not names_a_run(subject):
        if not Path(subject).is_file():
            raise RecastError(f"{subject} is neither a run folder nor a file of recast.save")
        return open_model(ModelConfig(subject)), None
    run = open_run(subject, data_dir)
    model = run.models.get("recast", run.models.get("finetuned"))
    assert model is not None
    return model, str(run.data.val.img_size)
