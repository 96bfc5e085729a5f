"""`Task`, the questions that everything else asks of a task, and `TASKS`, the tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from recast.lab.config.tasks import TaskConfig
from recast.lab.suites import METRICS, SUITES, Metric, Suite

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from recast.lab.config import DataConfig, Recipe
    from recast.lab.data import Data
    from recast.lab.data.datasets import Found
    from recast.lab.evaluation.context import Context
    from recast.lab.evaluation.run_folder import OpenRun
    from recast.lab.evaluation.suites import Evaluator
    from recast.models.config import ModelConfig

Loss = Callable[[Any, Any], Any]
"""What a network returns in training and the targets of its images → the mean loss, a tensor."""


class Meter(Protocol):
    """A validation as it goes on."""

    sums: Tensor
    """(k,) float64 on the CPU: what is added up over the images. Several processes add theirs."""

    def add(self, model: nn.Module, images: Tensor, labels: Any) -> float:
        """Count normalised images (B, 3, H, W); labels are still on the CPU. Return the sum of their losses."""

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return the metrics of `Task.validation` in their order, of `sums` over all processes."""


class StatefulLoss(Protocol):
    """A loss that keeps something from step to step; an `nn.Module`, as its state is part of the run's."""

    step: int
    """Number of the step that comes next, over the whole run from 0."""

    @property
    def evaluated(self) -> nn.Module | None:
        """The network that is measured and kept in place of the one that is trained; None: that one."""

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor: ...

    def after_step(self, model: nn.Module) -> None:
        """The weights have moved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class Task:
    """What is asked of an image. A subclass sets the words and answers the questions that have no default.

    A task needs `name`, `title`, `main` and `validation`, its data sets (`data_sets`, `find`: the labels of their
    images are what its loss, meter and suites take), `loss` and `meter`, and a suite with its evaluator for `main`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """In messages: `detection`."""
    main: ClassVar[tuple[str, str]]
    """Suite and metric that a run is judged by: in percent, the higher the better."""
    validation: ClassVar[tuple[str, ...]]
    """Metrics after every epoch, `val_METRIC` of metrics.jsonl. That of `main` is among them."""
    counts_images: ClassVar[bool] = False
    """The metric of `main` is the share of images that are right."""
    suites: ClassVar[Mapping[str, Suite]] = {}
    metrics: ClassVar[Mapping[str, Metric]] = {}
    """Of `suites`, where they are not known."""
    unasked: ClassVar[tuple[str, ...]] = ()
    """Suites for all tasks that this one is measured by only where they are asked for."""
    keeps_network: ClassVar[bool] = True
    """The network is trained as its constructor builds it: `adapt_` leaves it as it is."""
    whole: ClassVar[bool] = False
    """Image files that are explained are seen whole, the rest of the square filled up, instead of cut."""
    outputs: ClassVar[Literal["softmax", "sigmoid"] | None] = None
    """How logits become probabilities where images are explained; None: a softmax, of one logit a sigmoid."""
    crop_pct: ClassVar[float | None] = None
    """Share of the short side that image files are cut to where they are explained; None: that of the data."""

    @property
    def data_sets(self) -> tuple[str, ...]:
        """Names (`data.name`) that `find` knows: those of its settings, the `TaskConfig` of the same name."""
        config = TaskConfig.members.get(self.name)
        return config.data_sets if config else ()

    def find(self, config: DataConfig) -> Found:
        """Read one of `data_sets`."""
        raise NotImplementedError

    def check_data(self, recipe: Recipe, data: Data) -> None:
        """Raise RecastError for data that this training cannot use."""

    def notes(self, recipe: Recipe, data: Data) -> Iterator[str]:
        """Yield what to warn of before training."""
        yield from ()

    def network(self, config: ModelConfig, data: Data) -> ModelConfig:
        """Return what the parent is built from, for these images."""
        return config

    def adapt_(self, model: nn.Module, recipe: Recipe, classes: int) -> nn.Module:
        """Give a network of `classes` outputs the form that is trained, in place, and return it."""
        return model

    def undone(self, model: nn.Module) -> nn.Module:
        """Return a copy as it was before `adapt_`, or the network itself."""
        return model

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        """Raise RecastError unless `outputs` are those for one image of `data`; `name` is the network's."""
        raise NotImplementedError

    def loading(self, recipe: Recipe, data: Data) -> dict[str, Any]:
        """Return what a `Loader` of training images is given that depends on the task."""
        return {"dataset": data.train}

    def loss(self, config: Any, data: Data) -> Loss:
        """Return the loss of the labels; `config` is the recipe's `task`."""
        raise NotImplementedError

    def stateful_loss(
        self, recipe: Recipe, data: Data, student: nn.Module, loss: Loss, steps: int, device: torch.device,
        amp: torch.dtype | None,
    ) -> StatefulLoss | None:  # fmt: skip
        """Return what is minimised in place of `loss`, over `steps` steps; None: `loss` itself."""
        return None

    def inputs(self, images: Tensor, targets: Any) -> tuple[Any, ...]:
        """Return what the network is given in training."""
        return (images,)

    def clipped(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters whose gradient is clipped, together."""
        return list(model.parameters())

    def meter(self, data: Data) -> Meter:
        """Return an empty meter for a validation."""
        raise NotImplementedError

    def evaluators(self) -> Mapping[str, Evaluator]:
        """Return how `suites` are measured, by their names."""
        return {}

    def draw(self, run: OpenRun, context: Context, suites: Sequence[str]) -> None:
        """Write pictures for the report into the folder of a run whose arms were measured by `suites`."""

    def examples(self, data: Data, count: int) -> list[int]:
        """Return the numbers of `count` validation images to look at, as different as they come."""
        return list(range(min(count, len(data.val))))

    def answer(self, data: Data, label: Any) -> str | None:
        """Return the right answer to an image as a word; None where there is none."""
        return None


TASKS: dict[str, Task] = {}
"""By name."""


def register_task(task: Task) -> Task:
    """Make a task, its suites and its metrics known by their names; returns it.

    >>> from recast.lab.tasks import Classify
    >>> class Counting(Classify):
    ...     name = "count"
    >>> TASKS.pop(register(Counting()).name).title
    'classification'
    """
    METRICS.update(task.metrics)
    SUITES.update(task.suites)
    TASKS[task.name] = task
    return task


def task_of(recipe: Recipe) -> Task:
    """Return the task that a recipe trains for."""
    if recipe.task.kind not in TASKS:
        from recast.models.sources import plug_in

        plug_in()
    return TASKS[recipe.task.kind]


def task_of_data(config: DataConfig) -> Task:
    """Return the task that a data set is for, as `Data.task`: classification, unless it is another task's own."""
    return next((task for task in TASKS.values() if config.name in task.data_sets), TASKS["classify"])


def suites_of(task: Task, only_default: bool = False) -> list[str]:
    """Return the suites that data of a task can be measured by, or those that it is by default; its own come first."""
    return [
        name for name, suite in {**task.suites, **SUITES}.items()
        if suite.task in ("", task.name) and (not only_default or (suite.default and name not in task.unasked))
    ]  # fmt: skip
