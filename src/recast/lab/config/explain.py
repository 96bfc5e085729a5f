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
    """Image files or folders; val:N for a validation image of a run. Default: four of those."""
    data_dir: Annotated[FilePath | None, Rare()] = None
    """Folder of the images of a run if they moved."""
    out: FilePath | None = None
    """Output file, .html. None: RUN/explain/IMAGE.html, or here."""
    layer: str | None = None
    """Layer that the page shows first."""
    outputs: Literal["softmax", "sigmoid", "logits"] | None = None
    """Interpretation of the outputs. softmax: exclusive classes. sigmoid: labels that may occur together. logits: raw
    values. None: sigmoid for one output, else softmax."""
    neighbours: bool = False
    """Show the ten nearest training images of a run instead of maps."""
    img_size: Size | None = None
    """Image size: 224, or 224x160 (height x width). None: the network's own."""
    num_images: Count = 16
    """Maximum number of images."""
    checkpoint: FilePath | None = None
    """Weights of a model, .safetensors or .pth."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Set of weights to load from a checkpoint with several, e.g. state_dict. None: EMA first, as in timm."""
    pretrained: bool = False
    """Load the pretrained weights of timm or torchvision."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Number of classes of a model's head."""
    classes: FilePath | None = None
    """Text file with the names of a model's classes, one per line. None: ImageNet's for 1,000 classes, else numbers."""
    mean: Annotated[tuple[Probability, Probability, Probability] | None, Rare()] = None
    """Per-channel mean (R G B) of a model's normalization, in [0, 1] pixels. None: the model's own, else ImageNet's."""
    std: Annotated[tuple[Positive, Positive, Positive] | None, Rare()] = None
    """Per-channel standard deviation of a model's normalization. None: as for the mean."""
    bands: str | None = None
    """Bands of multi-band images to show as red, green and blue, counted from 1: 3,2,1. None: the first three."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that the center crop keeps. None: the model's own, else 0.875, or 1 for small images."""
    device: str = "cpu"
    """auto, cpu, cuda or mps."""
