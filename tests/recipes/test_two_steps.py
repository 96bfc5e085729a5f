"""Every recipe makes two steps on tiny data, with all that it asks for except the size of its network and its data."""

import json
from pathlib import Path

import pytest
import torch
from stand_ins import SIZE, stand_in

from recast.lab.config import Augmentation, ClassifyConfig, DataConfig, Recipe
from recast.lab.config.recipe import PaperConfig
from recast.lab.config.schedules import AtOnce, Before
from recast.lab.config.tasks import OneLabelTask
from recast.lab.data import Data
from recast.lab.data.augment import resolve
from recast.lab.data.datasets import ImageTensors
from recast.lab.recipes import recipes
from recast.lab.training import prepare
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.models.config import ModelConfig

CLASSES = 4


def tiny_data(config: DataConfig, augment: Augmentation, grouping: PaperConfig, in_chans: int | None = None) -> Data:
    augment, parts = resolve(augment, SIZE), []
    for count in (10, 4):
        pixels = torch.randint(0, 255, (count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(count)).byte()
        parts.append(ImageTensors(pixels, torch.arange(count) % CLASSES))
    names = [str(label) for label in range(CLASSES)]
    return Data("noise", parts[0].augmented(augment), parts[1], names, (0.5,) * 3, (0.2,) * 3, SIZE)


def tiny(recipe: Recipe) -> Recipe:
    """The recipe for a small network, on few images, for one epoch of two updates of four images."""
    schedule, task = recipe.schedule, recipe.task
    if not isinstance(task, OneLabelTask):
        task = ClassifyConfig(erasing=recipe.augmentation.erasing, label_smoothing=getattr(task, "label_smoothing", 0))
    if recipe.teacher.kind == "model":
        task = task.replace(teacher=recipe.teacher.replace(teacher_model="stand_ins:resnet", teacher_pretrained=False))
    if task.kind == "embed":
        task = task.replace(projector=task.projector.replace(dim=8, hidden=8))
    if isinstance(schedule, AtOnce):
        schedule = AtOnce()
    if isinstance(schedule, Before):
        schedule = schedule.replace(recalibrate_bn=min(schedule.recalibrate_bn, 8))
    scales = {name: value for name, value in recipe.model.kwargs.items() if name == "init_values"}
    return recipe.replace(
        model=ModelConfig(stand_in(recipe.model.name), kwargs=scales),
        data=DataConfig(batch_size=4, img_size=SIZE),
        schedule=schedule,
        task=task,
        epochs=1,
        accumulate=min(recipe.accumulate, 2),
        device="cpu",
        papers={name: paper for name, paper in recipe.papers.items() if name != "grafit"},
    )


def one_of_a_kind() -> list[str]:
    """A recipe of every kind: the size of network and data, rates and strengths make no kind."""

    def kind(recipe: Recipe) -> str:
        optim = recipe.optim.replace(lr=1e-4, base_batch=None, warmup_lr=1e-6, min_lr=1e-6, weight_decay=0.05)
        rate = recipe.regularization.drop_path and 0.1
        papers = dict(recipe.papers)
        if deit := papers.get("deit"):
            papers["deit"] = deit.replace(layer_scale=deit.layer_scale and 1e-4)
        regularization = recipe.regularization.replace(drop_path=rate)
        return repr(recipe.replace(optim=optim, regularization=regularization, papers=papers))

    kinds = {kind(tiny(entry.make())): name for name, entry in reversed(recipes().items())}
    return list(kinds.values())[::-1]


KINDS = one_of_a_kind()


def is_variant(name: str) -> bool:
    """True if a recipe is another of the kinds on a GPU's precision, or with fewer images."""
    return any(name == other + ending for other in KINDS for ending in ("_gpu", "_small"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if is_variant(name) else ()) for name in KINDS]
)
def test_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "load_data", tiny_data)
    recipe = tiny(recipes()[name].make())
    train(recipe, tmp_path / "run", progress=False, trust=True)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0, 1]
    assert rows[1]["train_loss"] > 0
    assert rows[1]["val_loss"] != rows[0]["val_loss"]
    assert (tmp_path / "run" / "finetuned").exists() == recipe.control
    assert (tmp_path / "run" / "plan.json").exists() == (not recipe.is_plain)
    path = tmp_path / "run" / "schedule.json"
    assert path.exists() == recipe.schedule.is_during
    if path.exists():
        schedule = json.loads(path.read_text(encoding="utf-8"))
        assert [switch["layers"] for switch in schedule["switches"]] == [schedule["layers"]]
