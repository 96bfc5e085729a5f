"""`Task`, the interface of a task, and `TASKS`, the tasks by name.

Plug-ins (`recast.models.names.PLUGINS`) bring the tasks. This module imports none of them, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from recast.lab.config.recipe import task_name_of_data
from recast.lab.config.tasks import TaskConfig
from recast.lab.evaluation.suites import METRICS, SUITES, Metric, Suite
from recast.lab.plugins import FINDERS, plugged

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from recast.lab.config import DataConfig, Freeze
    from recast.models.config import ModelConfig

    # Classes of modules that import this module. Tasks annotate these parameters with the classes themselves.
    Data: TypeAlias = Any
    RawData: TypeAlias = Any
    Context: TypeAlias = Any
    OpenRun: TypeAlias = Any

Loss = Callable[[Any, Any], Any]
"""Outputs of a network in training and targets of its images → the mean loss, a tensor."""


class Setting(NamedTuple):
    """Circumstances of a training that its loss depends on."""

    steps: int
    """Number of updates."""
    device: torch.device
    amp: torch.dtype | None = None
    """Type of mixed precision."""
    freeze: Freeze = "none"


class Meter(Protocol):
    """A validation in progress."""

    sums: Tensor
    """(k,) float64 on the CPU: sums over the images; several processes add theirs."""

    def add(self, model: nn.Module, images: Tensor, labels: Any) -> float:
        """Count normalised images (B, 3, H, W) with labels on the CPU; return the sum of their losses."""

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return the metrics of `Task.validation` in their order from the `sums` over all processes."""


class StatefulLoss(Protocol):
    """A loss with a state, which is saved with the run's; an `nn.Module`."""

    step: int
    """Number of the next step, over the whole run from 0."""

    @property
    def evaluated(self) -> nn.Module | None:
        """Return the network that is measured and saved instead of the trained one; None: the trained one."""

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor: ...

    def after_step(self, model: nn.Module) -> None:
        """Follow an update of the weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class Task:
    """A task; its members in the order of the folders of `recast.lab` that use them.

    A subclass requires `name`, `title`, `main` and `validation`, data sets (`find`) with the labels that its loss,
    meter and suites take, `loss` and `meter`, and a suite for `main`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """Name in messages: `detection`."""
    main: ClassVar[tuple[str, str]]
    """Suite and metric that a run is judged by, in percent; higher is better."""

    # data

    @property
    def data_sets(self) -> tuple[str, ...]:
        """Return the names (`data.name`) that `find` reads: those of the `TaskConfig` of the same name."""
        config = TaskConfig.members.get(self.name)
        return config.data_sets if config else ()

    def find(self, config: DataConfig) -> RawData:
        """Read one of `data_sets`."""
        raise NotImplementedError

    # training, in the order of a run; `config` is the `task` of the recipe

    validation: ClassVar[tuple[str, ...]]
    """Metrics after every epoch, `val_METRIC` of metrics.jsonl, that of `main` among them."""
    keeps_network: ClassVar[bool] = True
    """True if `adapt_` leaves the network as its constructor builds it."""

    def network(self, config: ModelConfig, data: Data) -> ModelConfig:
        """Return the config of the parent for these images."""
        return config

    def adapt_(self, model: nn.Module, config: Any, classes: int) -> nn.Module:
        """Change a network of `classes` outputs in place to the form that is trained, and return it."""
        return model

    def undone(self, model: nn.Module) -> nn.Module:
        """Return a copy as it was before `adapt_`, or the network itself."""
        return model

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        """Raise RecastError unless `outputs` of the network `name` for an image of `data` are logits of its classes."""
        data.check_logits(outputs, 1)

    def notes(self, config: Any, data: Data) -> Iterator[str]:
        """Yield warnings before training."""
        yield from ()

    def loading(self, config: Any, data: Data) -> dict[str, Any]:
        """Return the arguments of the `Loader` of training images that depend on the task."""
        return {"dataset": data.train}

    def loss(self, config: Any, data: Data) -> Loss:
        """Return the loss of the labels."""
        raise NotImplementedError

    def stateful_loss(
        self, config: Any, data: Data, student: nn.Module, loss: Loss, setting: Setting
    ) -> StatefulLoss | None:
        """Return the loss that replaces `loss`; None: `loss` itself."""
        return None

    def inputs(self, images: Tensor, targets: Any) -> tuple[Any, ...]:
        """Return the arguments of the network in training."""
        return (images,)

    def clipped(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters whose gradients are clipped together."""
        return list(model.parameters())

    def meter(self, data: Data) -> Meter:
        """Return an empty meter for a validation."""
        raise NotImplementedError

    # evaluation

    suites: ClassVar[Mapping[str, Suite]] = {}
    metrics: ClassVar[Mapping[str, Metric]] = {}
    """New metrics of `suites`."""
    not_by_default: ClassVar[tuple[str, ...]] = ()
    """Suites for all tasks that are measured for this one only on request."""

    def draw(self, run: OpenRun, context: Context, suites: Sequence[str]) -> None:
        """Write pictures for the report into the folder of a run that was measured by `suites`."""

    # explain

    whole: ClassVar[bool] = False
    """True if explained image files are filled up to a square instead of cut."""
    crop_pct: ClassVar[float | None] = None
    """Share of the short side that explained image files are cut to; None: that of the data."""
    outputs: ClassVar[Literal["softmax", "sigmoid"] | None] = None
    """How logits become probabilities where images are explained; None: a softmax, of one logit a sigmoid."""

    def examples(self, data: Data, count: int) -> list[int]:
        """Return the indices of at most `count` different validation images to look at."""
        return list(range(min(count, len(data.val))))

    def answer(self, data: Data, label: Any) -> str | None:
        """Return the label of an image as a word; None if it has none."""
        return None


TASKS: dict[str, Task] = {}
"""The tasks of the plug-ins that were loaded; `task_named` loads the others."""


def register_task(task: Task) -> Task:
    """Register a task, its data sets, suites and metrics by their names; return it."""
    FINDERS.update(dict.fromkeys(task.data_sets, task.find))
    METRICS.update(task.metrics)
    SUITES.update(task.suites)
    TASKS[task.name] = task
    return task


def task_named(name: str) -> Task:
    """Return the task of a `task.kind`, or of labels (`data.val.task`)."""
    return plugged(TASKS, name)


def task_of(config: TaskConfig) -> Task:
    """Return the task that a recipe trains for, from its `task`."""
    return task_named(config.kind)


def task_of_data(config: DataConfig) -> Task:
    """Return the task of a data set, the `task` of its images: classification, unless it belongs to another task."""
    return task_named(task_name_of_data(config.name) or TaskConfig.default)


def suites_of(task: Task, only_default: bool = False) -> list[str]:
    """Return the suites for data of a task, all or the default ones; its own come first."""
    return [
        name
        for name, suite in {**task.suites, **SUITES}.items()
        if suite.task in ("", task.name) and (not only_default or (suite.default and name not in task.not_by_default))
    ]
