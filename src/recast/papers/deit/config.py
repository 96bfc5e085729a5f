"""Settings that only DeiT, DeiT III, CaiT, ResMLP and PatchConvNet need."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from recast.config import NotNegative, Positive, Rare
from recast.lab.config.recipe import PaperConfig


class DeitConfig(PaperConfig):
    """DeiT, DeiT III, CaiT, ResMLP"""

    section: ClassVar[str] = "deit"
    drop_path_mode: Annotated[Literal["linear", "uniform"], Rare()] = "linear"
    """linear: from 0 at the first block to drop_path at the last. uniform: the same in every block."""
    layer_scale: Annotated[NotNegative | None, Rare()] = None
    """Value that the network's LayerScale starts with. None: as the network was built."""
    init_std: Annotated[Positive | None, Rare()] = None
    """Draw the weights of linear layers and tokens anew with this standard deviation, as DeiT does (0.02), all else as
    torch does. None: as the network was built."""
