"""What `test_distributed.py` runs by torchrun in two processes: torchrun ... two_processes.py FOLDER."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from small import CLASSES, small_child, small_data, small_fit, small_parent, small_plan, small_recipe
from torch import nn

from recast.lab.config import Recipe, RegularizationConfig, ScheduleConfig
from recast.lab.training.distributed import Interrupted, is_first, process_group
from recast.lab.training.loop import fit
from recast.lab.training.metrics import validate
from recast.papers.grafit.config import EmbedConfig, Projector
from recast.papers.grafit.head import add_embedding_

BATCH_NORM_FROZEN = RegularizationConfig(freeze="batch_norm", ema_decay=0.9)
ODD = 19
EMBEDDINGS = {
    "embedding": Projector("mlp", dim=5, hidden=7, views=2),
    "triplet": Projector("mlp", dim=5, hidden=7, views=2, instance_loss="triplet"),
}


def fit_embedding(folder: Path, name: str, **fields: Any) -> None:
    child, projector = small_child(), EMBEDDINGS[name]
    torch.manual_seed(3)
    model = add_embedding_(child, projector, CLASSES)
    small_fit(folder, model, recipe(task=EmbedConfig(projector=projector), **fields), data=small_data(ODD))


def recipe(**fields: Any) -> Recipe:
    """4 epochs of 5 batches of 8: 20 updates; BatchNorm, which sees one part at a time, is frozen."""
    return small_recipe({"clip_grad": 1.0}, **{"regularization": BATCH_NORM_FROZEN, "epochs": 4, **fields})


def run(
    folder: Path, chosen: Recipe, resume: bool = False, dropout: bool = True
) -> tuple[list[float], list[dict[str, Any]]]:
    losses: list[float] = []
    child = small_child()
    if not dropout:  # it is drawn for every part
        child[3] = nn.Identity()  # type: ignore[operator]
    return losses, small_fit(folder, child, chosen, data=small_data(ODD), resume=resume, losses=losses)


def run_scheduled(folder: Path, chosen: Recipe) -> None:
    parent = small_parent()
    small_fit(folder, parent, chosen, data=small_data(ODD), plan=small_plan(parent, "0", "4"))


def main(folder: Path) -> None:
    with process_group("cpu"):
        losses = {
            "two": run(folder / "two", recipe())[0],
            "undivided": run(folder / "undivided", recipe(), dropout=False)[0],
            "counted": _count_images(),
        }
        run_scheduled(folder / "scheduled", recipe(schedule=ScheduleConfig("progressive")))
        for name in EMBEDDINGS:
            fit_embedding(folder / name, name)
        _stop_in_the_second_process(folder / "stopped")
        run(folder / "begun_by_one", recipe(), resume=True)
        if is_first():
            (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def _count_images() -> float:
    """The accuracy of a network that always says class 0: the share of the 19 images that are of class 0."""
    always = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    nn.init.zeros_(always[1].weight)
    always[1].bias.data = torch.tensor([50.0, 0.0, 0.0])
    return validate(always, small_data(ODD), small_recipe().data, torch.device("cpu"))[1]


def _stop_in_the_second_process(folder: Path) -> None:
    def stop(epoch: int, step: int, _loss: float) -> None:
        if (epoch, step) == (2, 1) and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)

    with suppress(Interrupted):
        fit(small_child(), small_data(ODD), recipe(), folder, progress=False, on_step=stop)
        raise AssertionError("nobody stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
