"""What does attention bring a segmenter in equal time, and how much of it? The embedded scenes.

    python studies/scenes.py sweep --out runs/scenes                   # goes on where it was stopped
    python studies/scenes.py times --out runs/scenes
    python studies/scenes.py compare --out runs/scenes --seeds 0 1 2   # after times
    python studies/scenes.py table --out runs/scenes                   # writes results/scenes_*.csv

One parent, a `scenes_fcn` that learned the 1,000 scenes for 24 epochs, as in results/scenes.csv. Every arm trains it on
by the recipe `segment` (AdamW 2e-3, poly, batches of 16), for `EPOCHS` instead of the 16 of results/scenes.csv, so that
all arms fit into an hour of one core. Seeds change the order of images and new parameters. Subnormal numbers are
flushed to zero, which favours the nine heads, whose Gaussians have long tails; times has both.

sweep: content heads × width × Gaussians × gates' rate, the most telling first, `SWEPT` epochs, seed 0, on 200 further
scenes of the training digits (`load`), which no other table holds. It changes no arm of the comparison.

times: seconds of a step of 16 scenes and of inference, every arm by turns, one thread, one process.

compare, on the 200 test scenes, stated before it was run. Arms: `ARMS`; "equal seconds" are those of one wide head,
today's default layer, by the measured step times. Metric: mIoU of all, of the local and of the distant classes. A
difference to one wide head is shown if 0 is outside its 95 % interval, t(seeds − 1) · √(s²/seeds + v): s² of the seeds'
differences, v the variance of their mean over scenes drawn with replacement. The smallest visible effect is what this
sees with 80 % probability. What decides, by mIoU of the distant and of all classes:

1. one wide head beats the parent fine-tuned for as many seconds: holds here if shown to be ahead, does not hold here if
   shown to be behind, else not decidable;
2. in equal time one wide head is no worse than nine heads of the recipe, and than these with the default's faster
   gates: the default fits segmentation if it is not shown to be behind on either; the recipe's nine heads do if they
   are shown to be ahead in equal time;
3. nine heads beat the parent fine-tuned for as many seconds as they take (a paired difference of its own).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from price import CHOICES, NARROW, ONE, append, build, by_turns, calls_of, filled, groups_of, interval, macs_of, read
from torch import Tensor, nn

from recast.lab.analysis.wakefulness import wakefulness
from recast.lab.data import load_data
from recast.lab.data.digits import read_digits
from recast.lab.evaluation.stats import resampled_means
from recast.lab.recipes import make_recipe
from recast.lab.records import Wakefulness
from recast.lab.training.optim import WarmupDecay
from recast.papers.dense.scenes import CLASSES, KINDS, draw_scene
from recast.papers.dense.segment.evaluation import mean_iou, pixel_counts
from recast.papers.dense.segment.networks import SceneFCN
from recast.papers.dense.segment.training import pixel_loss

BATCH, EPOCHS, SWEPT, LEARNED = 16, 10, 4, 24
DEFAULT = ONE | {"project_values": False, "query_key": "zero"}
NINE = NARROW | {"query_key": "images", "gate_ratio": 10}
"""The recipe's."""
ARMS: dict[str, dict[str, Any]] = {
    "parent": {"epochs": 0},
    "one wide head": DEFAULT,
    "fine-tuned, equal updates": {},
    "fine-tuned, equal seconds": {"as_long_as": "one wide head"},
    "fine-tuned, as long as nine heads": {"as_long_as": "nine heads"},
    "nine heads": NINE,
    "nine heads, equal seconds": NINE | {"as_long_as": "one wide head"},
    "nine heads, gates 50×, equal seconds": NINE | {"gate_ratio": 50, "as_long_as": "one wide head"},
    "non-local": {"block": "non-local", "gate_ratio": 50},
}
SWEEP: list[dict[str, Any]] = [
    {}, DEFAULT, DEFAULT | {"gate_ratio": 10}, NINE, NINE | {"gate_ratio": 50}, DEFAULT | {"query_key": "images"},
    DEFAULT | {"content_heads": "3"}, DEFAULT | {"content_heads": "all"}, DEFAULT | {"gaussian_heads": "all"},
    *(
        DEFAULT | {"content_heads": heads, "head_dim": width, "gaussian_heads": gaussians, "gate_ratio": ratio}
        for ratio in (50, 10) for gaussians in ("none", "all") for heads in ("3", "middle", "all") for width in (16, 32)
    ),
]  # fmt: skip
GROUPS = {"miou": CLASSES, **{f"miou@{kind}": members for kind, members in KINDS.items()}}


