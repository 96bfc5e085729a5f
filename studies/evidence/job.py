"""One training run of a study, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.layers.config import QueryKey
from recast.layers.pool_config import PoolKind, PoolStart


@dataclass(frozen=True)
class Job:
    """Network, images, arm and rates. Its name is its folder. Stored records have these fields."""

    study: str
    arm: str
    seed: int
    data: str
    """cifar10 or cifar100."""
    num_train: int
    updates: int
    network: str = "cifar_resnet20.cifar100"
    """A timm name, whose tag gives mean and standard deviation, or "plain_vit_tiny"."""
    parent: str | None = None
    """A file in $RECAST_DATA/weights, or STUDY/ARM: the weights of that run of the same seed. None: random weights."""
    parent_data: str | None = None
    """The parent's data set; if it is not `data`, the head is new."""
    size: int = 32
    """Side of the images in pixels; they are resized if theirs differs."""
    lr: float = 1e-3
    batch_size: int = 64
    gate_lr: float = 1e-2
    qk_lr: float | None = None
    weight_decay: float = 0.05
    where: str | None = None
    """Layers that are recast; None: none."""
    gate: str = "linear"
    query_key: QueryKey = "zero"
    logit_std: float = 1.5
    schedule: Literal["at_once", "last_first", "first_first"] = "at_once"
    """All layers at once after a share `convolution` of the updates, or layer by layer (PRS) from one end."""
    convolution: float = 0.0
    stride: Literal["keep", "remove"] = "keep"
    """remove: the last stage at stride 1. Without recast layers this is the compute of attention alone."""
    pool: PoolKind = "none"
    pool_start: PoolStart = "paper"
    pool_init: float | None = None
    """LayerScale's first value; None: that of `pool_start`, 1e-4 for "paper"."""
    augment: Literal["basic"] = "basic"
    """Crop and flip."""
    bf16: bool = False
    """True to train in bf16 on a CPU too, as on a GPU. Evaluation is in fp32."""
    longer: float = 1
    """Factor on `updates`: longer training instead of attention."""
    measured: Literal["all", "clean", "fourier"] = "all"
    """fourier: clean, and the spectra of the blocks' maps."""
    tuning: bool = False
    """True for a trial: evaluated on the held-out 10 %, not on the test images."""

    @property
    def folder(self) -> str:
        """Return STUDY/ARM-SEED, with the rates for a trial."""
        rates = f"-lr{self.lr:g}-gates{self.gate_lr:g}-qk{self.qk_lr}" if self.tuning else ""
        return f"{self.study}/{self.arm.replace(' ', '_').replace('/', 'of')}-{self.seed}{rates}"

    @property
    def num_updates(self) -> int:
        """Return the number of updates of this arm."""
        return round(self.longer * self.updates)
