"""The complete settings of a run that all tasks and papers share. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, model_validator

from recast.config import EXTENDED, Config, Count, CountOrZero, NotNegative, Positive, Rare, Sections, Seed, clash
from recast.lab.config.inputs import Augmentation, AugmentConfig, DataConfig, LabelsConfig
from recast.lab.config.schedules import AtOnce, Before, Listed, Never, ScheduleConfig
from recast.lab.config.tasks import ClassifyConfig, NoTeacher, TaskConfig, TeacherConfig
from recast.lab.config.types import BelowOne, MayChange, Share, Words
from recast.layers.config import LinearGate, RecastConfig
from recast.layers.pool_config import NoPool, PoolConfig
from recast.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn

Freeze = Literal["none", "batch_norm", "trunk", "all_but_attention", "all_but_batch_norm"]
Off = BeforeValidator(lambda word: "off" if word is False else word)
"""YAML 1.1 reads a bare `off` as false."""


class OptimConfig(Config):
    """Optimizer"""

    opt: str = "adamw"
    """Optimizer, any of timm's."""
    lr: NotNegative = 1e-4
    """Peak learning rate."""
    base_batch: Annotated[Count | None, Rare()] = None
    """lr is for this many images per update and scales linearly with data.batch_size. None: lr is taken as it is."""
    gate_lr: NotNegative | None = None
    """Peak learning rate of the gates. None: 50 x lr (as scaled) for γ and s, 0.1 for the sigmoid's λ (T-CNN), that of
    the weights for λ where a schedule recasts during training (T-CNN*)."""
    qk_lr: Annotated[NotNegative | None, Rare()] = None
    """Peak learning rate of recast layers' queries and keys, as it is (never scaled). None: that of the weights."""
    pool_lr: Annotated[NotNegative | None, Rare()] = None
    """Peak learning rate of attention pooling, as it is (never scaled). None: that of the weights."""
    weight_decay: NotNegative = 0.05
    """Decay of weights. Never of gates, Δ, α, W_val, biases and norms."""
    layer_decay: Annotated[Share | None, Rare()] = None
    """Learning rate of a layer: this to the power of its distance from the head. None: 1."""
    momentum: Annotated[BelowOne, Rare()] = 0.9
    """Momentum, for optimizers that have one."""
    betas: Annotated[tuple[BelowOne, BelowOne] | None, Rare()] = None
    """Adam's and LAMB's decay rates of the moments. None: the optimizer's own."""
    eps: Annotated[Positive | None, Rare()] = None
    """Adam's and LAMB's ε. None: the optimizer's own."""
    warmup_epochs: NotNegative = 1.0
    """Epochs of linear warm-up."""
    warmup_lr: Annotated[NotNegative, Rare()] = 1e-6
    """Learning rate at step 0."""
    min_lr: NotNegative = 1e-6
    """Learning rate at the end."""
    warmup_prefix: Annotated[bool, Rare()] = True
    """The decay begins after the warm-up. Off: at step 0, the warm-up covers its first part (DeiT's schedule)."""
    decay: Literal["cosine", "poly", "linear", "steps"] = "cosine"
    """Learning-rate schedule after the warm-up. poly: the remaining share of the updates to the power of 0.9 (DeepLab).
    linear: to the power of 1 (Swin). steps: to a tenth at 3/4 of them and again at 11/12 (COCO's 3x schedule)."""
    clip_grad: Positive | None = None
    """Clip the gradient's norm at this value. None: not at all, also in LAMB (whose own default is 1)."""
    gate_l1: NotNegative = 0.0
    """L1 on γ and s by a soft threshold after each step. Heads that do not earn their cost close at exactly 0."""


class RegularizationConfig(Config):
    """Regularization"""

    drop_path: BelowOne | None = None
    """Stochastic depth. Probability that a residual branch is left out. None: as the network was built."""
    ema_decay: BelowOne | None = None
    """Keep a moving average of the weights, evaluate and save it."""
    freeze: Freeze = "none"
    """Weights that do not train. batch_norm: its stored statistics are used and not updated. trunk: only attention
    pooling and the classifier train (in the control arm the classifier); everything else keeps its weights and
    BatchNorm statistics and drops nothing. all_but_batch_norm: as trunk, and BatchNorm trains and measures (FixRes).
    all_but_attention: attention trains too, recast layers and transformers' own; other BatchNorm keeps its statistics.
    """


class PaperConfig(Config):
    """Base of the settings that only one paper needs: `papers.NAME` of a recipe, where NAME is `section` of the class.

    Defining a subclass registers it. Training calls the methods.
    """

    section: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        PAPERS[cls.section] = cls
        Recipe.model_rebuild(force=True)

    def check(self, recipe: Recipe) -> None:
        """Raise `clash` for settings of the recipe that contradict these."""

    def check_trained(self) -> None:
        """Raise RecastError for settings that would overwrite trained weights."""

    def draw_(self, model: nn.Module) -> None:
        """Change the random weights that a network starts with."""

    def prepare_(self, model: nn.Module) -> None:
        """Change a network before it is trained, whatever its weights are."""

    def drop_path_(self, model: nn.Module, rate: float) -> None:
        """Change stochastic depth, which rises to `rate` with the depth of the network."""


PAPERS: dict[str, type[PaperConfig]] = {}
"""Settings of papers by their `section`."""


