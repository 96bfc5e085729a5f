"""Is attention beside a convolution a better default than a head inside it, and than a block after the stage?

    RECAST_DATA=DIR python studies/beside.py odd_photo sweep --out runs/beside    # continues where it was stopped
    python studies/beside.py odd_digit sweep --out runs/beside
    python studies/beside.py odd_digit times --out runs/beside
    python studies/beside.py odd_digit compare --out runs/beside --seeds 0 1 2    # after times
    python studies/beside.py odd_digit table --out runs/beside                    # writes results/beside*.csv

The layer, `recast.AttentionBeside`: y = conv(x) + γ ⊙ (C X W_con) with C = softmax(QKᵀ/√D), put around convolutions of
the last stage; or the same layer after the stage (`beside="block"`), which reads the stage's output. The layer of the
former default changes the middle head of a convolution, in every convolution of the last stage.

odd_photo: three CIFAR-10 photographs and an empty cell in a 2×2 grid of 64×64 pixels, at random places: two photographs
of one class, one of another. The answer is the class of the odd one, so that distant places must be compared. Training
canvases show photographs of train.zip, held-out canvases those of a tenth of it that no training canvas shows, test
canvases those of test.zip. The network is a ResNet-20 of CIFAR-10 whose first two stages are frozen, in eval mode. As
images are not augmented, the features of these stages are computed once, and all arms are the last stage and the
classifier, trained on them in batches of 32. A training of the whole network takes longer, so that the price of
attention relative to a step of the network is stated too high rather than too low.

odd_digit, cifar, converged: as in price.py.

odd_photo and odd_digit begin with a new classifier, because the question is new. The parent's is sure of the commoner
class, which is never the answer; its first gradients spoil the stage. This study began with it before
(results/beside_kept.csv, beside_kept_sweep.csv): the non-local block then reached 20 % of the odd photographs and, by
seed, 64 to 95 % of the odd digits.

sweep: one choice at a time is varied, around `BASE`, on held-out images. No test image is read.

times: seconds of a training step and of inference of the arms, by turns, one thread; --only: these arms.

compare, on test images, stated before they were read. "beside" is `NEW`, the default: γ = 0, W_con the kernel's middle
tap, queries and keys 32 wide, woken on images (`recast.wake_`, a rotation each), gates at 50 times the rate, beside the
last 3×3 convolution of every block of the last stage. "after the blocks" is `AFTER`, the same layer on its output.

Before (results/beside_random*.csv), queries and keys started as a 1×1 convolution starts them. Inputs of the last
stage's second convolutions are small (mean square 0.05), so that logits differed by 0.01 and maps were uniform: on the
odd photographs the last convolution alone had 41 % of held-out canvases after two epochs, woken 56 %, woken with one
rotation for both ("similar") 23 %; the layer after the blocks 73 to 76 %, a non-local block 76 %. BatchNorm on the
branch (31 %), a bias of the queries (38 %) and the first convolution of the block (32 %) were no cure.

Arms (`arms`): the parent; beside; timm's non-local block of as many multiply-adds as beside, after the stage, which
starts at zero; and, for as many seconds as the non-local block takes (cifar: as beside takes), by ratios of step times
measured in turns: the parent fine-tuned, the former default in every 3×3 convolution of the stage, nine heads without
Gaussians, beside, beside the last convolution alone, and after the blocks. Also fine-tuned for as many updates, and
timm's global context; SE was added last, for odd_digit alone. One parent; seeds change the order of images and new
parameters. Rates are those of price.py, 2e-3 for odd_photo, for every arm. A difference ours − arm is shown if 0 is
outside its 95 % interval, which is that of price.py. beside is the better default if it is shown to be ahead of the
former default or equal to it on every task, ahead on one; likewise for the non-local block. A run of attention counts
only if it is awake (`AWAKE`).

Until then γ was one number for all channels. After the stage it was tried as the default: 6.2 points ahead of beside on
photographs, 1.5 behind on digits; in scenes.py one seed of three slept, and beside stayed the default. With a γ for
every channel (beside_gates.csv) it was awake with every seed.

Why one convolution of each block and not the last alone, which costs less and is as good here on held-out images
(beside_sweep.csv): in `recast train odd_digit`, whose images have another mean, it reached 84 % of the quickstart's
canvases instead of 97 (80 and 95 % with the parent's classifier, 81 with half the warm-up; after the blocks 95).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import price
import torch
import trainings
from evidence.csv_files import append, has_row, read
from evidence.images import read as read_images
from evidence.measure import corrupted
from price import CHOICES
from timm.layers import NonLocalAttn
from torch import Tensor, nn
from trainings import correct, groups_of, macs_of, top1

import recast
from recast.analysis.wakefulness import wakefulness
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.digits import draw_classes
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import recast_layers
from recast.surgery.rules import convert

Setting = dict[str, Any]
Data = tuple[Tensor, ...]

BASE: Setting = {"start": "tap", "query_key": "images", "place": "last", "gate_ratio": 50, "head_dim": 32}
NEW = BASE | {"place": "second"}
AFTER = BASE | {"place": "block"}
SWEEP: tuple[Setting, ...] = (
    {}, {"place": "block"}, {"query_key": "similar"}, {"query_key": "random"}, {"place": "second"},
    {"start": "zero", "gate_ratio": 10}, {"start": "random"}, {"query_key": "zero"}, {"start": "zero", "gate_ratio": 1},
    {"place": "all"}, {"place": "last block"}, {"place": "before last"},
    {"gate_ratio": 10}, {"gate_ratio": 150}, {"head_dim": 16}, {"head_dim": 64},
    {"block": "non-local", "gate_ratio": 50}, {"block": "non-local", "gate_ratio": 1},
    {"block": "non-local", "gate_ratio": 10},
)  # fmt: skip
SWEEP_EPOCHS = {"odd_photo": 6, "odd_digit": 10}
EPOCHS = price.EPOCHS | {"odd_photo": 10}
LR = price.LR | {"odd_photo": 2e-3}
CANVASES = {"train": 8000, "dev": 2000, "test": 2000}
TESTED = {"odd_photo": 2000, "odd_digit": 2000, "cifar": 5000, "converged": 5000, "corrupted": 1000}
"""Test images. corrupted: the networks of converged, on 1,000 of its images in 15 corruptions."""
NEW_QUESTION = ("odd_photo", "odd_digit")
"""Tasks with the parent's classes, whose answers mean something else: the classifier is new."""
OURS = ("beside", "beside, equal seconds", "after the blocks, equal seconds")
AWAKE = 0.01
"""A layer is awake if attention, less a global mean, makes more than this share of its output."""


