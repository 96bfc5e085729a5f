"""Which network, as plain data: what `models.build.build` takes. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from recast.config import Classes, Config, Count, FilePath, Pixels, Rare


class ModelConfig(Config):
    """Network"""

    name: str = "resnet18"
    """Network: NAME of timm, torchvision:NAME, or pkg.module:function. On a NAME of timm too:
    upernet|maskrcnn|fasterrcnn|retinanet:NAME."""
    checkpoint: FilePath | None = None
    """Weights of the parent, .safetensors or .pth. They are never unpickled."""
    pretrained: bool = False
    """Let timm or torchvision fetch its pretrained weights."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Classes of the head. None: the model's own, or the data set's when training."""
    new_head: bool = False
    """Load the checkpoint without its classifier and draw a new one. For data with other classes."""
    input_size: Annotated[Pixels | None, Rare()] = None
    """Side in pixels for networks built for one size (ViT, CaiT, ResMLP); positions of a checkpoint are resampled."""
    in_chans: Annotated[Count | None, Rare()] = None
    """Channels of an image, for networks of timm. The images then have this many bands: grey (1), TIFF, arrays (.npy,
    .npz: rows x columns x bands). None: RGB."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Which weights of a checkpoint with several, e.g. state_dict. None: as timm, a moving average (EMA) first."""
