"""Options of `recast explain`, as plain data."""

from __future__ import annotations

from typing import Annotated, Literal

from recast.config import Classes, Config, Count, FilePath, Positive, Rare
from recast.lab.config.evaluation import Size
from recast.lab.config.types import CropShare, Probability, Words


class ExplainOptions(Config):
    """What a page shows, of which network and images"""

    subject: str = ""
    """Run folder of recast train; or a model: timm:NAME (or NAME), torchvision:NAME,
    upernet|maskrcnn|fasterrcnn|retinanet:NAME, pkg.module:function, or a file of recast.save."""
    images: Words = []  # noqa: RUF012
    """Files, folders; of a run val:N. Default: four of those."""
    out: FilePath | None = None
    """Output file, .html. None: RUN/explain/IMAGE.html, or here."""
    layer: str | None = None
    """Layer to open first."""
    outputs: Literal["softmax", "sigmoid", "logits"] | None = None
    """How the outputs are read: exclusive classes, labels that may occur together, or as they are. None: sigmoid for
    one output, else softmax."""
    neighbours: bool = False
    """Show the ten nearest training images of a run instead."""
    img_size: Size | None = None
    """Size, 224, or 224x160 (height x width). None: the network's own."""
    num_images: Count = 16
    """Largest number of images."""
    checkpoint: FilePath | None = None
    """Weights of a model, .safetensors or .pth."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Which weights of a checkpoint with several, e.g. state_dict. None: as timm, EMA first."""
    pretrained: bool = False
    """Fetch the registry's own weights of a model."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Classes of a model's head."""
    classes: FilePath | None = None
    """Names of a model's classes, a text file, one a line. None: ImageNet's for 1,000, else numbers."""
    mean: Annotated[tuple[Probability, Probability, Probability] | None, Rare()] = None
    """Normalization of a model, R G B in [0, 1] pixels. None: what it says (timm's do), else ImageNet's."""
    std: Annotated[tuple[Positive, Positive, Positive] | None, Rare()] = None
    """Normalization of a model. None: as for the mean."""
    bands: str | None = None
    """Bands that a page shows of images with several, 3,2,1 as red, green and blue, from 1. None: the first three."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that the center crop keeps. None: what a model says, else 0.875, and 1 for small images.
    """
    device: str = "cpu"
    """auto, cpu, cuda or mps."""