def load(held_out: str, out: Path) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the parent, and normalised images and masks: to train on, and dev or test."""
    data = load_data(make_recipe("segment").data)
    pixels, masks = data.train.plain().batch(range(len(data.train)))
    others, their_masks = data.val.batch(range(len(data.val)))
    if held_out == "dev":
        grey, labels, is_test = (values.numpy() for values in read_digits())
        scenes = [draw_scene((2, i), grey[~is_test, 0], labels[~is_test]) for i in range(200)]
        others = torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2) / 255
        their_masks = torch.from_numpy(np.stack([scene.mask for scene in scenes])).long()
    images, others = (data.normalised(part, torch.device("cpu")) for part in (pixels, others))
    torch.manual_seed(0)
    parent, weights = SceneFCN(), out / "parent.pt"
    if not weights.exists():
        train(parent, (images, masks), filled("odd_digit", {}), len(images) // BATCH * LEARNED, 0)
        torch.save(parent.state_dict(), weights)
    parent.load_state_dict(torch.load(weights, weights_only=True))
    return parent.eval(), (images, masks, others, their_masks)


def made(parent: nn.Module, setting: dict[str, Any], images: Tensor, seed: int) -> nn.Module:
    """The parent with its trunk's last stage recast, or a block after it."""
    model = copy.deepcopy(parent)
    model.trunk = build(parent.trunk, setting, images, seed)
    return model


def groups(model: nn.Module, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups by the recipe."""
    optim = make_recipe("segment").optim
    result = groups_of(model, optim.lr, setting)
    for group in result:
        group |= {"peak_lr": group["lr"], "weight_decay": min(group["weight_decay"], optim.weight_decay)}
    return result


def train(model: nn.Module, data: tuple[Tensor, ...], setting: dict[str, Any], updates: int, seed: int) -> None:
    """Train by the recipe's loss, optimizer and decay, for any number of updates."""
    recipe, (images, masks) = make_recipe("segment"), data[:2]
    loss, generator = pixel_loss(recipe.task, len(CLASSES)), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups(model, setting))
    per_epoch = len(images) // BATCH
    optim = recipe.optim.replace(warmup_epochs=recipe.optim.warmup_epochs * per_epoch / max(updates, 1))
    decay = WarmupDecay(optim, 1, updates, BATCH)
    model.train()
    for step in range(updates):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * decay.factor(step)
        at = order[step % per_epoch * BATCH :][:BATCH]
        optimizer.zero_grad()
        loss(model(images[at]), masks[at]).backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def counted(model: nn.Module, images: Tensor, masks: Tensor) -> np.ndarray[Any, Any]:
    """Return (scenes, 3, classes): pixels of a class, predicted as it, and both."""
    predicted = torch.cat([model.eval()(part).argmax(1) for part in images.split(50)])
    return pixel_counts(predicted, masks, len(CLASSES)).numpy()