class Recipe(Config):
    """Training"""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    task: TaskConfig = ClassifyConfig()
    papers: Annotated[dict[str, PaperConfig], Sections(PAPERS)] = {}  # noqa: RUF012
    where: Words = ["last_stage"]  # noqa: RUF012  pydantic copies it
    """Layers to recast: last_stage, all, stage:N, names, globs. none: no convolution; without
    --pool the network itself is trained."""
    max_tokens: Count | None = 1024
    """Layers with more tokens (padded pixels) stay convolutions; null: no limit."""
    epochs: CountOrZero = 5
    """Passes over the training images."""
    accumulate: Annotated[Count, Rare(), MayChange()] = 1
    """Parts that a process computes its share of a batch in, one after the other: less memory, the same gradient."""
    amp: Annotated[Literal["off", "bf16", "fp16"], Off] = "off"
    """Mixed precision."""
    channels_last: bool = False
    """Keep maps as NHWC in memory. Faster convolutions on GPUs with mixed precision."""
    compile: bool = False
    """Compile the network with torch.compile."""
    tune: bool = False
    """Time the forms of every recast layer before its first update, and use the fastest (`recast.tune_`)."""
    sync_bn: Annotated[bool, Rare()] = False
    """Compute BatchNorm's statistics over all GPUs."""
    control: Annotated[bool, MayChange()] = True
    """Also train the parent the same way, as a control. Without it a gain is no evidence for attention."""
    save_steps: Annotated[Count | None, Rare(), MayChange()] = None
    """Also save the state every N updates, not only after every epoch."""
    seed: Seed = 0
    """Seed of weights, order and augmentation."""
    device: Annotated[str, MayChange()] = "auto"
    """auto, cpu, cuda or mps."""
    recast: RecastConfig = LinearGate()
    pool: PoolConfig = NoPool()
    schedule: ScheduleConfig = Before()
    optim: OptimConfig = OptimConfig()
    regularization: RegularizationConfig = RegularizationConfig()

    @property
    def has_layers(self) -> bool:
        """True if convolutions become attention."""
        return self.where != ["none"]

    @property
    def attention(self) -> str:
        """Name of what a convolution becomes."""
        return "C-MHSA" if self.recast.gate == "bias" else f"{self.recast.gate} gate"

    @property
    def is_plain(self) -> bool:
        """True if nothing is recast, neither convolutions nor the pooling: the network itself is trained."""
        return not (self.has_layers or self.pool.is_on)

    @property
    def teacher(self) -> TeacherConfig:
        """The teacher beside the labels; `NoTeacher` of tasks that have none."""
        return getattr(self.task, "teacher", NoTeacher())

    @property
    def labels(self) -> LabelsConfig:
        """The labels that images are trained with."""
        return next((paper for paper in self.papers.values() if isinstance(paper, LabelsConfig)), LabelsConfig())

    @property
    def augmentation(self) -> Augmentation:
        """What is done to a training image."""
        fields = vars(self.task) | vars(self.augment)
        return Augmentation(**{name: fields[name] for name in Augmentation.__dataclass_fields__ if name in fields})

    @model_validator(mode="before")
    @classmethod
    def _with_task(cls, values: Any) -> Any:
        """Let the data set choose the task where the recipe does not."""
        if not isinstance(values, dict):
            return values
        data, task = values.get("data", {}), values.get("task", {})
        name = data.get("name") if isinstance(data, dict) else getattr(data, "name", None)
        if isinstance(task, dict) and "kind" not in task and (kind := task_name_of_data(name)):
            return {**values, "task": {"kind": kind, **task}}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Check the rules between sections that no union of configs can express."""
        schedule, gate = self.schedule, self.recast.gate
        if isinstance(schedule, Never):
            if self.recast.stride == "keep" or gate != "linear":
                raise clash("`schedule.kind` never requires `recast.stride` remove, and `recast.gate` linear")
        elif schedule.is_during and not self.has_layers:
            raise clash(f"`schedule.kind` {schedule.kind} requires layers, but `where` is none")
        if self.tune and (self.compile or gate == "bias" or not self.has_layers):
            raise clash("`tune` times attention layers of gates linear and sigmoid, and no compiled code: drop `tune`")
        if isinstance(schedule, AtOnce) and schedule.conv_epochs >= self.epochs:
            raise clash(f"`schedule.conv_epochs` must be below `epochs` ({self.epochs}), got {schedule.conv_epochs}")
        if isinstance(schedule, Listed) and not all(1 <= date <= self.epochs for date in schedule.by_epoch):
            raise clash(f"`schedule.dates` must lie in epochs 1 to {self.epochs}")
        if self.optim.gate_l1 and gate != "linear":
            raise clash(f"`optim.gate_l1` requires `recast.gate` linear, got {gate}")
        if (freeze := self.regularization.freeze) in ("trunk", "all_but_batch_norm") and self.has_layers:
            raise clash(
                f"`regularization.freeze` {freeze} requires `where` none, as recast layers would never train; or take "
                "all_but_attention"
            )
        if (kind := task_name_of_data(self.data.name) or self.task.kind) != self.task.kind:
            raise clash(f"`data.name` {self.data.name} requires `task.kind` {kind}, got {self.task.kind}")
        self.task.check(self)
        for paper in self.papers.values():
            paper.check(self)
        return self


EXTENDED.append(Recipe)


def task_name_of_data(name: Any) -> str | None:
    """Return the only task of a data set; None if several tasks can use it."""
    return next((kind for kind, task in TaskConfig.members.items() if name in task.data_sets), None)
