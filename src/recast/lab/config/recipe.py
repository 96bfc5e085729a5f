"""The complete settings of a run that all tasks and papers share. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, model_validator

from recast.config import EXTENDED, Config, Count, CountOrZero, NotNegative, Positive, Rare, Sections, Seed, clash
from recast.errors import RecastError
from recast.lab.config.inputs import Augmentation, AugmentConfig, DataConfig
from recast.lab.config.schedules import AtOnce, Before, Listed, Never, ScheduleConfig
from recast.lab.config.tasks import ClassifyConfig, NoTeacher, TaskConfig, TeacherConfig
from recast.lab.config.types import BelowOne, MayChange, Share, Words
from recast.layers.config import BesideGate, RecastConfig
from recast.layers.pool_config import NoPool, PoolConfig
from recast.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    """Batch size that lr is meant for; lr scales linearly with data.batch_size. None: lr is not scaled."""
    gate_lr: NotNegative | None = None
    """Peak learning rate of the gates. None: 50 x lr (after scaling) for γ and s, 0.1 for the sigmoid's λ (T-CNN), that
    of the weights for λ if a schedule recasts during training (T-CNN*)."""
    qk_lr: Annotated[NotNegative | None, Rare()] = None
    """Peak learning rate of queries and keys, never scaled. None: the weights', × 64 / C if beside C > 64 channels."""
    pool_lr: Annotated[NotNegative | None, Rare()] = None
    """Peak learning rate of attention pooling, never scaled. None: that of the weights."""
    weight_decay: NotNegative = 0.05
    """Weight decay. Not applied to gates, Δ, α, W_val, biases and norms."""
    layer_decay: Annotated[Share | None, Rare()] = None
    """Factor of the learning rate per layer of distance from the head. None: 1."""
    momentum: Annotated[BelowOne, Rare()] = 0.9
    """Momentum, for optimizers that use it."""
    betas: Annotated[tuple[BelowOne, BelowOne] | None, Rare()] = None
    """Decay rates of the moments in Adam and LAMB. None: the optimizer's default."""
    eps: Annotated[Positive | None, Rare()] = None
    """ε of Adam and LAMB. None: the optimizer's default."""
    warmup_epochs: NotNegative = 1.0
    """Epochs of linear warm-up."""
    warmup_lr: Annotated[NotNegative, Rare()] = 1e-6
    """Learning rate at step 0."""
    min_lr: NotNegative = 1e-6
    """Learning rate at the end."""
    warmup_prefix: Annotated[bool, Rare()] = True
    """Start the decay after the warm-up. Off: start it at step 0; the warm-up replaces its first part (DeiT)."""
    decay: Literal["cosine", "poly", "linear", "steps"] = "cosine"
    """Learning-rate decay. poly: proportional to the share of remaining updates to the power of 0.9 (DeepLab). linear:
    proportional to that share (Swin). steps: divided by 10 after 3/4 and 11/12 of the updates (COCO's 3x schedule)."""
    clip_grad: Positive | None = None
    """Clip the gradient's norm at this value. None: no clipping, not even in LAMB (which by default clips at 1)."""
    gate_l1: NotNegative = 0.0
    """L1 penalty on γ and s, by a soft threshold after each step. Heads whose gain is smaller close at exactly 0."""


class RegularizationConfig(Config):
    """Regularization"""

    drop_path: BelowOne | None = None
    """Stochastic depth: probability that a residual branch is dropped. None: as the network was built."""
    ema_decay: BelowOne | None = None
    """Decay of a moving average of the weights (EMA), which is evaluated and saved. None: no EMA."""
    freeze: Freeze = "none"
    """Weights that do not train. batch_norm: BatchNorm uses its stored statistics and does not update them. trunk: only
    attention pooling and the classifier train (in the control arm the classifier); everything else keeps its weights
    and BatchNorm statistics, without dropout. all_but_batch_norm: as trunk, but BatchNorm trains and updates its
    statistics (FixRes). all_but_attention: attention (recast layers, transformers' own), pooling and classifier train;
    BatchNorm keeps its statistics, dropout stays on."""


class Groups(NamedTuple):
    """Groups of the classes of a data set."""

    of: Tensor
    """(classes,) int64: the group of every class."""
    names: list[str]


class PaperConfig(Config):
    """Base of the settings that only one paper needs: `papers.NAME` of a recipe, where NAME is `section` of the class.

    A subclass registers itself. Training calls the methods.
    """

    section: ClassVar[str]
    groups_classes: ClassVar[bool] = False
    """True if `groups` may return some."""
    files: ClassVar[Mapping[str, str]] = {}
    """Fields that name a file → the name of its copy in a run folder."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        PAPERS[cls.section] = cls
        Recipe.model_rebuild(force=True)

    def check(self, recipe: Recipe) -> None:
        """Raise `clash` for settings of the recipe that contradict these."""

    def groups(self, data: str, classes: list[str]) -> Groups | None:
        """Return the groups of the classes of a data set; None without any."""
        return None

    @property
    def learns_groups(self) -> bool:
        """True if the labels of the training are the groups, not the classes."""
        return False

    def with_labels(self, labels: str | None) -> Self:
        """Return these settings with other labels; None: those of classes. Raises RecastError for unknown ones."""
        raise RecastError(f"labels={labels}: no settings of this recipe group classes; drop it")

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


def _installed() -> None:
    """Load the entry points `recast.extensions` of installed packages, the papers' among them."""
    for entry in entry_points(group="recast.extensions"):
        entry.load()