# --- the odd photograph -----------------------------------------------------------------------------------------------


class LastStage(nn.Module):
    """The last stage and the classifier of a CIFAR ResNet, a network for the features of the stages before."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.layer3, self.global_pool, self.linear = network.layer3, network.global_pool, network.linear
        self.num_features = network.num_features

    def forward_features(self, x: Tensor) -> Tensor:
        return self.layer3(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.global_pool(self.layer3(x)).flatten(1))  # type: ignore[no-any-return]


def draw_grids(photos: ImageTensors, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return normalised canvases (N, 3, 64, 64) and the classes of their odd photographs. The empty cell is zero."""
    generator = torch.Generator().manual_seed(seed)
    classes, answers = draw_classes("odd_digit", count, generator)
    order, members = photos.labels.argsort(stable=True), photos.labels.bincount(minlength=10)
    drawn = (torch.rand(count, 3, generator=generator) * members[classes]).long()
    drawn[:, 2] = torch.where(drawn[:, 2] == drawn[:, 1], (drawn[:, 1] + 1) % members[classes[:, 1]], drawn[:, 2])
    chosen = photos.pixels[order[(members.cumsum(0) - members)[classes] + drawn]]
    cells = torch.rand(count, 4, generator=generator).argsort(1)
    grid = torch.zeros(count, 4, 3, 32, 32)
    grid[torch.arange(count)[:, None], cells[:, :3]] = trainings.normalised(chosen)
    canvas = grid.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5)  # N, channels, grid row, row, grid column, column
    return canvas.reshape(count, 3, 64, 64), answers


