"""Runs that are killed (SIGKILL) fifty times and resumed, against one that is not: are the final weights bitwise equal?

    python benchmarks/resume.py                     # writes results/resume.csv; some minutes on a CPU
    python benchmarks/resume.py --kills 100 --seed 1
    python benchmarks/resume.py --task segment      # or detect: its rows in resume.csv are replaced

A small ResNet, recast, learns scikit-learn's digits with an average, Mixup, erasing, stochastic depth and a loader
process or none; a segmenter and a detector learn the embedded scenes, scaled, cut, mirrored and coloured. Every run is
killed once or more, each time in one of five ways: between two steps; at a random moment; in the middle of writing a
state; between writing it and its new name; between the row of an epoch and its state. In the end no temporary file and
no lock may be left over. Linux and macOS only (fork).
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import sklearn.datasets  # imported once, before the forks
import torch
from safetensors.torch import load_file
from timing import RESULTS, write_table

import recast.papers.networks  # noqa: F401  registers those of the scenes
from recast import files
from recast.lab.config import AugmentConfig, ClassifyConfig, DataConfig, OptimConfig, Recipe, RegularizationConfig
from recast.lab.data import load_data
from recast.lab.records import Epoch
from recast.lab.training.checkpoint import states
from recast.lab.training.loop import fit
from recast.lab.training.metrics import Journal
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_
from recast.surgery.planning import plan

RESULT = RESULTS / "resume.csv"
WAYS = ("between steps", "at a random moment", "while a state is written", "before it is renamed", "after the row")
LENGTHS = {"classify": (4, 12), "segment": (3, 4), "detect": (3, 4)}
"""Epochs, and batches in each."""


def recipe(task: str, workers: int) -> Recipe:
    """Two batches an update, a state after every fifth batch."""
    epochs, batches = LENGTHS[task]
    name, model, size, batch = {
        "classify": ("digits", "digits_resnet", 16, 32),
        "segment": ("scenes", "scenes_fcn", 96, 8),
        "detect": ("scene_objects", "scenes_rcnn", 96, 2),
    }[task]
    is_dense = task != "classify"
    seen = AugmentConfig(crop="random", flip=True, color_jitter=0.3)
    return Recipe(
        model=ModelConfig(model),
        data=DataConfig(
            name, img_size=size, batch_size=batch, num_train=batches * batch, num_val=8 if is_dense else 100,
            workers=workers,
        ),
        augment=seen if is_dense else AugmentConfig(),
        task=task if is_dense else ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.25),
        optim=OptimConfig(lr=1e-3, gate_l1=0.01, clip_grad=1.0),
        regularization=RegularizationConfig(ema_decay=0.99, drop_path=None if is_dense else 0.1),
        epochs=epochs,
        accumulate=2,
        save_steps=5,
        device="cpu",
    )  # fmt: skip


def train(task: str, folder: Path, workers: int, on_step: Callable[[int, int, float], object]) -> None:
    """The whole run, or what is left of it."""
    torch.set_num_threads(1)
    chosen = recipe(task, workers)
    data = load_data(chosen.data, chosen.augmentation)
    torch.manual_seed(0)
    parent = build(chosen.model, num_classes=len(data.classes))
    child = recast_(parent, plan(parent, torch.zeros(1, 3, data.img_size, data.img_size)))
    fit(child, data, chosen, folder, resume=True, progress=False, on_step=on_step)


def die(*_: Any) -> None:
    """As a machine that loses its power: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(task: str, way: str | None, chance: random.Random) -> Callable[[int, int, float], object]:
    """Make this process die in that way, or not at all; returns what `fit` calls after every step."""
    if way == "between steps":
        at = tuple(chance.randrange(most) + 1 for most in LENGTHS[task])
        return lambda epoch, step, _loss: die() if (epoch, step) >= at else None
    calls = chance.randrange(1, 4)
    seen: list[int] = []

    def last() -> bool:
        seen.append(1)
        return len(seen) == calls

    if way == "while a state is written":
        save = torch.save

        def half(content: Any, path: Path) -> None:
            save(content, path)
            if last():
                os.truncate(path, chance.randrange(path.stat().st_size))
                die()

        torch.save = half
    elif way == "before it is renamed":
        replace = os.replace
        files.os.replace = lambda one, other: die() if last() else replace(one, other)
    elif way == "after the row":
        write = Journal.write

        def written(self: Journal, row: Epoch) -> None:
            write(self, row)
            if last():
                die()

        Journal.write = written  # type: ignore[method-assign]
    return lambda *_: None


def launch(task: str, folder: Path, workers: int, way: str | None, chance: random.Random, after: float) -> int:
    """One process of the run; returns the signal that ended it, 0 for none. Forked: nothing is imported again."""
    warnings.simplefilter("ignore")  # that the lock of a dead process is taken over
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            torch.set_num_threads(torch.get_num_threads())
            train(task, folder, workers, arm(task, way, chance))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if way == "at a random moment":
        time.sleep(after)
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a run in {folder} failed by itself")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main() -> None:
    """Kill and compare; exits with 1 unless all weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of runs, each killed once or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", choices=LENGTHS, default="classify")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    assert sklearn.datasets
    rows, scratch = [], Path(tempfile.mkdtemp(prefix="recast-resume-"))
    expected, seconds = {}, {}
    for number in count():
        if sum(row[4] for row in rows) >= options.kills:
            break
        chance, way = random.Random(f"{options.seed} {number}"), WAYS[number % len(WAYS)]
        workers, folder, kills = number // len(WAYS) % 2, scratch / str(number), 0
        if workers not in expected:
            started = time.perf_counter()
            launch(options.task, scratch / f"straight{workers}", workers, None, random.Random(), 0.0)
            seconds[workers] = time.perf_counter() - started
            expected[workers] = load_file(scratch / f"straight{workers}" / "weights.safetensors")
        found: list[str] = []
        for _ in range(chance.randrange(1, 4)):
            if launch(options.task, folder, workers, way, chance, chance.uniform(0.2, 0.9) * seconds[workers]):
                kills += 1
                found.append(states(folder)[-1].stem.removeprefix("state-") if states(folder) else "none")
        launch(options.task, folder, workers, None, chance, 0.0)
        weights = load_file(folder / "weights.safetensors")
        equal = all(torch.equal(weights[name], value) for name, value in expected[workers].items())
        left = sum(path.name.startswith(".") for path in folder.rglob("*"))
        rows.append([options.task, number, way, workers, kills, " ".join(found), equal, left])
        print(*rows[-1], sep="  ", flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(scratch)
    others = []
    if options.out.exists():
        with options.out.open(encoding="utf-8", newline="") as file:
            others = [row for row in list(csv.reader(file))[1:] if row[0] != options.task]
    header = ["task", "run", "killed", "workers", "kills", "states_left", "bitwise_equal", "left_over"]
    write_table(options.out, header, sorted([*others, *rows], key=lambda row: list(LENGTHS).index(row[0])))
    same, left = (sum(row[column] for row in rows) for column in (6, 7))
    print(f"{same} of {len(rows)} bitwise equal, {sum(row[4] for row in rows)} kills, {left} files left over")
    raise SystemExit(same != len(rows) or left > 0)


if __name__ == "__main__":
    main()
