"""One run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from recast.run.config.inputs import AugmentConfig, DataConfig, ModelConfig
from recast.run.config.layer import RecastConfig
from recast.run.config.pool import PoolConfig
from recast.run.config.schedule import ScheduleConfig
from recast.run.config.training import DistillConfig, OptimConfig, RegularizationConfig
from recast.run.fields import Count, CountOrZero, check_fields


@dataclass
class Recipe:
    """One run, complete: which parent, which data, what becomes attention, how it is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    recast: RecastConfig = field(default_factory=RecastConfig)
    where: list[str] = field(default_factory=lambda: ["last_stage"])
    """Layers to recast: last_stage, all, stage:N, names, globs, re:REGEX. none: no convolution; with the network's own
    pooling (pool.kind none) the network itself is trained."""
    budget: str = "tokens=1024"
    """Limits of a plan: tokens=N per layer; macs=, params=, memory= of the recast model (1.3x, 5G, 64MiB)."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    calibrate: CountOrZero = 0
    """Sigmoid gate: solve W_out on this many training images right after the recast; 0: the paper's start."""
    recalibrate_bn: CountOrZero = 0
    """Measure BatchNorm's statistics again on this many training images right after the recast; 0: the parent's."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    regularization: RegularizationConfig = field(default_factory=RegularizationConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    epochs: CountOrZero = 5
    """Passes over the training images."""
    accumulate: Count = 1
    """Parts that a process computes its share of a batch in, one after the other: less memory, the same gradient."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Mixed precision."""
    channels_last: bool = False
    """Keep maps as NHWC in memory: faster convolutions on GPUs with mixed precision."""
    compile: bool = False
    """torch.compile the network."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower (timm's networks)."""
    sync_bn: bool = False
    """Several GPUs: BatchNorm's statistics over all of them."""
    control: bool = True
    """Also train the parent itself the same way: without this arm a gain proves nothing."""
    save_steps: Count | None = None
    """Save the state every so many updates too; after every epoch it is saved anyway."""
    keep: Count = 2
    """How many of the newest states are kept."""
    keep_every: Count | None = None
    """Keep the weights of every so many epochs too, and those of epoch 0, before training: `checkpoints/` in the run
    folder, for `recast explain` and analyses over epochs. None: only the last weights."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Where metrics go besides metrics.jsonl."""
    seed: int = 0
    """Seed of weights, order and augmentation."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""

    @property
    def has_layers(self) -> bool:
        """Convolutions become attention."""
        return self.where != ["none"]

    @property
    def is_plain(self) -> bool:
        """Nothing is recast, neither convolutions nor the pooling: the network itself is trained."""
        return not (self.has_layers or self.pool.is_on)

    def __post_init__(self) -> None:
        check_fields(self)
