"""What does attention beside a convolution bring a segmenter in equal time? The embedded scenes.

    python studies/scenes.py times --out runs/scenes                   # on an idle machine
    python studies/scenes.py compare --out runs/scenes --seeds 0 1 2   # continues where it was stopped
    python studies/scenes.py table --out runs/scenes                   # writes results/scenes_beside{,_times}.csv

One parent, a `scenes_fcn` that learned the 1,000 scenes for 24 epochs, as in results/scenes.csv. Every arm trains it
further by the recipe `segment` (AdamW 2e-3, poly, batches of 16), for `EPOCHS` instead of the 16 of results/scenes.csv,
so that all arms fit into an hour of one core. Seeds change the order of images and new parameters. Subnormal numbers
are flushed to zero, which favours the nine heads, whose Gaussians have long tails; times has both.

times: seconds of a step of 16 scenes and of inference, every arm by turns, one thread, one process.

compare, on the 200 test scenes, stated before it was run. Arms: `ARMS`. "beside" is the default of `plan` as beside.py
chose it on other tasks (`beside.NEW`); nothing was chosen on scenes. "equal seconds" are those of beside, by the
measured step times. Metric: mIoU of all, of the local and of the distant classes. A difference beside − arm is shown if
0 is outside its 95 % interval over seeds and scenes (`evaluation.intervals`). The smallest visible effect is the one
that this shows with 80 % probability. Four arms were run. What was asked, by mIoU of the distant classes: beside is not
below the non-local block, and ahead of fine-tuning for as many seconds by 40 points.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import beside
import numpy as np
import torch
import trainings
from beside import AFTER, NEW, complete
from evidence.csv_files import RESULTS, append, read, write
from price import NARROW, ONE
from torch import Tensor, nn
from trainings import columns, groups_of

from recast.lab.data import load_data
from recast.lab.data.digits import read_digits
from recast.lab.evaluation.intervals import interval
from recast.lab.evaluation.stats import Compared
from recast.lab.recipes import make_recipe
from recast.lab.training.optim import WarmupDecay
from recast.papers.dense.scenes import CLASSES, KINDS, draw_scene
from recast.papers.dense.segment.evaluation import mean_iou, pixel_counts
from recast.papers.dense.segment.networks import SceneFCN
from recast.papers.dense.segment.training import pixel_loss

BATCH, EPOCHS, PARENT_EPOCHS = 16, 10, 24
LONG = {"as_long_as": "beside"}
ARMS: dict[str, dict[str, Any]] = {
    "parent": {"epochs": 0},
    "beside": NEW,
    "non-local": {"block": "non-local", "gate_ratio": 50},
    "fine-tuned, equal updates": {},
    "fine-tuned, equal seconds": LONG,
    "non-local, equal seconds": {"block": "non-local", "gate_ratio": 50} | LONG,
    "after the blocks, equal seconds": AFTER | LONG,
    "the former default, equal seconds": ONE | {"project_values": False, "query_key": "zero"} | LONG,
    "nine heads, equal seconds": NARROW | {"project_values": True, "query_key": "images", "head_dim": ""} | LONG,
    "global context, equal seconds": {"block": "context", "gate_ratio": 50} | LONG,
}
"""Nine heads are the recipe's layer."""
GROUPS = {"miou": CLASSES, **{f"miou@{kind}": members for kind, members in KINDS.items()}}


def load(held_out: str, out: Path) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the parent, and normalised images and masks: to train on, and dev or test."""
    data = load_data(make_recipe("segment").data)
    pixels, masks = data.train.plain().batch(range(len(data.train)))
    val_pixels, val_masks = data.val.batch(range(len(data.val)))
    if held_out == "dev":
        grey, labels, is_test = (values.numpy() for values in read_digits())
        scenes = [draw_scene((2, i), grey[~is_test, 0], labels[~is_test]) for i in range(200)]
        val_pixels = torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2) / 255
        val_masks = torch.from_numpy(np.stack([scene.mask for scene in scenes])).long()
    images, val_images = (data.normalised(part, torch.device("cpu")) for part in (pixels, val_pixels))
    torch.manual_seed(0)
    parent, weights = SceneFCN(), out / "parent.pt"
    if not weights.exists():
        train(parent, (images, masks), complete({}), len(images) // BATCH * PARENT_EPOCHS, 0)
        torch.save(parent.state_dict(), weights)
    parent.load_state_dict(torch.load(weights, weights_only=True))
    return parent.eval(), (images, masks, val_images, val_masks)


def build(parent: nn.Module, setting: dict[str, Any], images: Tensor, seed: int) -> nn.Module:
    """Return the parent with its trunk's last stage recast, or a block after it."""
    model = copy.deepcopy(parent)
    model.trunk = beside.build(parent.trunk, setting, images, seed)
    return model


