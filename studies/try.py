"""Does `recast try` predict? Its answers beside full trainings of all arms.

    RECAST_DATA=DIR python studies/try.py --out runs/try                  # every task; continues where it was stopped
    RECAST_DATA=DIR python studies/try.py odd_digit --out runs/try
    RECAST_DATA=DIR python studies/try.py halves --full --out runs/try    # also the whole network, ten times as long

Writes results/try.csv, a row per task: the trial's answer, the minutes of this call, and the full
training. That is a published one (`PUBLISHED`, with that study's layer), else the one of --full, also of an earlier
call: the same arms, rates and seeds, with nothing computed beforehand. A trial does not support segmentation (scenes).

odd_digit        the quickstart's question, from a network that reads one digit
cifar10-N        CIFAR-10 from a network of CIFAR-100, N images
cifar100         CIFAR-100 from a network of CIFAR-10
textures         CIFAR-10 cut into 4×4 patches, shuffled: positions carry no information, attention must not help
halves           two CIFAR-10 images in opposite corners: of one class? Distant parts are compared, attention must help
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from evidence.csv_files import RESULTS, read, write
from safetensors.torch import load_file
from torch import Tensor, nn

import recast
import recast.papers.networks  # registers them
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.data.datasets import ImageTensors
from recast.lab.trial import arms, run, try_
from recast.lab.trial.features import Bank
from recast.lab.trial.split import Split, Tail

WEIGHTS = {
    "cifar10": ("cifar_resnet20_a", 10, "cifar10_resnet20_akamaster"),
    "cifar100": ("cifar_resnet20", 100, "cifar100_resnet20_chenyaofo"),
}
Task = tuple[nn.Module, Data]
COLUMNS = (
    "task train val seeds worth updates over_finetuned low_95 high_95 over_longer longer_low_95 longer_high_95 "
    "awake heads minutes full full_gain full_low_95 full_high_95 full_minutes"
).split()


def transfer(source: str, target: str, num_train: int | None = None) -> Task:
    """Return a network trained on one CIFAR, and the images of the other."""
    name, classes, file = WEIGHTS[source]
    root = Path(os.environ["RECAST_DATA"])
    model = timm.create_model(name, num_classes=classes)
    model.load_state_dict(load_file(root / "weights" / f"{file}.safetensors"))
    return model.eval(), load_data(DataConfig(target, str(root / target), num_train=num_train))


def odd_digit() -> Task:
    """Return a network that was trained to read one digit, and canvases with three."""
    torch.manual_seed(0)
    model, data = timm.create_model("digits_resnet", num_classes=10), load_data(DataConfig("one_digit"))
    pixels, labels = data.train.plain().batch(range(len(data.train)))
    images = data.normalised(pixels, torch.device("cpu"))
    bank, tail = Bank((images.numpy(),), labels, torch.arange(len(labels))), Tail(model, "", images.shape[1:])
    cpu = torch.device("cpu")
    arms.train_(tail, bank, bank.spread(100), rate=2e-3, updates=3 * 78, batch=64, seed=0, device=cpu)
    cfg = {"mean": data.mean, "std": data.std}
    model.pretrained_cfg = {**model.pretrained_cfg, **cfg}  # type: ignore[dict-item]
    return model.eval(), load_data(DataConfig("odd_digit"))


def derived(change: Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]], classes: list[str]) -> Task:
    """Return a network of CIFAR-10, and images derived from CIFAR-10's."""
    model, data = transfer("cifar10", "cifar10", 4000)
    parts = []
    for seed, part in enumerate((data.train, data.val.subset(torch.arange(0, len(data.val), 5)))):
        assert isinstance(part, ImageTensors)
        pixels, labels = change(part.pixels, part.labels, torch.Generator().manual_seed(seed))
        parts.append(ImageTensors(pixels, labels, part.augment))
    return model, replace(data, train=parts[0], val=parts[1], classes=classes, img_size=parts[0].img_size)


