"""`recast export RUN|FILE`: an ONNX file or an exported program, checked against the module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from recast.errors import RecastError
from recast.files import check_place
from recast.lab.cli.help import Command
from recast.lab.cli.options import ComputeOptions, TrustOption, Words, parse, print_json
from recast.models.config import ModelConfig
from recast.models.trust import trusting

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """  recast export runs/mine                                  (runs/mine/model.onnx)
  recast export child.safetensors --to torch --out child.pt2
  recast export resnet50 --pretrained --img-size 224x160   (a network that was not recast)

The file takes any batch, and any height and width where the network does; images normalised as in training.
ONNX needs pip install 'recast-vision[export]'. To run the files from Python:
  onnxruntime.InferenceSession("model.onnx"), torch.export.load("model.pt2").module()
"""
ABOUT = """Write the recast network of a run, or a saved one, for other software, and show that the file computes the
same: it is run on 1 and 3 images at two sizes and compared with the module. More than 1e-4 apart is an error.
Closed heads are folded first (exact), so that a layer whose heads stayed closed is a plain convolution."""


@dataclass
class Options(TrustOption, ComputeOptions):
    """Options of the command."""

    WORDS: ClassVar[Words] = {"subject": "1"}
    subject: str = ""
    """a run folder, a file of recast.save, or a model's name"""
    to: Literal["onnx", "torch"] = "onnx"
    """onnx: for ONNX Runtime and others; torch: a program of torch.export"""
    out: str | None = None
    """the file; None: model.onnx or model.pt2 beside the subject"""
    checkpoint: str | None = None
    """weights for a model's name"""
    checkpoint_key: str | None = None
    """which weights of a checkpoint with several, e.g. state_dict; None: as timm, a moving average (EMA) first"""
    pretrained: bool = False
    """fetch the registry's own weights"""
    img_size: str | None = None
    """pixels of the example, 224 or 224x160 (height x width); None: the run's, the network's own, or 224"""
    fold: bool = True
    """fold closed heads first"""


def run(argv: Sequence[str]) -> int:
    """Write, check, and say what was found."""
    options = parse(Command("export", "RUN|FILE|MODEL [options]", ABOUT, EXAMPLES), Options(), argv)
    subject = Path(options.subject)

    import torch

    from recast.exporting import SUFFIX, export, is_export
    from recast.lab.cli.plan import example_shape
    from recast.surgery.folding.model import fold_

    default = (subject if subject.is_dir() else subject.parent) / f"model{SUFFIX[options.to]}"
    out = Path(options.out) if options.out else default
    check_place(out, "--out", default.name)
    if out.exists() and not (out.is_file() and is_export(out)):
        raise RecastError(f"{out} exists and was not written by recast export: choose another --out, or move it")
    with trusting(options.subject, trust=options.trust):
        model, parent, side = _open(options)
    torch.manual_seed(0)
    example = torch.randn(1, *example_shape(model, options.img_size or side))
    if options.fold:
        fold_(model)
    found = export(model, example, out, options.to, parent=parent)
    print_json(found.to_dict()) if options.json else print(found)
    return 0


def _open(options: Options) -> tuple[nn.Module, nn.Module | None, str | None]:
    """The network, and of a run its parent and the side of its images."""
    from recast.lab.evaluation.run_folder import open_run
    from recast.lab.explain.open import names_a_run, open_model

    if names_a_run(options.subject):
        found = open_run(options.subject)
        models = found.models
        model = models.get("recast", models.get("finetuned"))
        assert model is not None
        return model, models.get("parent"), str(found.data.val.img_size)
    config = ModelConfig(options.subject, options.checkpoint, options.pretrained, checkpoint_key=options.checkpoint_key)
    return open_model(config), None, None
