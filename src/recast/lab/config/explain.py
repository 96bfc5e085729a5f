"""What `recast explain` can be asked for, as plain data."""

from __future__ import annotations

from typing import Annotated, Literal

from recast.config import Classes, Config, Count, CropShare, FilePath, Port, Positive, Probability, Rare


class ExplainOptions(Config):
    """Explanation"""

    subject: str
    """Run folder or model."""
    images: list[str] = []
    """Files and folders; of a run val:N."""
    out: FilePath | None = None
    """Output file, .html or .png. None: RUN/explain/IMAGE.html, or here."""
    layer: str | None = None
    """Layer to open first, or to draw in a PNG."""
    outputs: Literal["softmax", "sigmoid", "logits"] | None = None
    """Outputs as exclusive classes, labels that may occur together, or as they are. None: sigmoid for one output, else
    softmax."""
    neighbours: bool = False
    """Show the ten nearest training images of a run instead."""
    serve: bool = False
    """Serve a page on this machine that takes one image after the other; Ctrl-C ends it."""
    port: Annotated[Port | None, Rare()] = None
    """Port of --serve; 0 for a free one. None: 8765."""
    img_size: str | None = None
    """Pixels, 224 or 224x160 (height x width). None: the network's."""
    num_images: Count = 16
    """Largest number of images."""
    checkpoint: FilePath | None = None
    """Weights of a model, .safetensors or .pth."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Which weights of a checkpoint with several, e.g. state_dict. None: as timm, EMA first."""
    pretrained: bool = False
    """Let timm or torchvision fetch the model's weights."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Classes of the model's head."""
    classes: FilePath | None = None
    """Text file with a name of a class per line. None: ImageNet's for 1,000 classes, else numbers."""
    mean: Annotated[tuple[Probability, Probability, Probability] | None, Rare()] = None
    """Normalization of a model, R G B in [0, 1] pixels. None: the model's (timm's), else ImageNet's."""
    std: Annotated[tuple[Positive, Positive, Positive] | None, Rare()] = None
    """Normalization of a model. None: as for the mean."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that a model's center crop keeps. None: the model's, else 0.875, and 1 for small
    images."""
    device: str = "cpu"
    """auto, cpu, cuda or mps."""