def photos(part: str) -> ImageTensors:
    """Return the images of CIFAR-10 to train on, the tenth of train.zip that is held out (dev), or the test images."""
    images, test = read_images(Path(os.environ["RECAST_DATA"]) / "cifar10")
    train, dev = map(images.subset, hold_out(images.labels, 0.1))
    return {"train": train, "dev": dev, "test": test}[part]


@torch.no_grad()
def load_photos(held_out: str, out: Path) -> tuple[nn.Module, Data]:
    """Return the last stage of the parent, and features and answers, from disk or computed: to train on, and others."""
    network: Any = trainings.cifar10_network()
    trunk = nn.Sequential(network.conv1, network.bn1, network.act1, network.layer1, network.layer2)
    data: list[Tensor] = []
    for seed, part in enumerate(("train", held_out)):
        cache = out / f"features_{part}.pt"
        if not cache.exists():
            canvases, answers = draw_grids(photos(part), CANVASES[part], 100 + seed + (part == "test"))
            torch.save((torch.cat([trunk(canvas) for canvas in canvases.split(50)]), answers), cache)
        data += torch.load(cache, weights_only=True)
    return LastStage(network), tuple(data)


@torch.no_grad()
def right_corrupted(model: nn.Module, out: Path) -> np.ndarray:
    """Return whether each image is classified correctly in each corruption of ImageNet-C, (15, N)."""
    test = photos("test")
    few = test.subset(choose_balanced(test.labels, TESTED["corrupted"], "the test images"))
    kinds = corrupted(few, out / "corrupted").values()
    return np.stack([correct(model, trainings.normalised(x.pixels), x.labels).numpy() for x in kinds])


# --- networks and trainings -------------------------------------------------------------------------------------------


def load(task: str, held_out: str, out: Path) -> tuple[nn.Module, Data]:
    """Return the parent, and images and answers: to train on, and others."""
    parent, data = load_photos(held_out, out) if task == "odd_photo" else price.load(task, held_out, out)
    if task in NEW_QUESTION:
        torch.manual_seed(0)
        [layer for layer in parent.modules() if isinstance(layer, nn.Linear)][-1].reset_parameters()
    return parent, data


def complete(setting: Setting) -> Setting:
    """Return a setting with a value for every choice of both layers."""
    common = {"start": "", "place": "", "block": "", "content_heads": ""} | dict.fromkeys(CHOICES, "")
    return common | {"gate_ratio": 10, "qk_ratio": 1} | setting


