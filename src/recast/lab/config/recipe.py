"""One run, as plain data, and what its fields ask of one another; what a field asks by itself is in its type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from recast.errors import RecastError
from recast.fields import Checked, Count, CountOrZero, Seed, check_fields
from recast.lab.config.inputs import AugmentConfig, DataConfig
from recast.lab.config.training import DistillConfig, EmbeddingConfig, OptimConfig, RegularizationConfig
from recast.layers.config import PoolConfig, RecastConfig, ScheduleConfig, parse_dates
from recast.models.config import ModelConfig


@dataclass
class Recipe(Checked):
    """One run, complete: which parent, which data, what becomes attention, how it is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    recast: RecastConfig = field(default_factory=RecastConfig)
    where: list[str] = field(default_factory=lambda: ["last_stage"])
    """Layers to recast: last_stage, all, stage:N, names, globs, re:REGEX; auto: what training images rank best
    within the budget. none: no convolution; with the network's own pooling (pool.kind none) the network is trained."""
    budget: str = "tokens=1024"
    """Limits of a plan: tokens=N per layer; macs=, params=, memory=, ms= of the recast model (1.3x, 5G, 64MiB)."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    calibrate: CountOrZero = 0
    """Sigmoid gate: solve W_out on this many training images right after the recast; 0: the paper's start."""
    recalibrate_bn: CountOrZero = 0
    """Measure BatchNorm's statistics again on this many training images right after the recast; 0: the parent's."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    regularization: RegularizationConfig = field(default_factory=RegularizationConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
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
    seed: Seed = 0
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


def check_recipe(recipe: Recipe) -> None:
    """Raise RecastError for what no training can use: the first number out of its range, the first two that clash."""
    for config in (recipe, *vars(recipe).values()):  # again: recipes may have been changed since they were made
        if isinstance(config, Checked):
            check_fields(config)
    for clashes, message in _clashes(recipe):
        if clashes:
            raise RecastError(message)


def _clashes(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    """What fields ask of one another, and what is wrong where they do not get it."""
    from recast.lab.tasks import task_of

    gate, scale, feature_epochs = recipe.recast.gate, recipe.augment.scale, recipe.distill.feature_epochs
    freeze = recipe.regularization.freeze
    yield scale[0] > scale[1], f"augment.scale must be (smallest, largest) share of the area, got {scale}"
    yield (
        recipe.calibrate > 0 and gate != "sigmoid",
        "calibrate is for gate='sigmoid': the linear gate already starts as the parent itself",
    )
    yield (
        recipe.optim.gate_l1 > 0 and gate != "linear",
        f"optim.gate_l1 closes the heads of gate='linear', got gate={gate!r}: leave it out",
    )
    yield from _schedule_clashes(recipe)
    yield from task_of(recipe).clashes(recipe)
    yield (
        freeze in ("trunk", "all_but_batch_norm") and recipe.has_layers,
        f"regularization.freeze={freeze} leaves the recast layers (where {' '.join(recipe.where)}) as they are: they "
        "would never train; add --where none, or take freeze=all_but_attention",
    )
    yield (
        feature_epochs > recipe.epochs,
        f"distill.feature_epochs must be at most epochs ({recipe.epochs}), got {feature_epochs}: it is the first part "
        "of the training",
    )


def _schedule_clashes(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    """Options that the schedule has no use for, and a schedule without anything to do."""
    config, name = recipe.schedule, recipe.schedule.name
    for field_name, belongs in (("conv_epochs", "at_once"), ("dates", "listed"), ("order", "progressive")):
        yield (
            name != belongs and getattr(config, field_name) != getattr(ScheduleConfig(), field_name),
            f"schedule.{field_name} belongs to schedule={belongs}, got schedule={name}: leave it out",
        )
    yield (
        name == "at_once" and config.conv_epochs >= recipe.epochs,
        f"schedule.conv_epochs is {config.conv_epochs} of {recipe.epochs} epochs: no epoch of attention is left; "
        "take fewer, or --where none for the convolutional network alone",
    )
    for date in parse_dates(config.dates) if name == "listed" else ():
        yield (
            not 1 <= date <= recipe.epochs,
            f"schedule.dates must lie in the training, epochs 1 to {recipe.epochs}, got {date}",
        )
    yield (
        name == "never" and (recipe.recast.stride == "keep" or recipe.recast.gate != "linear"),
        "schedule=never is for the stride alone: it goes with recast.stride=remove and recast.gate=linear, got "
        f"stride={recipe.recast.stride}, gate={recipe.recast.gate}",
    )
    if not config.is_during:
        return
    yield (
        "learned" in (name, config.order) and recipe.recast.stride != "keep",
        f"a learned schedule measures gates where the recast is exact, got stride={recipe.recast.stride}: take keep",
    )
    yield (
        not recipe.has_layers,
        f"where none recasts no convolution, so schedule={name} has no layers: leave one of them out",
    )
    for used, value in (
        ("calibrate", recipe.calibrate),
        ("recalibrate_bn", recipe.recalibrate_bn),
        ("distill.feature_epochs", recipe.distill.feature_epochs),
    ):
        yield value > 0, f"{used} prepares a network that is recast before training, got schedule={name}: leave it out"