def recipe_groups(model: nn.Module, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups by the recipe."""
    optim = make_recipe("segment").optim
    groups = groups_of(model, optim.lr, setting)
    return [group | {"weight_decay": min(group["weight_decay"], optim.weight_decay)} for group in groups]


def train(model: nn.Module, data: tuple[Tensor, ...], setting: dict[str, Any], updates: int, seed: int) -> None:
    """Train by the recipe's loss, optimizer and decay, for any number of updates."""
    recipe = make_recipe("segment")
    warm_up = recipe.optim.warmup_epochs * (len(data[0]) // BATCH) / max(updates, 1)
    decay = WarmupDecay(recipe.optim.replace(warmup_epochs=warm_up), 1, updates, BATCH)
    loss = pixel_loss(recipe.task, len(CLASSES))
    trainings.train(model, *data[:2], recipe_groups(model, setting), updates, seed, BATCH, decay.factor, loss=loss)


@torch.no_grad()
def counted(model: nn.Module, images: Tensor, masks: Tensor) -> np.ndarray[Any, Any]:
    """Return (scenes, 3, classes): pixels of a class, predicted as it, and both."""
    predicted = torch.cat([model.eval()(part).argmax(1) for part in images.split(50)])
    return pixel_counts(predicted, masks, len(CLASSES)).numpy()


def miou(means: np.ndarray[Any, Any], members: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Return the mIoU of some classes from (..., 3, classes) means over scenes."""
    chosen = means[..., [CLASSES.index(name) for name in members]]
    return np.asarray(mean_iou(chosen.reshape(*chosen.shape[:-2], -1)))


def of_scenes(counts: Sequence[np.ndarray[Any, Any]], members: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Return what each scene contributes to the mIoU of some classes (seeds, scenes)."""
    scores = {(str(seed), "miou"): each.reshape(len(each), -1) for seed, each in enumerate(counts)}
    compared = Compared(scores, {"miou": lambda means: miou(means.reshape(-1, 3, len(CLASSES)), members).squeeze()})
    return np.stack([each.values for each in compared.images.values()])


def score_columns(model: nn.Module, counts: np.ndarray[Any, Any], images: Tensor) -> dict[str, str]:
    """Return the columns of a trained network."""
    scores = {name: f"{float(miou(counts.mean(0), members)):.2f}" for name, members in GROUPS.items()}
    return scores | {"awake": trainings.awake_heads(model, images[:32])}


def with_subnormals(call: Callable[[], None]) -> None:
    """Call without flushing subnormal numbers to zero."""
    torch.set_flush_denormal(False)
    call()
    torch.set_flush_denormal(True)


def times(options: argparse.Namespace) -> None:
    """Time a step, also with subnormal numbers, and inference of every arm, by turns."""
    parent, data = load("dev", options.out)
    calls = {}
    for arm, setting in ARMS.items():
        setting = complete(setting)
        model = build(parent, setting, data[0], 0)
        timed = trainings.calls_of(model, recipe_groups(model, setting), data[0][:BATCH], data[1][:BATCH])
        calls[arm] = {"step": timed["step"], "step_with_subnormals": partial(with_subnormals, timed["step"])} | timed
    rows = [{"arm": arm, **ratios} for arm, ratios in trainings.time_by_turns(calls, 41)]
    write(options.out / "times.csv", rows)


def compare(options: argparse.Namespace) -> None:
    """Train the arms that the table lacks; store the counts of every test scene."""
    out, path = options.out, options.out / "compare.csv"
    parent, data = load("test", out)
    step = {row["arm"]: float(row["step"]) for row in read(out / "times.csv")}
    (out / "counts").mkdir(exist_ok=True)
    for seed, arm in trainings.missing_runs(options, path, ARMS):
        setting = ARMS[arm]
        share = step[setting["as_long_as"]] / step[arm] if "as_long_as" in setting else 1
        updates = round(setting.get("epochs", EPOCHS) * (len(data[0]) // BATCH) * share)
        setting = complete(setting)
        model = build(parent, setting, data[0], seed)
        train(model, data, setting, updates, seed)
        counts = counted(model, *data[2:])
        np.save(out / "counts" / f"{arm}_{seed}.npy", counts)
        append(path, {"arm": arm, "seed": seed, "updates": updates} | score_columns(model, counts, data[2]))


def table(options: argparse.Namespace) -> None:
    """Write results/scenes_beside_times.csv and scenes_beside.csv (means, and differences to attention beside)."""
    out = options.out
    (RESULTS / "scenes_beside_times.csv").write_text((out / "times.csv").read_text())
    runs, rows = read(out / "compare.csv"), []
    counts = {(r["arm"], r["seed"]): np.load(out / "counts" / f"{r['arm']}_{r['seed']}.npy") for r in runs}
    for arm in ARMS:
        arm_runs = [run for run in runs if run["arm"] == arm]
        shared = [run["seed"] for run in arm_runs if ("beside", run["seed"]) in counts]
        for metric, members in GROUPS.items() if arm_runs else ():
            row = {"arm": arm, "seeds": len(arm_runs), "updates": arm_runs[0]["updates"], "metric": metric}
            row |= {"value": f"{statistics.mean(float(run[metric]) for run in arm_runs):.2f}"}
            row |= {"of_seeds": " ".join(run[metric] for run in arm_runs)}
            row |= {"awake": " ".join(run["awake"] for run in arm_runs)}
            row |= dict.fromkeys(("beside_minus_arm", "low_95", "high_95", "smallest_visible"), "")
            if arm != "beside" and len(shared) > 1:
                ours, theirs = (of_scenes([counts[a, seed] for seed in shared], members) for a in ("beside", arm))
                row |= columns("beside_minus_arm", interval(ours - theirs))
            rows.append(row)
    write(RESULTS / "scenes_beside.csv", rows)


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    trainings.main(__doc__, (), {"times": times, "compare": compare, "table": table})
