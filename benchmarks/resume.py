"""Are the final weights of killed (SIGKILL) and resumed runs bitwise equal to those of an undisturbed run?

    python benchmarks/resume.py                     # fifty kills, writes results/resume.csv; some minutes on a CPU
    python benchmarks/resume.py --task segment      # or detect; the rows of other tasks stay

A small ResNet, recast, learns scikit-learn's digits with averaged weights, Mixup, erasing, stochastic depth and a
loader process or none; a segmenter and a detector learn the embedded scenes, scaled, cropped, mirrored and coloured.
Every run is killed once or more, each time in one of five ways: between two steps; at a random moment; while a state is
written; before that file gets its name; between the row of an epoch and its state. In the end no temporary file and no
lock may be left. Linux and macOS only (fork).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  imported once, before the forks
import torch
from safetensors.torch import load_file
from timing import RESULTS, read, write

import recast.papers.networks  # noqa: F401  registers those of the scenes
from recast import files
from recast.lab.config import AugmentConfig, ClassifyConfig, DataConfig, OptimConfig, Recipe, RegularizationConfig
from recast.lab.data import load_data
from recast.lab.folder.records import Epoch
from recast.lab.folder.run import RunFolder
from recast.lab.training.loop import fit
from recast.lab.training.metrics import Journal
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_
from recast.surgery.planning import plan

WAYS = ("between steps", "at a random moment", "while a state is written", "before it is renamed", "after the row")
LENGTHS = {"classify": (4, 12), "segment": (3, 4), "detect": (3, 4)}
"""Task → epochs, batches per epoch."""


def recipe(task: str, workers: int) -> Recipe:
    """Return a recipe with two batches per update and a state after every fifth batch."""
    epochs, batches = LENGTHS[task]
    name, model, size, batch = {
        "classify": ("digits", "digits_resnet", 16, 32),
        "segment": ("scenes", "scenes_fcn", 96, 8),
        "detect": ("scene_objects", "scenes_rcnn", 96, 2),
    }[task]
    is_dense = task != "classify"
    augment = AugmentConfig(crop="random", flip=True, color_jitter=0.3)
    return Recipe(
        model=ModelConfig(model),
        data=DataConfig(
            name,
            img_size=size,
            batch_size=batch,
            num_train=batches * batch,
            num_val=8 if is_dense else 100,
            workers=workers,
        ),
        augment=augment if is_dense else AugmentConfig(),
        task=task if is_dense else ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.25),
        optim=OptimConfig(lr=1e-3, gate_l1=0.01, clip_grad=1.0),
        regularization=RegularizationConfig(ema_decay=0.99, drop_path=None if is_dense else 0.1),
        epochs=epochs,
        accumulate=2,
        save_steps=5,
        device="cpu",
    )


def train(task: str, folder: Path, workers: int, on_step: Callable[[int, int, float], object]) -> None:
    """Train to the end, from the last state if there is one."""
    torch.set_num_threads(1)
    settings = recipe(task, workers)
    data = load_data(settings.data, settings.augmentation)
    torch.manual_seed(0)
    parent = build(settings.model, num_classes=len(data.classes))
    child = recast_(parent, plan(parent, torch.zeros(1, 3, data.img_size, data.img_size)))
    fit(child, data, settings, folder, resume=True, progress=False, on_step=on_step)


def die(*_: Any) -> None:
    """End like a machine that loses its power: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(task: str, way: str | None, chance: random.Random) -> Callable[[int, int, float], object]:
    """Make this process die in a way (None: not at all); return a function for `fit` to call after every step."""
    if way == "between steps":
        at = tuple(chance.randrange(most) + 1 for most in LENGTHS[task])
        return lambda epoch, step, _loss: die() if (epoch, step) >= at else None
    calls = iter(range(chance.randrange(1, 4) - 1, -1, -1))
    save, replace, write = torch.save, os.replace, Journal.write

    def save_half(content: Any, path: Path) -> None:
        save(content, path)
        if next(calls) == 0:
            os.truncate(path, chance.randrange(path.stat().st_size))
            die()

    def write_row(self: Journal, row: Epoch) -> None:
        write(self, row)
        if next(calls) == 0:
            die()

    if way == "while a state is written":
        torch.save = save_half
    elif way == "before it is renamed":
        files.os.replace = lambda source, target: die() if next(calls) == 0 else replace(source, target)
    elif way == "after the row":
        Journal.write = write_row  # type: ignore[method-assign]
    return lambda *_: None


def train_and_die(task: str, folder: Path, workers: int, way: str | None, chance: random.Random) -> None:
    """Train in a process group that can be killed with its loader process."""
    os.setsid()
    train(task, folder, workers, arm(task, way, chance))


def launch(task: str, folder: Path, workers: int, way: str | None, chance: random.Random, seconds: float) -> int:
    """Run in a forked process; return the signal that ended it, 0 for none."""
    warnings.simplefilter("ignore")  # about the lock of a dead process
    process = get_context("fork").Process(target=train_and_die, args=(task, folder, workers, way, chance))
    process.start()
    if way == "at a random moment":
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    if process.exitcode > 0:  # type: ignore[operator]
        raise SystemExit(f"a run in {folder} failed by itself")
    return -process.exitcode  # type: ignore[operator]


def main() -> None:
    """Kill, resume and compare; exit with 1 unless all weights are equal and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="least number of kills")
    parser.add_argument("--task", choices=LENGTHS, default="classify")
    parser.add_argument("--out", type=Path, default=RESULTS / "resume.csv")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    scratch = Path(tempfile.mkdtemp(prefix="recast-resume-"))
    expected, seconds = {}, {}
    for number in count():
        if sum(row["kills"] for row in rows) >= options.kills:
            break
        chance, way = random.Random(f"0 {number}"), WAYS[number % len(WAYS)]
        workers, folder = number // len(WAYS) % 2, scratch / str(number)
        if workers not in expected:
            started = time.perf_counter()
            launch(options.task, scratch / f"straight{workers}", workers, None, random.Random(), 0.0)
            seconds[workers] = time.perf_counter() - started
            expected[workers] = load_file(scratch / f"straight{workers}" / "weights.safetensors")
        states_left: list[str] = []
        for _ in range(chance.randrange(1, 4)):
            if launch(options.task, folder, workers, way, chance, chance.uniform(0.2, 0.9) * seconds[workers]):
                states = RunFolder(folder).saved_states()
                states_left.append(states[-1].stem.removeprefix("state-") if states else "none")
        launch(options.task, folder, workers, None, chance, 0.0)
        weights = load_file(folder / "weights.safetensors")
        row: dict[str, Any] = {"task": options.task, "run": number, "killed": way, "workers": workers}
        row |= {"kills": len(states_left), "states_left": " ".join(states_left)}
        row |= {"bitwise_equal": all(torch.equal(weights[name], value) for name, value in expected[workers].items())}
        row |= {"left_over": sum(path.name.startswith(".") for path in folder.rglob("*"))}
        rows.append(row)
        print(*rows[-1].values(), sep="  ", flush=True)
        shutil.rmtree(folder)
    shutil.rmtree(scratch)
    table = [row for row in read(options.out) if row["task"] != options.task] + rows
    write(options.out, sorted(table, key=lambda row: list(LENGTHS).index(row["task"])))
    equal, files_left, kills = (sum(row[name] for row in rows) for name in ("bitwise_equal", "left_over", "kills"))
    print(f"{equal} of {len(rows)} bitwise equal, {kills} kills, {files_left} files left over")
    raise SystemExit(equal != len(rows) or files_left > 0)


if __name__ == "__main__":
    main()