def shuffled(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shuffle the 4×4 patches of each image."""
    count, side = len(pixels), pixels.shape[-1]
    patches = nn.functional.unfold(pixels.float(), 4, stride=4).transpose(1, 2)
    order = torch.rand(count, patches.shape[1], generator=generator).argsort(1)
    patches = patches[torch.arange(count)[:, None], order].transpose(1, 2)
    return nn.functional.fold(patches, (side, side), 4, stride=4).byte(), labels


def halves(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put two images in opposite corners of a grey one; half of the pairs have the same class."""
    count = len(pixels)
    is_same = torch.arange(count) % 2 == 0
    fits = (labels[:, None] == labels) == is_same[:, None]
    partners = (fits.float() * torch.rand(count, count, generator=generator)).argmax(1)
    canvas = torch.full((count, 3, 64, 64), 124, dtype=torch.uint8)
    canvas[:, :, :32, :32], canvas[:, :, 32:, 32:] = pixels, pixels[partners]
    return canvas, is_same.long()


TASKS: dict[str, Callable[[], Task]] = {
    "odd_digit": odd_digit,
    "cifar10-1000": partial(transfer, "cifar100", "cifar10", 1000),
    "cifar10-4000": partial(transfer, "cifar100", "cifar10", 4000),
    "cifar100": partial(transfer, "cifar10", "cifar100"),
    "textures": partial(derived, shuffled, [str(number) for number in range(10)]),
    "halves": partial(derived, halves, ["different", "same"]),
}
PUBLISHED = {
    "odd_digit": ("odd_digit_nine.csv", {"arm": "recast − finetuned", "metric": "clean top1"}, "mean", 8),
    **{
        f"cifar10-{count}": (
            "evidence_differences.csv",
            {
                "study": f"a-cifar100-cifar10-{count}",
                "arm": "recast, images, rates as fine-tuned",
                "against": "fine-tuned",
                "metric": "clean",
            },
            "difference",
            minutes,
        )
        for count, minutes in ((1000, 22), (4000, 46))
    },
    "cifar100": ("price_compare_cifar.csv", {"arm": "fine-tuned, equal updates"}, "one_wide_head_minus_arm", 18),
}
"""Table of a full training, its row, the column of the gain, and minutes of machine time (both arms, three seeds)."""


def published(name: str) -> list[Any]:
    """Return the last five columns from a table; an empty list if there is none."""
    if name not in PUBLISHED:
        return []
    file, labels, column, minutes = PUBLISHED[name]
    row = next(row for row in read(RESULTS / file) if labels.items() <= row.items())
    return [file, row[column], row["low_95"], row["high_95"], minutes]


def unsplit(network: nn.Module, _layers: Any, images: Tensor) -> Split:
    """Replace `split_network` to train all layers."""
    return Split(network, Tail(copy.deepcopy(network), "", images.shape[1:]))


def numbers(gain: Any) -> list[str]:
    """Return mean and interval of a gain."""
    return [f"{value:.2f}" for value in (gain.mean, gain.low, gain.high)]


def main() -> None:
    """Run the tasks and update the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=(*TASKS, []))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=lambda text: text if text == "auto" else float(text), default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also train the whole network")
    options = parser.parse_args()
    path = RESULTS / "try.csv"
    rows = {row["task"]: row for row in read(path)}
    for name in options.tasks or TASKS:
        model, data = TASKS[name]()
        plan = recast.plan(model, torch.zeros(1, 3, data.img_size, data.img_size))
        settings: dict[str, Any] = {"seeds": options.seeds, "progress": True, "say": print}
        begin = time.perf_counter()
        answer = try_(model, data, plan, options.out / name, minutes=options.minutes, **settings)
        minutes = (time.perf_counter() - begin) / 60
        print(answer)
        full = published(name) or [rows.get(name, {}).get(column, "") for column in COLUMNS[-5:]]
        if options.full:
            split, run.split_network = run.split_network, unsplit  # type: ignore[assignment]
            full_minutes = 10 * answer.facts.minutes
            result = try_(model, data, plan, options.out / f"{name}-full", minutes=full_minutes, **settings)
            run.split_network = split
            full = ["--full", *numbers(result.gains["finetuned"]), full_minutes]
        values = [name, answer.facts.train, answer.images, answer.seeds, answer.worth, answer.arms[-1].updates]
        values += [*numbers(answer.gains["finetuned"]), *numbers(answer.gains["longer"]), answer.awake, answer.heads]
        values += [f"{minutes:.1f}", *full]
        rows[name] = dict(zip(COLUMNS, values, strict=True))
        write(path, [{column: rows[task].get(column, "") for column in COLUMNS} for task in TASKS if task in rows])


if __name__ == "__main__":
    main()