def build(parent: nn.Module, setting: Setting, images: Tensor, seed: int) -> nn.Module:
    """Return the parent with attention beside convolutions, or as price.py builds it."""
    if setting["block"] == "non-local":
        torch.manual_seed(seed)
        model, pixels = copy.deepcopy(parent), parent.forward_features(images[:1])[0, 0].numel()  # type: ignore[operator]
        new = build(parent, complete(NEW), images, seed)
        trainings.add_block(model, "non-local", (macs_of(new, images) - macs_of(parent, images)) / pixels, pixels)
        return model
    if setting["block"] or setting["content_heads"]:
        return price.build(parent, setting, images, seed)
    torch.manual_seed(seed)
    model = copy.deepcopy(parent)
    stage: Any = model.layer3
    names = [name for name, m in stage.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    if not setting["start"]:
        return model
    choices = {"head_dim": setting["head_dim"], "query_key": setting["query_key"]}
    if setting["place"] == "block":
        config = recast.RecastConfig(beside="block", **choices)
        recast.recast_(model, recast.plan(parent, images[:2], config, max_tokens=None))
    placed = {"all": names, "second": [n for n in names if n.endswith(("conv2", "depthwise_conv"))], "last": names[-1:]}
    placed |= {"last block": names[-2:], "before last": names[-2:-1]}
    for name in placed.get(setting["place"], ()):
        layer = convert(stage.get_submodule(name), recast.RecastConfig(**choices))
        start(layer, setting)
        stage.set_submodule(name, layer)
    if setting["query_key"] in ("images", "similar"):
        recast.wake_(model, images[:256], seed=seed)
    return model


@torch.no_grad()
def start(layer: AttentionBeside, setting: Setting) -> None:
    """Set the initial values of a layer. With W_con = 0 there is no gate: γ stays 1."""
    if setting["query_key"] == "zero":
        nn.init.zeros_(layer.key)
    if setting["start"] == "random":
        nn.init.kaiming_uniform_(layer.content, a=math.sqrt(5))
    if setting["start"] == "zero":
        nn.init.zeros_(layer.content)
        nn.init.ones_(layer.gamma)
        layer.gamma.requires_grad_(False)


@torch.no_grad()
def evidence(model: nn.Module, images: Tensor) -> dict[str, str]:
    """Return how far attention is awake: per layer the mean |γ|, entropy of C over ln M, and share of the output.

    The share is ‖γ (C − 1/M) X W‖ / ‖y‖: what a global mean would not have made. Of several heads the largest counts.
    """
    gammas, entropies, shares = [], [], []
    recast_here = recast_layers(model)
    for name, measured in wakefulness(model, images).items():
        heads = [h for h, value in enumerate(measured["entropy"]) if value is not None]
        gammas.append(float(recast_here[name].gamma.abs().mean()))  # type: ignore[union-attr, operator]
        entropies.append(statistics.mean(measured["entropy"][h] or 0.0 for h in heads))
        shares.append(max(measured["attention_share"][h] or 0.0 for h in heads))
    gammas += [float(m.norm.weight.abs().mean()) for m in model.modules() if isinstance(m, NonLocalAttn)]
    words = {"gamma": gammas, "entropy": entropies, "share": shares}
    awake = f"{sum(share > AWAKE for share in shares)}/{len(shares)}" if shares else ""
    return {"awake": awake} | {name: " ".join(f"{value:.3g}" for value in values) for name, values in words.items()}


def sweep(options: argparse.Namespace) -> None:
    """Train the settings that the table lacks; --only: the choices to vary, of `BASE`."""
    task, path = options.task, options.out / "sweep.csv"
    parent, data = load(task, "dev", options.out)
    for seed, changes in itertools.product(options.seeds, SWEEP):
        varied = "block" if "block" in changes else next(iter(changes), "start")
        setting = complete(changes if varied == "block" else BASE | changes)
        labels = {"task": task, "block": setting["block"]} | {name: setting[name] for name in NEW}
        labels |= {"epochs": SWEEP_EPOCHS[task], "seed": seed}
        if (options.only and varied not in options.only) or has_row(path, **labels):
            continue
        model = build(parent, setting, data[0], seed)
        seconds = price.train_on(task, model, data, setting, LR[task], SWEEP_EPOCHS[task], seed)
        result = {"top1": top1(correct(model, *data[2:])), "cpu_seconds": f"{seconds:.0f}"}
        append(path, labels | result | evidence(model, data[2][:64]))


# --- the comparison ---------------------------------------------------------------------------------------------------


def arms(task: str) -> dict[str, Setting]:
    """Return the arms: a setting, and `as_long_as`, the arm that sets its training time."""
    long = {"as_long_as": "beside" if task == "cifar" else "non-local"}
    today = price.ONE | {"project_values": False, "query_key": "zero"}
    nine = {"content_heads": "all", "gaussian_heads": "none", "project_values": False, "query_key": "zero"}
    all_arms = {"parent": {"epochs": 0}, "beside": NEW, "non-local": {"block": "non-local", "gate_ratio": 50}}
    all_arms |= {"fine-tuned, equal seconds": long, "the former default, equal seconds": today | long}
    all_arms |= {"fine-tuned, equal updates": {}, "beside, equal seconds": NEW | long}
    all_arms |= {
        "the last convolution alone, equal seconds": BASE | long,
        "after the blocks, equal seconds": AFTER | long,
    }
    all_arms |= {"nine heads, equal seconds": nine | {"gate_ratio": 50} | long}
    all_arms |= {"global context": {"block": "context", "gate_ratio": 50}}
    all_arms |= {"SE, equal seconds": {"block": "SE", "gate_ratio": 1} | long}
    if task != "converged":
        del all_arms["parent"]  # its classifier is new
    return {arm: complete({"epochs": EPOCHS[task]} | setting) for arm, setting in all_arms.items()}


def times(options: argparse.Namespace) -> None:
    """Time a step and inference of every arm, by turns."""
    task, timed = options.task, {}
    parent, data = load(task, "dev", options.out)
    first = [part[: price.BATCH[task]] for part in data[:2]]
    for arm, setting in arms(task).items():
        if not options.only or arm in options.only:
            model = build(parent, setting, data[0], 0)
            timed[arm] = model, groups_of(model, LR[task], setting), *first
    trainings.write_times(options.out / f"times_{task}.csv", task, timed, rounds=21)


def compare(options: argparse.Namespace) -> None:
    """Train the arms that the table lacks; store which test images were right."""
    task, out = options.task, options.out
    parent, data = load(task, "test", out)
    step = {row["arm"]: float(row["step"]) for row in read(out / f"times_{task}.csv")}
    path = out / "compare.csv"
    for seed, arm in trainings.missing_runs(options, path, arms(task), task=task):
        setting = arms(task)[arm]
        epochs = setting["epochs"] * (step[setting["as_long_as"]] / step[arm] if "as_long_as" in setting else 1)
        model = build(parent, setting, data[0], seed)
        seconds = price.train_on(task, model, data, setting, LR[task], epochs, seed)
        hits = correct(model, *data[2:])
        trainings.store(out / "right" / f"{task}_{arm}_{seed}.npy", hits)
        row = {"task": task, "arm": arm, "seed": seed, "epochs": f"{epochs:.2f}", "top1": top1(hits)}
        row |= {"cpu_seconds": f"{seconds:.0f}"} | evidence(model, data[2][:64])
        append(path, row)
        if task == "converged":
            in_kinds = right_corrupted(model, out)
            trainings.store(out / "right" / f"corrupted_{arm}_{seed}.npy", in_kinds)
            append(path, row | {"task": "corrupted", "top1": f"{100 * in_kinds.mean():.2f}"})


def table(options: argparse.Namespace) -> None:
    """Write results/beside*.csv: the sweep, step times, runs, and differences to our arms."""
    out, runs = options.out, read(options.out / "compare.csv")

    def right(task: str, arm: str, seeds: list[str]) -> np.ndarray:
        """Return the share of an image's versions that were classified correctly, 0 or 1 but for corrupted ones."""
        versions = 15 if task == "corrupted" else 1
        each = trainings.stored(out / "right" / f"{task}_{arm}", seeds, versions * TESTED[task])
        return each.reshape(len(seeds), versions, -1).mean(1)

    timed = [row for path in sorted(out.glob("times_*.csv")) for row in read(path)]
    tables = {"_sweep": read(out / "sweep.csv"), "": runs, "_times": timed}
    trainings.write_tables("beside", tables | {"_differences": list(trainings.differences(runs, OURS, right))})


if __name__ == "__main__":
    parts = {"sweep": sweep, "times": times, "compare": compare, "table": table}
    trainings.main(__doc__, ("odd_photo", "odd_digit", "cifar", "converged"), parts)
