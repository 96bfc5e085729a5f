"""Photographs whose parts must be compared: attention beside a convolution, and what a user would take instead.

    RECAST_DATA=DIR python studies/photographs.py twice times --out runs/photographs
    RECAST_DATA=DIR python studies/photographs.py twice rates --out runs/photographs     # each arm's learning rate
    RECAST_DATA=DIR python studies/photographs.py twice compare --out runs/photographs --seeds 0 1 2    # after both
    RECAST_DATA=DIR python studies/photographs.py twice table --out runs/photographs     # writes the tables
    RECAST_DATA=DIR python studies/photographs.py odd folder --out runs/odd    # PNGs in class folders, for `recast try`

Each part continues where it was stopped, a training at a time; `--only` names arms.

Tasks. A canvas shows CIFAR-10 photographs of 32×32 pixels, in cells that are drawn anew for each canvas; an empty cell
has ImageNet's mean colour. Training canvases show photographs of train.zip, held-out ones those of a tenth of it that
no training canvas shows, test canvases those of test.zip. Nothing but the seed decides what is drawn (`draw`).

    odd       three photographs in 2×2 cells, two of one class and one of another: the class of the odd one
    twice     four cells; one photograph appears twice, the second time mirrored, cropped and in other colours: in which
              two cells? Six answers. The others are of any class, so that neither classes nor counts answer it
    more      seven photographs of two classes in 2×4 cells, four of one and three of the other: the class of the four
    first     the canvases of twice: the class of the photograph in the first cell. Nothing to compare
    textures  one photograph whose 4×4 patches are shuffled: its class. Positions carry nothing, nothing to compare
    views     as twice, but every photograph is mirrored, cropped and recoloured, each in its own way: two are views of
              one. In twice the copy is known by its looks, even without its original (photographs_maps.py)
    odd_224, views_224    the canvases of odd and views, drawn anew, enlarged to 224 pixels (bicubic)

Network of tasks at 224 pixels: EfficientNet-Lite0 of ImageNet, from PyPI (`efficientnet_lite0`), the same way: its last
block, depthwise 3×3 convolution on 7×7 pixels, is trained with the 1×1 convolution and the new classifier after it.

Network of the others: a ResNet-20 of CIFAR-10 as published (91.9 %), frozen, in eval mode, up to the last block but
`BLOCKS`. Its features are computed once; an arm trains the blocks after that and the classifier, which is new but for
textures (in odd, the parent's would be sure of the commoner class, never the answer). Where the answer is a place
(twice, first) it reads the mean of each cell. A frozen trunk makes attention a larger share of a step than in a
training of the whole network, which favours the arms without.

Protocol, stated before the first run. Arms (`ARMS`), all for as many seconds as attention beside the convolution takes
for `EPOCHS` epochs, by measured step times: the parent's blocks trained on; attention beside the last convolution of
each block; the same layer after the blocks (`beside="block"`); nine heads in every convolution of the blocks; and,
after the last block, timm's non-local block of as many multiply-adds as beside, two 1×1 convolutions of as many, global
context, CBAM and SE; BoTNet's layer in place of the last convolution; a ViT on the trunk's features; a ViT and a
ConvNeXt on pixels, from random weights. Also the parent's blocks trained on for as many updates as beside. AdamW,
batches of 32, weight decay 0.05, cosine after a twentieth of warm-up, gates at 50 times the rate. rates: each arm at
each of `RATES`, a third of its updates, seed 0, on held-out canvases; the best is taken. compare: on test canvases;
seeds change the order of canvases and new parameters.
A difference beside − arm is shown if 0 is outside its 95 % interval over seeds and canvases
(`recast.lab.evaluation.intervals`). What decides, by task: beside pays on it if it is shown to
be ahead of the blocks trained on; it is the choice if it is shown to be ahead of every other arm too; it must not be
chosen where it is shown to be behind. first and textures: nothing is expected.

Run so far: seven arms, beside to CBAM and the ViT on features; step times of all arms. twice was run for 6 epochs
first, with one gate for all channels: all arms took 4e-3, the highest rate then, two seeds of beside had 48 and 61 %,
and no difference was shown; it was run again for 18 epochs with a third rate and a gate for every channel, without two
1×1 convolutions (49 %), CBAM (43) and the ViT (27). The odd photograph of beside.py was run there; first with beside to
non-local. views was added after twice, at the same step times (the networks are the same), with five arms: beside,
after the blocks, fine-tuned, non-local, global context; what decides is as above. odd was run with CBAM and after the
blocks, first with four arms, at the step times of twice. SE was run last, after it had led in odd_224: in odd, views.

The tasks at 224 pixels were added later. Queries and keys had the rate of other weights there: in odd_224 after the
blocks had 59.2, 55.8, 58.3, beside 38.8, 39.6, 41.6; in views_224 69.6, 69.2, 68.9 and 70.7, 70.5, 70.4. CBAM then
reached 55.7 % of held-out canvases in a third of its training, which led to `queries_keys`, to the rates of
`recast.param_groups` (63.0, 60.4, 63.6 and 45.7, 44.7, 45.8 in odd_224) and to the least size of `recast.wake_`. With
both, our arms were run again, and with them the others, at the rates that they had. queries_keys: our arms at 4e-3,
with queries and keys at `SHARES` of it, for a third of their updates, on held-out canvases.

SqueezeNet 1.1 was tried on the canvases of odd_224, its last Fire module trained for 16 epochs: without BatchNorm 98 %
of its channels are dead after 100 updates at 4e-3, and at 1e-4 to 1e-3 no arm of five got more than 20 % of held-out
canvases. It was not compared.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import beside
import numpy as np
import torch
import trainings
from beside import AFTER, NEW, LastStage, complete, evidence, photos
from evidence.csv_files import append, has_row, read
from PIL import Image
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.cbam import CbamModule
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from trainings import correct, groups_of, macs_of, top1

from recast.lab.data.datasets import ImageTensors
from recast.lab.data.digits import draw_classes
from recast.layers.cmhsa import recast_layers
from recast.models.register import IMAGENET

Data = tuple[Tensor, ...]

TASKS = ("odd", "twice", "more", "first", "textures", "views", "odd_224", "views_224")
PLACES = ("twice", "first", "views")
"""Tasks whose answer is a place."""
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
COUNTS = {"train": 4000, "dev": 1000, "test": 2000}
SIDE, BATCH, BLOCKS = 32, 32, 1
EPOCHS = {"odd": 6, "twice": 18, "more": 3, "first": 6, "textures": 6, "views": 18, "odd_224": 6, "views_224": 6}
RATES = (1e-3, 4e-3, 1.2e-2)
SHARES = (4.0, 1.0, 0.3, 0.2, 0.1, 0.03, 0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    "beside": NEW,
    "after the blocks": AFTER,
    "fine-tuned": {},
    "non-local": {"block": "non-local"},
    "nine heads": {"content_heads": "all", "gaussian_heads": "none", "project_values": False, "query_key": "zero"},
}
BLOCK = {"global context": "context", "two 1×1": "1×1"}
FROM_PIXELS = ("ViT", "ConvNeXt")
EQUAL_UPDATES = "fine-tuned, equal updates"
OURS = ("beside", "after the blocks")
ARMS = (*SETTINGS, *BLOCK, "SE", "CBAM", "BoTNet", "ViT on features", *FROM_PIXELS, EQUAL_UPDATES)


# --- canvases ---------------------------------------------------------------------------------------------------------


def sample(photos: ImageTensors, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Return photographs (N, K, 3, 32, 32) of classes (N, K); no canvas shows one twice."""
    order, members = photos.labels.argsort(stable=True), photos.labels.bincount(minlength=10)
    rank = (classes[:, :, None] == classes[:, None]).tril(-1).sum(2)  # earlier photographs of the same class
    first, step = (torch.rand(len(classes), 10, generator=generator).gather(1, classes) for _ in range(2))
    count = members[classes]
    drawn = ((first * count).long() + rank * (1 + (step * (count // 4 - 1)).long())) % count  # at most four of a class
    return photos.pixels[order[(members.cumsum(0) - members)[classes] + drawn]]


def arrange(pictures: Tensor, cells: Tensor, rows: int) -> Tensor:
    """Return canvases (N, 3, H, W) with pictures (N, K, 3, h, w) in their cells (N, K); the others are empty."""
    count, size, columns = len(pictures), pictures.shape[3], 4 if rows == 2 and cells.shape[1] > 4 else rows
    mean = torch.tensor([round(255 * value) for value in IMAGENET[0]], dtype=torch.uint8)
    grid = mean[None, None, :, None, None].repeat(count, rows * columns, 1, size, size)
    grid[torch.arange(count)[:, None], cells] = pictures
    canvas = grid.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return canvas.reshape(count, 3, rows * size, columns * size)


def altered(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return pictures (N, 3, h, w) mirrored, cropped to 20 to 28 pixels and enlarged again, in other colours."""
    count, size = len(pictures), pictures.shape[3]
    scale = (20 + 8 * torch.rand(count, generator=generator)) / size
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - scale)[:, None]
    matrix = torch.zeros(count, 2, 3)
    matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, :, 2] = -scale, scale, shift
    where = F.affine_grid(matrix, [count, 3, size, size], align_corners=False)
    cropped = F.grid_sample(pictures.float(), where, align_corners=False, padding_mode="border")
    gains = 0.6 + 0.8 * torch.rand(count, 3, 1, 1, generator=generator)
    return (cropped * gains).clamp(0, 255).round().byte()


def seen_twice(pictures: Tensor, generator: torch.Generator, *, all_altered: bool = False) -> tuple[Tensor, Tensor]:
    """Return canvases of pictures (N, 3, 3, h, w), the first seen twice, and cells (N, 4), that of its copy last."""
    pictures = pictures[:, [0, 1, 2, 0]]
    changed = pictures if all_altered else pictures[:, 3:]
    changed = altered(changed.flatten(0, 1), generator).unflatten(0, changed.shape[:2])
    pictures = torch.cat([pictures[:, : 4 - changed.shape[1]], changed], 1)
    cells = torch.rand(len(pictures), 4, generator=generator).argsort(1)
    return arrange(pictures, cells, 2), cells


def pair_answers(cells: Tensor) -> Tensor:
    """Return the numbers in `PAIRS` of the two cells (N,) that show one photograph."""
    answer_of = {pair: number for number, pair in enumerate(PAIRS)}
    return torch.tensor([answer_of[tuple(pair)] for pair in cells[:, [0, 3]].sort(1).values.tolist()])


def draw(task: str, photos: ImageTensors, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return canvases (N, 3, H, W) uint8 and answers (N,) of a task."""
    task, generator = task.removesuffix("_224"), torch.Generator().manual_seed(seed)
    if task == "textures":
        chosen = torch.randperm(len(photos.labels), generator=generator)[:count]
        shuffled: Tensor = importlib.import_module("try").shuffled(photos.pixels[chosen], chosen, generator)[0]
        return shuffled, photos.labels[chosen]
    if task == "odd":
        classes, answers = draw_classes("odd_digit", count, generator)
        cells = torch.rand(count, 4, generator=generator).argsort(1)[:, :3]
        return arrange(sample(photos, classes, generator), cells, 2), answers
    if task == "more":
        pair = torch.rand(count, 10, generator=generator).argsort(1)[:, :2]
        cells = torch.rand(count, 8, generator=generator).argsort(1)[:, :7]
        return arrange(sample(photos, pair.repeat_interleave(torch.tensor([4, 3]), 1), generator), cells, 2), pair[:, 0]
    classes = torch.randint(10, (count, 3), generator=generator)
    canvases, cells = seen_twice(sample(photos, classes, generator), generator, all_altered=task == "views")
    if task == "first":
        at_first = (cells == 0).float().argmax(1, keepdim=True)
        return canvases, classes[:, [0, 1, 2, 0]].gather(1, at_first).flatten()
    return canvases, pair_answers(cells)


def seed_of(task: str, part: str) -> int:
    """Return the seed of the canvases of a part: train, dev or test."""
    return 700 + 10 * TASKS.index(task) + list(COUNTS).index(part)


def drawn(task: str, part: str) -> tuple[Tensor, Tensor]:
    """Return the canvases and answers of a part."""
    return draw(task, photos(part), COUNTS[part], seed_of(task, part))


def folder(options: argparse.Namespace) -> None:
    """Write train/ANSWER/NUMBER.png and val/ANSWER/NUMBER.png, the held-out canvases."""
    for name, part in (("train", "train"), ("val", "dev")):
        for number, (canvas, answer) in enumerate(zip(*drawn(options.task, part), strict=True)):
            path = options.out / name / str(int(answer)) / f"{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(canvas.permute(1, 2, 0).numpy()).save(path)


# --- networks ---------------------------------------------------------------------------------------------------------


class Enlarged(nn.Module):
    """Canvases at 224 pixels, normalised as EfficientNet-Lite takes them instead of as networks of CIFAR do."""

    def forward(self, x: Tensor) -> Tensor:
        mean, std, lite_mean, lite_std = (torch.tensor(v)[:, None, None] for v in (*IMAGENET, *trainings.LITE))
        return (F.interpolate(x, (224, 224), mode="bicubic") * std + mean - lite_mean) / lite_std


def split(task: str) -> tuple[nn.Sequential, nn.Module]:
    """Return the frozen trunk, and the blocks to train with their classifier."""
    is_large, task = task.endswith("_224"), task.removesuffix("_224")
    if is_large:
        lite = trainings.efficientnet_lite0()
        trunk = nn.Sequential(Enlarged(), lite._conv_stem, lite._bn0, lite._swish, *lite._blocks[:-BLOCKS])
        last, head = nn.Sequential(*lite._blocks[-BLOCKS:]), nn.Sequential(lite._conv_head, lite._bn1, lite._swish)
        network: Any = LastStage(SimpleNamespace(layer3=last, global_pool=head, linear=lite._fc, num_features=320))
    else:
        network, head = trainings.cifar10_network(), nn.Sequential()
        trunk = nn.Sequential(network.conv1, network.bn1, network.act1, network.layer1, network.layer2)
        trunk.extend(network.layer3[:-BLOCKS])
        network.layer3 = network.layer3[-BLOCKS:]
    torch.manual_seed(0)
    width, answers = network.linear.in_features, len(PAIRS) if task in ("twice", "views") else 10
    if task in PLACES:
        network.global_pool = nn.Sequential(head, nn.AdaptiveAvgPool2d(2))
        network.linear = nn.Linear(4 * width, answers)
    elif task != "textures":
        network.global_pool = nn.Sequential(head, nn.AdaptiveAvgPool2d(1))
        network.linear = nn.Linear(width, answers)
    return trunk, LastStage(network)


@torch.no_grad()
def load(task: str, held_out: str, out: Path) -> tuple[nn.Module, dict[bool, Data]]:
    """Return the blocks to train and, from features and from pixels (True), inputs and answers: to train on, others."""
    trunk, tail = split(task)
    data: dict[bool, list[Tensor]] = {False: [], True: []}
    for part in ("train", held_out):
        pixels, answers = drawn(task, part)
        images, cache = trainings.normalised(pixels), out / f"{task}_{part}.pt"
        if not cache.exists():
            torch.save(torch.cat([trunk(canvases) for canvases in images.split(50)]), cache)
        data[False] += [torch.load(cache, weights_only=True), answers]
        data[True] += [images, answers]
    return tail, {kind: tuple(values) for kind, values in data.items()}


def build(arm: str, tail: nn.Module, images: Tensor, seed: int) -> nn.Module:
    """Return the network of an arm for inputs like `images`: features, or canvases for arms `FROM_PIXELS`."""
    arm = "fine-tuned" if arm == EQUAL_UPDATES else arm
    if arm in SETTINGS:
        return beside.build(tail, complete(SETTINGS[arm]), images, seed)
    torch.manual_seed(seed)
    model: Any = copy.deepcopy(tail)
    width, size, classes = model.num_features, tuple(images.shape[2:]), model.linear.out_features
    if arm in BLOCK:
        attention, pixels = build("beside", tail, images, seed), size[0] * size[1]
        trainings.add_block(model, BLOCK[arm], (macs_of(attention, images) - macs_of(tail, images)) / pixels, pixels)
    elif arm == "SE":
        trainings.add_block(model, "SE", 0, 1)
    elif arm == "CBAM":
        model.layer3 = nn.Sequential(model.layer3, CbamModule(width))
    elif arm == "BoTNet":
        model.layer3[-1].set_submodule("conv2", BottleneckAttn(width, feat_size=size), strict=True)
    elif arm == "ConvNeXt":
        model = ConvNeXt(num_classes=classes, depths=(1, 1, 2, 1), dims=(24, 48, 96, 192), patch_size=2)
    else:
        patch, dim, depth = (8, 96, 4) if arm == "ViT" else (2, 64, 2)
        model = VisionTransformer(
            size, patch, images.shape[1], classes, embed_dim=dim, depth=depth, num_heads=4, global_pool="avg"
        )
    return model  # type: ignore[no-any-return]


def groups(model: nn.Module, lr: float, share: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups with gates at 50 times the rate, queries and keys at a share of it (default: ours)."""
    return groups_of(model, lr, {"gate_ratio": 50, "qk_ratio": share})


def train(model: nn.Module, data: Data, lr: float, updates: int, seed: int, share: float | None = None) -> float:
    """Train by AdamW and a cosine; return the seconds of the processor."""
    each = groups(model, lr, share)
    return trainings.train(model, *data[:2], each, updates, seed, BATCH, trainings.cosine(updates), 1e-5)


# --- parts ------------------------------------------------------------------------------------------------------------


def times(options: argparse.Namespace) -> None:
    """Time a step and inference of every arm, by turns."""
    tail, data = load(options.task, "dev", options.out)
    timed = {}
    for arm in ARMS:
        if (not options.only or arm in options.only) and arm != EQUAL_UPDATES:
            first = [part[:BATCH] for part in data[arm in FROM_PIXELS][:2]]
            model = build(arm, tail, first[0], 0)
            timed[arm] = model, groups(model, 1e-3), *first
    trainings.write_times(options.out / f"times_{options.task}.csv", options.task, timed, "fine-tuned", 7)


def updates_of(options: argparse.Namespace, arm: str) -> int:
    """Return the updates of an arm: those that take as long as those of beside."""
    step = {row["arm"]: float(row["step"]) for row in read(options.out / f"times_{options.task}.csv")}
    updates = EPOCHS[options.task] * (COUNTS["train"] // BATCH)
    return updates if arm == EQUAL_UPDATES else round(updates * step["beside"] / step[arm])


def rates(options: argparse.Namespace) -> None:
    """Train the arms and rates that the table lacks for a third of their updates."""
    path = options.out / "rates.csv"
    tail, data = load(options.task, "dev", options.out)
    for arm in options.only or ARMS:
        for lr in RATES:
            if arm != EQUAL_UPDATES and not has_row(path, task=options.task, arm=arm, lr=lr):
                inputs, updates = data[arm in FROM_PIXELS], updates_of(options, arm) // 3
                model = build(arm, tail, inputs[0][:BATCH], 0)
                train(model, inputs, lr, updates, 0)
                row = {"task": options.task, "arm": arm, "lr": lr, "updates": updates}
                append(path, row | {"top1": top1(correct(model, *inputs[2:]))})


def queries_keys(options: argparse.Namespace) -> None:
    """Train our arms with queries and keys at the shares of the rate that the table lacks."""
    path, lr = options.out / "queries_keys.csv", RATES[1]
    tail, data = load(options.task, "dev", options.out)
    for arm, share in itertools.product(options.only or OURS, SHARES):
        if not has_row(path, task=options.task, arm=arm, of_rate=share):
            updates = updates_of(options, arm) // 3
            model = build(arm, tail, data[False][0][:BATCH], 0)
            train(model, data[False], lr, updates, 0, share)
            scale = next(float(layer.qk_scale) for layer in recast_layers(model).values())
            row = {"task": options.task, "arm": arm, "lr": lr, "of_rate": share}
            row |= {"qk_scale": f"{scale:.2g}", "updates": updates}
            row |= {"top1": top1(correct(model, *data[False][2:]))}
            append(path, row | evidence(model, data[False][2][:64]))


def compare(options: argparse.Namespace) -> None:
    """Train the arms that the table lacks; store their weights, and which test canvases were right."""
    task, path = options.task, options.out / "compare.csv"
    tail, data = load(task, "test", options.out)
    for seed, arm in trainings.missing_runs(options, path, ARMS, task=task):
        tried = [row for row in read(options.out / "rates.csv") if row["task"] == task]
        tried = [row for row in tried if row["arm"] == arm.replace(EQUAL_UPDATES, "fine-tuned")]
        lr = float(max(tried, key=lambda row: float(row["top1"]))["lr"])
        inputs, updates = data[arm in FROM_PIXELS], updates_of(options, arm)
        model = build(arm, tail, inputs[0][:BATCH], seed)
        seconds, hits = train(model, inputs, lr, updates, seed), correct(model, *inputs[2:])
        trainings.store(options.out / "right" / f"{task}_{arm}_{seed}.npy", hits)
        row = {"task": task, "arm": arm, "seed": seed, "lr": lr, "updates": updates, "top1": top1(hits)}
        append(path, row | {"cpu_seconds": f"{seconds:.0f}"} | evidence(model, inputs[2][:64]))


def table(options: argparse.Namespace) -> None:
    """Write results/photographs*.csv of all tasks: runs, step times, rates, and differences to our arms."""
    out, runs = options.out, read(options.out / "compare.csv")

    def right(task: str, arm: str, seeds: list[str]) -> np.ndarray:
        return trainings.stored(out / "right" / f"{task}_{arm}", seeds, COUNTS["test"])

    timed = [row for path in sorted(out.glob("times_*.csv")) for row in read(path)]
    tables = {"": runs, "_times": timed, "_rates": read(out / "rates.csv")}
    trainings.write_tables(
        "photographs", tables | {"_differences": list(trainings.differences(runs, OURS, right, least=1))}
    )


if __name__ == "__main__":
    parts = {"times": times, "rates": rates, "compare": compare, "table": table, "folder": folder}
    parts |= {"queries_keys": queries_keys}
    trainings.main(__doc__, TASKS, parts)
