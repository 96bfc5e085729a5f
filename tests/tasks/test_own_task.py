"""A task of one's own, regression, through the code that every task takes: train, evaluate, report.

Everything that the library is told of it stands between the two lines: nothing else knows that it exists.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.cli import main
from recast.lab.config import DataConfig, OptimConfig, Recipe, TaskConfig
from recast.lab.data import Data
from recast.lab.data.datasets import ImageTensors, RawData
from recast.lab.evaluation.context import Batch, Score
from recast.lab.evaluation.evaluators import EVALUATORS, evaluates
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.evaluation.suites import METRICS, SUITES, Metric, Suite
from recast.lab.plugins import FINDERS
from recast.lab.task import TASKS, Loss, Meter, Task, register_task
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.models.config import ModelConfig

# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Values(ImageTensors):
    values: Tensor = field(kw_only=True)
    task = "regress"

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        return super().load(indices, seeds)[0], self.values[torch.as_tensor(indices, dtype=torch.long)]

    def targets(self) -> list[str]:
        return list(map(str, self.values.tolist()))

    def subset(self, indices: Tensor) -> Self:
        return replace(super().subset(indices), values=self.values[indices])


def noise_of_a_mean(count: int, seed: int) -> Values:
    random = torch.Generator().manual_seed(seed)
    values = torch.rand(count, generator=random)
    noise = torch.randint(120, (count, 3, 8, 8), generator=random)
    pixels = (noise + 120 * values[:, None, None, None]).to(torch.uint8)
    return Values(pixels, torch.zeros(count, dtype=torch.long), values=values)


def explained(means: np.ndarray) -> np.ndarray:
    """100 R², of means of (squared error, y, y²)."""
    error, first, second = np.moveaxis(means, -1, 0)
    return 100 * (1 - error / (second - first**2))


def statistics(outputs: Tensor, values: Tensor) -> Tensor:
    return torch.stack([(outputs[:, 0] - values) ** 2, values, values**2], 1).double().cpu()


@evaluates("values", statistics={"r2": explained})
def score(batch: Batch) -> Iterator[Score]:
    for name in batch.models:
        yield Score(name, "r2", statistics(batch.context.logits(name, batch.images), batch.labels))


class ValueMeter:
    def __init__(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)

    def add(self, model: nn.Module, images: Tensor, labels: Any) -> float:
        rows = statistics(model(images).cpu(), labels)
        self.sums += torch.cat([rows.sum(0), torch.tensor([len(rows)])])
        return float(rows[:, 0].sum())

    def values(self, sums: Tensor) -> tuple[float, ...]:
        return (float(explained((sums[:3] / sums[3]).numpy())),)


class RegressConfig(TaskConfig):
    data_sets: ClassVar[tuple[str, ...]] = ("brightness",)
    kind: Literal["regress"] = "regress"


class Regress(Task):
    name, title, main, validation = "regress", "regression", ("values", "r2"), ("r2",)
    metrics: ClassVar[Mapping[str, Metric]] = {"r2": Metric("R²", meaning="share of the variance that is explained")}
    suites: ClassVar[Mapping[str, Suite]] = {
        "values": Suite(
            "Values", "R² of the values", "accuracy", ("r2",), default=True, task="regress", module=__name__
        )
    }

    def find(self, config: DataConfig) -> RawData:
        return RawData("brightness", noise_of_a_mean(200, 0), noise_of_a_mean(40, 1), ["brightness"], flip=False)

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        if outputs.shape != (1, 1):
            raise RecastError(f"{name} must give a number for an image, got {tuple(outputs.shape)}")

    def loss(self, config: Any, data: Data) -> Loss:
        return lambda outputs, values: F.mse_loss(outputs[:, 0].float(), values)

    def meter(self, data: Data) -> Meter:
        return ValueMeter()


# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    task = register_task(Regress())
    data = DataConfig("brightness", batch_size=20)
    optim = OptimConfig(lr=1e-2, warmup_epochs=0)
    recipe = Recipe(ModelConfig("digits_resnet"), data, optim=optim, where=["layer3.1.conv1"], epochs=4, device="cpu")
    yield train(recipe, tmp_path_factory.mktemp("runs") / "own")
    for table, names in (
        (TASKS, [task.name]),
        (FINDERS, task.data_sets),
        (SUITES, task.suites),
        (METRICS, task.metrics),
        (EVALUATORS, task.suites),
    ):
        for name in names:
            del table[name]  # type: ignore[attr-defined]


def test_it_is_trained(run: Path) -> None:
    for folder in (run, run / "finetuned"):
        first, *_, last = read_metrics(folder / "metrics.jsonl")
        assert last["val_r2"] > 90 > first["val_r2"]
        assert last["val_loss"] < first["val_loss"]


def test_it_is_evaluated_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert main(["evaluate", str(run), "--device", "cpu", "--suite", "values"]) == 0
    rows = {row.model: row for row in evaluate_run(run, ["values"], device="cpu", progress=False).rows}
    assert rows["recast"].value == pytest.approx(last["val_r2"], rel=1e-5)
    assert rows["recast"].low < rows["recast"].value < rows["recast"].high
    assert f"{rows['recast'].value:.2f} %" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "R²" in page
    assert f"{rows['finetuned'].value:.1f}" in page
    assert "Top-1" not in page


def test_suites_of_other_tasks_are_refused(run: Path) -> None:
    with pytest.raises(RecastError, match=r"clean cannot be measured on brightness, which is for regression.*values"):
        evaluate_run(run, ["clean"], device="cpu", progress=False)