def miou(means: np.ndarray[Any, Any], members: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Return the mIoU of some classes from (..., 3, classes) means over scenes."""
    chosen = means[..., [CLASSES.index(name) for name in members]]
    return np.asarray(mean_iou(chosen.reshape(*chosen.shape[:-2], -1)))


def measured(model: nn.Module, counts: np.ndarray[Any, Any], images: Tensor) -> dict[str, str]:
    """Return the columns of a trained network."""
    awake = Wakefulness.of(wakefulness(model, images[:32]))
    return {name: f"{float(miou(counts.mean(0), members)):.2f}" for name, members in GROUPS.items()} | {
        "awake": f"{awake.awake}/{awake.heads}" if awake else ""
    }


def sweep(out: Path, first: int | None) -> None:
    """Every setting of the first ones that the table lacks."""
    parent, data = load("dev", out)
    size, names = macs_of(parent, data[0]), [name for name in CHOICES if name not in ("block", "qk_ratio")]
    for setting in SWEEP[:first]:
        setting = filled("odd_digit", setting | {"epochs": SWEPT})
        key = {name: str(setting[name]) for name in names}
        if any(all(row[name] == value for name, value in key.items()) for row in read(out / "sweep.csv")):
            continue
        model = made(parent, setting, data[0], 0)
        train(model, data, setting, SWEPT * (len(data[0]) // BATCH), 0)
        columns = measured(model, counted(model, *data[2:]), data[2])
        append(out / "sweep.csv", key | columns | {"macs": f"{macs_of(model, data[0]) / size:.3f}"})


def with_subnormals(call: Callable[[], None]) -> None:
    """Call without flushing subnormal numbers to zero."""
    torch.set_flush_denormal(False)
    call()
    torch.set_flush_denormal(True)


def times(out: Path) -> None:
    """Medians by turns, beside the parent's; the step also with subnormal numbers."""
    parent, data = load("dev", out)
    arms = {name: arm for name, arm in ARMS.items() if "as_long_as" not in arm and "updates" not in name}
    calls = []
    for arm in arms.values():
        setting = filled("odd_digit", arm)
        model = made(parent, setting, data[0], 0)
        step, *infer = calls_of(model, groups(model, setting), data[0][:BATCH], data[1][:BATCH])
        calls.append((step, partial(with_subnormals, step), *infer))
    seconds = by_turns(calls)
    (out / "times.csv").unlink(missing_ok=True)
    for name, of_arm in zip(arms, seconds, strict=True):
        pairs = zip(of_arm, seconds[0], strict=True)
        ratios = [statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs]
        names = ("step", "step_with_subnormals", "inference_1", "inference_batch")
        row = {"arm": name, "step_ms": f"{1000 * statistics.median(of_arm[0]):.1f}"}
        append(out / "times.csv", row | {name: f"{r:.3f}" for name, r in zip(names, ratios, strict=True)})


def compare(out: Path, seeds: list[int], only: list[str] | None) -> None:
    """Every run of the comparison that the table lacks; keeps the counts of every test scene."""
    parent, data = load("test", out)
    cost = {row["arm"]: float(row["step"]) for row in read(out / "times.csv")}
    (out / "counts").mkdir(exist_ok=True)
    for seed in seeds:
        for name, arm in ARMS.items():
            done = any((row["arm"], row["seed"]) == (name, str(seed)) for row in read(out / "compare.csv"))
            if done or (only and name not in only):
                continue
            updates = arm.get("epochs", EPOCHS) * (len(data[0]) // BATCH)
            if other := arm.get("as_long_as"):
                updates = round(updates * cost[other] / cost["nine heads" if "content_heads" in arm else "parent"])
            setting = filled("odd_digit", arm)
            model = made(parent, setting, data[0], seed)
            train(model, data, setting, updates, seed)
            counts = counted(model, *data[2:])
            np.save(out / "counts" / f"{name}_{seed}.npy", counts)
            row = {"arm": name, "seed": seed, "updates": updates}
            append(out / "compare.csv", row | measured(model, counts, data[2]))


def table(out: Path, results: Path) -> None:
    """Write results/scenes_sweep.csv, scenes_times.csv and scenes_equal_time.csv (means and differences)."""
    for kind in ("sweep", "times"):
        if (source := out / f"{kind}.csv").exists():
            (results / f"scenes_{kind}.csv").write_text(source.read_text())
    rows, path = read(out / "compare.csv"), results / "scenes_equal_time.csv"
    path.unlink(missing_ok=True)
    means = {(r["arm"], r["seed"]): np.load(out / "counts" / f"{r['arm']}_{r['seed']}.npy") for r in rows}
    drawn = {key: resampled_means(c.reshape(len(c), -1)).reshape(-1, 3, len(CLASSES)) for key, c in means.items()}
    pairs = [(arm, "one wide head") for arm in ARMS] + [("fine-tuned, as long as nine heads", "nine heads")]
    for arm, against in pairs:
        of_arm = [row for row in rows if row["arm"] == arm]
        shared = [row["seed"] for row in of_arm if (against, row["seed"]) in means]
        for metric, members in GROUPS.items() if of_arm else ():
            row = {
                "arm": arm, "seeds": len(of_arm), "updates": of_arm[0]["updates"], "metric": metric,
                "value": f"{statistics.mean(float(r[metric]) for r in of_arm):.2f}",
                "of_seeds": " ".join(r[metric] for r in of_arm), "awake": " ".join(r["awake"] for r in of_arm),
                **dict.fromkeys(("against", "against_minus_arm", "low_95", "high_95", "smallest_visible"), ""),
            }  # fmt: skip
            if arm != against and (n := len(shared)) > 1:
                runs = [((against, seed), (arm, seed)) for seed in shared]
                of_seeds = [float(miou(means[a].mean(0), members) - miou(means[b].mean(0), members)) for a, b in runs]
                of_draws = np.mean([miou(drawn[a], members) - miou(drawn[b], members) for a, b in runs], axis=0)
                spread = statistics.variance(of_seeds) / n + float(of_draws.var(ddof=1))
                mean = statistics.mean(of_seeds)
                row |= {"against": against, "against_minus_arm": f"{mean:.2f}"} | interval(mean, spread, n)
            append(path, row)


def main() -> None:
    """Run a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sweep", "times", "compare", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--first", type=int, help="of sweep: so many settings")
    parser.add_argument("--only", nargs="+", help="of compare: these arms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "sweep":
        sweep(options.out, options.first)
    elif options.part == "times":
        times(options.out)
    elif options.part == "compare":
        compare(options.out, options.seeds, options.only)
    else:
        table(options.out, Path(__file__).parents[1] / "results")


if __name__ == "__main__":
    main()