EXTENSIONS: list[Callable[[], object]] = [_installed]
"""Functions that add settings, tasks and recipes of papers. They are called once a name is missing without them."""


def extend() -> None:
    """Call the `EXTENSIONS`."""
    while EXTENSIONS:
        EXTENSIONS.pop()()


class Recipe(Config):
    """Training"""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    task: TaskConfig = ClassifyConfig()
    papers: Annotated[dict[str, PaperConfig], Sections(PAPERS)] = {}  # noqa: RUF012
    where: Words | None = None
    """Layers to recast: last_of_blocks (each block's last convolution in the last stage; the default of gate beside),
    last_stage (the default of other gates), last, all, stage:N, names, globs. none: no layers; without --pool the
    unchanged network is trained."""
    max_tokens: Count | None = 1024
    """Layers with more tokens (padded pixels) stay convolutions; null: no limit."""
    epochs: CountOrZero = 5
    """Passes over the training images."""
    accumulate: Annotated[Count, Rare(), MayChange()] = 1
    """Split each process's share of a batch into N parts, computed in turn: less memory, the same gradient."""
    grad_checkpointing: Annotated[bool, Rare(), MayChange()] = False
    """Compute the activations of each block again in the backward pass instead of storing them: less memory, the same
    gradient, about a third more time. timm's switch."""
    amp: Annotated[Literal["off", "bf16", "fp16"], Off] = "off"
    """Mixed precision."""
    channels_last: bool = False
    """Keep maps as NHWC in memory. Faster convolutions on GPUs with mixed precision."""
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], Off] = "off"
    """Mode of torch.compile; reduce-overhead replays CUDA graphs, for networks that wait for the launch of kernels."""
    tune: bool = False
    """Time the implementations of every recast layer before its first update and use the fastest (`recast.tune_`)."""
    sync_bn: Annotated[bool, Rare()] = False
    """Compute BatchNorm's statistics over all GPUs."""
    control: Annotated[bool, MayChange()] = True
    """Also train the parent the same way, as a control. Without it, a gain is no evidence for attention."""
    save_steps: Annotated[Count | None, Rare(), MayChange()] = None
    """Also save the state every N updates, not only after every epoch."""
    seed: Seed = 0
    """Random seed of weights, image order and augmentation."""
    device: Annotated[str, MayChange()] = "auto"
    """auto, cpu, cuda or mps."""
    recast: RecastConfig = BesideGate()
    pool: PoolConfig = NoPool()
    schedule: ScheduleConfig = Before()
    optim: OptimConfig = OptimConfig()
    regularization: RegularizationConfig = RegularizationConfig()

    @property
    def has_layers(self) -> bool:
        """True if convolutions become attention."""
        return self.where != ["none"]

    @property
    def selection(self) -> list[str]:
        """The layers to recast, also where the gate chooses them."""
        return [self.recast.where] if self.where is None else self.where

    @property
    def attention(self) -> str:
        """Name of what a convolution becomes."""
        gate = self.recast.gate
        return {"bias": "C-MHSA", "beside": "attention beside"}.get(gate, f"{gate} gate")

    @property
    def is_plain(self) -> bool:
        """True if neither convolutions nor the pooling are recast: the network itself is trained."""
        return not (self.has_layers or self.pool.is_on)

    @property
    def teacher(self) -> TeacherConfig:
        """The teacher beside the labels; `NoTeacher` of tasks that have none."""
        return getattr(self.task, "teacher", NoTeacher())

    @property
    def functions(self) -> tuple[str | None, str | None]:
        """The names of model and teacher, which may be functions of the user."""
        return self.model.name, getattr(self.teacher, "teacher_model", None)

    def plain(self) -> dict[str, Any]:
        """Return the recipe as a file holds it."""
        return self.model_dump(mode="json")

    def sized(self) -> Self:
        """Return the recipe with the image size that the network is built for, unless it has one."""
        if self.data.img_size is not None or self.model.input_size is None:
            return self
        return self.replace(data=self.data.replace(img_size=self.model.input_size))

    @property
    def grouping(self) -> PaperConfig:
        """The settings that group classes, by default those of the paper that can."""
        papers = (*self.papers.values(), *(paper() for paper in PAPERS.values()))
        return next((paper for paper in papers if paper.groups_classes), PaperConfig())

    @property
    def augmentation(self) -> Augmentation:
        """The augmentation of a training image."""
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
        if self.tune and (self.compile != "off" or gate == "bias" or not self.has_layers):
            raise clash("`tune` requires recast layers with another `gate` than bias, without `compile`; drop `tune`")
        if isinstance(schedule, AtOnce) and schedule.conv_epochs >= self.epochs:
            raise clash(f"`schedule.conv_epochs` must be below `epochs` ({self.epochs}), got {schedule.conv_epochs}")
        if isinstance(schedule, Listed) and not all(1 <= date <= self.epochs for date in schedule.by_epoch):
            raise clash(f"`schedule.dates` must lie in epochs 1 to {self.epochs}")
        if self.optim.gate_l1 and gate not in ("beside", "linear"):
            raise clash(f"`optim.gate_l1` requires `recast.gate` beside or linear, got {gate}")
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
