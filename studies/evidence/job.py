"""One training run of a study, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.layers.config import QueryKey
from recast.layers.pool_config import PoolKind, PoolStart


@dataclass(frozen=True)
class Job:
    """Network, images, arm and rates. Its name is its folder."""

    study: str
    arm: str
    seed: int
    data: str
    """cifar10 or cifar100."""
    num_train: int
    updates: int
    network: str = "cifar_resnet20.cifar100"
    """Its tag says with which mean and standard deviation it sees images; or one of `networks.PLAIN_VITS`."""
    parent: str | None = None
    """A file in $RECAST_DATA/weights, or STUDY/ARM: what that run of the same seed ended with. None: random weights."""
    parent_data: str | None = None
    """What the parent was trained on; with other classes than `data` the head is new."""
    size: int = 32
    """Side in pixels to which images are enlarged."""
    lr: float = 1e-3
    batch_size: int = 64
    gate_lr: float = 1e-2
    qk_lr: float | None = None
    weight_decay: float = 0.05
    where: str | None = None
    """What is recast; None: nothing."""
    gate: str = "linear"
    query_key: QueryKey = "zero"
    logit_std: float = 1.5
    schedule: Literal["at_once", "last_first", "first_first"] = "at_once"
    """When: all layers after a share `convolution` of the updates, or one by one (PRS), the last or the first first."""
    convolution: float = 0.0
    stride: Literal["keep", "remove"] = "keep"
    """remove: the last stage at stride 1; without recast layers the compute of attention without attention."""
    pool: PoolKind = "none"
    pool_start: PoolStart = "paper"
    pool_init: float | None = None
    """LayerScale's first value; None: that of `pool_start`, 1e-4 with the paper's."""
    augment: Literal["basic", "deit"] = "basic"
    bf16: bool = False
    """Trained in bf16 on a CPU too, as on a GPU; judged in fp32 always on a CPU."""
    longer: float = 1
    """Times the updates: what the other arm's time would buy."""
    measured: Literal["all", "clean", "fourier"] = "all"
    """fourier: clean, and the spectra of the blocks' maps."""
    tuning: bool = False
    """Judged on the 10 % that are held out, not on the test images."""

    @property
    def folder(self) -> str:
        """STUDY/ARM-SEED, and the rates where they are being chosen."""
        rates = f"-lr{self.lr:g}-gates{self.gate_lr:g}-qk{self.qk_lr}" if self.tuning else ""
        return f"{self.study}/{self.arm.replace(' ', '_').replace('/', 'of')}-{self.seed}{rates}"

    @property
    def num_updates(self) -> int:
        """Updates of this arm."""
        return round(self.longer * self.updates)
