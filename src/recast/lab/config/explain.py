"""What `recast explain` can be asked for, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from recast.fields import Classes, Count, CropShare, PixelMean, Port, Positive


@dataclass
class ExplainOptions:
    """What a page shows, of which network and images."""

    subject: str = ""
    """run folder of recast train; or a model: timm:NAME (or NAME), torchvision:NAME,
    upernet|maskrcnn|fasterrcnn|retinanet:NAME, pkg.module:function, or a file of recast.save"""
    images: list[str] = field(default_factory=list)
    """files, folders; of a run val:N, default four of those"""
    out: str | None = None
    """the file, .html or .png; default RUN/explain/IMAGE.html, or here"""
    layer: str | None = None
    """the layer to open first, or to draw in a PNG"""
    outputs: Literal["softmax", "sigmoid", "logits"] | None = None
    """how the outputs are read: exclusive classes, labels that may occur together, or as they are; default sigmoid for
    one output, else softmax"""
    neighbours: bool = False
    """of a run: the ten training images nearest to each image instead of where the network looks"""
    serve: bool = False
    """a page in the browser, on this machine alone, that takes one image after the other; Ctrl-C ends it"""
    port: Port | None = None
    """of --serve, 0 for a free one; default 8765"""
    img_size: str | None = None
    """224, or 224x160 (height x width); default the network's own"""
    num_images: Count = 16
    """at most this many images"""
    checkpoint: str | None = None
    """of a model: weights, .safetensors or .pth"""
    checkpoint_key: str | None = None
    """of a model: which weights of a checkpoint with several, e.g. state_dict; default as timm, EMA first"""
    pretrained: bool = False
    """of a model: fetch the registry's own weights"""
    num_classes: Classes | None = None
    """of a model: classes of the head"""
    classes: str | None = None
    """of a model: names of its classes, a text file, one a line; default ImageNet's for 1,000, else numbers"""
    mean: tuple[PixelMean, PixelMean, PixelMean] | None = None
    """of a model: its normalisation, R G B in [0, 1] pixels; default what it says (timm's do), else ImageNet's"""
    std: tuple[Positive, Positive, Positive] | None = None
    """of a model: as for the mean"""
    crop_pct: CropShare | None = None
    """of a model: share of the short side that the centre crop keeps; default what it says, else 0.875, and 1 for small
    images"""
    device: str = "cpu"
    """auto, cpu, cuda or mps"""
