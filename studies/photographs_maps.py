"""Which photograph does a network compare with which? Its attention on canvases of `twice`, as numbers and a picture.

    RECAST_DATA=DIR python studies/photographs_maps.py train --out runs/photographs --seeds 0 1 2
    RECAST_DATA=DIR python studies/photographs_maps.py measure --out runs/photographs --seeds 0 1 2
    RECAST_DATA=DIR python studies/photographs_maps.py page --out runs/photographs

train, after `photographs.py twice times`: both places of attention at their best rate, for a third of the updates as
`rates` does, and seed 0 for all of them as `compare` does.

measure: results/photographs_maps.csv, on the first 200 test canvases, and on those of them that are answered right and
wrong. Attention of a photograph is the mean over its pixels. In percent of canvases: right; names_copy, the answer
names the altered copy (50 by chance), names_lone_copy, also where the copy's original is not shown; A_to_B, of A's
attention B has more than each of the other two (33); most, least: the original gives the copy more, or less, of its
attention than both others do (33). share_: of attention, in percent.

page: docs/photographs.png, from the pages of two networks: the best in `rates` after the blocks, above, and beside.
The first three canvases of seed 0, of the colour photographs in `skimage.data` that are CC0 or in the public domain.
The query is in the middle of the original.
"""

import argparse
import io
import itertools
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import photographs
import torch
import trainings
from beside import photos
from photographs import OURS, PAIRS, pair_answers, seen_twice
from PIL import Image
from torch import Tensor, nn

import recast
from recast.lab.explain.inputs import Input, read_image
from recast.lab.explain.make import make_scene
from recast.lab.explain.write import write_scene
from recast.models.register import IMAGENET

FREE = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "retina.jpg", "rocket.jpg")
CELLS = ("top left", "top right", "bottom left", "bottom right")
RATE, COUNT = 4e-3, 200


def runs(options: argparse.Namespace) -> Iterator[tuple[str, int, int, Path]]:
    """Yield arm, updates, seed and file of every training."""
    options.task = "twice"
    for arm, seed, part in itertools.product(OURS, options.seeds, (3, 1)):
        updates = photographs.updates_of(options, arm) // part
        if part == 3 or not seed:
            yield arm, updates, seed, options.out / f"maps_{arm}_{updates}_{seed}.pt"


def train(options: argparse.Namespace) -> None:
    """Train the networks whose files are missing."""
    tail, data = photographs.load("twice", "dev", options.out)
    for arm, updates, seed, path in runs(options):
        if not path.exists():
            model = photographs.build(arm, tail, data[False][0][: photographs.BATCH], seed)
            photographs.train(model, data[False], RATE, updates, seed)
            print(path, trainings.top1(trainings.correct(model, *data[False][2:])))
            torch.save(model.state_dict(), path)


def network(arm: str, path: Path) -> nn.Module:
    """Return the trunk and the trained blocks as one network."""
    trunk, tail = photographs.split("twice")
    model = photographs.build(arm, tail, torch.randn(2, 64, 16, 16), 0)
    model.load_state_dict(torch.load(path, weights_only=True))
    return nn.Sequential(OrderedDict(trunk=trunk, tail=model)).eval()


@torch.no_grad()
def on_cells(model: nn.Module, images: Tensor) -> Tensor:
    """Return the mean attention of the pixels of each cell on each cell (N, 4, 4)."""
    with recast.record(model) as maps:
        model(images)
    (attention,) = maps.values()
    half = [side // 2 for side in attention.grid or ()]
    cells = attention.mix[:, 0].unflatten(2, (2, half[0], 2, half[1])).sum((3, 5)).flatten(2)
    return cells.unflatten(1, (2, half[0], 2, half[1])).mean((2, 4)).flatten(1, 2)


@torch.no_grad()
def measure(options: argparse.Namespace) -> None:
    """Write results/photographs_maps.csv."""
    rows, generator = [], torch.Generator().manual_seed(photographs.seed_of("twice", "test"))
    classes = torch.randint(10, (photographs.COUNTS["test"], 3), generator=generator)
    test = photos("test")
    canvases, cells = seen_twice(photographs.sample(test, classes, generator), generator)
    images, cells = trainings.normalised(canvases[:COUNT]), cells[:COUNT]
    four = photographs.sample(test, torch.randint(10, (COUNT, 4), generator=generator), generator)
    four[:, 3] = photographs.altered(four[:, 3], generator)
    alone = trainings.normalised(photographs.arrange(four, cells, 2))

    def names_copy(answers: Tensor) -> Tensor:
        return (torch.tensor(PAIRS)[answers] == cells[:, 3:]).any(1)

    for arm, updates, seed, path in runs(options):
        model = network(arm, path)
        answers = model(images).argmax(1)
        right = answers == pair_answers(cells)
        # from and to the original (0), two others (1, 2) and the copy (3)
        weights = on_cells(model, images)[torch.arange(COUNT)[:, None, None], cells[:, :, None], cells[:, None]]
        to_copy, others = weights[:, :3, 3], torch.stack([weights[:, 1, (0, 2)], weights[:, 2, (0, 1)]], 1).amax(2)
        shares = {
            "right": right,
            "names_copy": names_copy(answers),
            "names_lone_copy": names_copy(model(alone).argmax(1)),
            "original_to_copy": to_copy[:, 0] > weights[:, 0, 1:3].amax(1),
            "other_to_copy": to_copy[:, 1:] > others,
            "copy_to_original": weights[:, 3, 0] > weights[:, 3, 1:3].amax(1),
            "most": to_copy[:, 0] > to_copy[:, 1:].amax(1),
            "least": to_copy[:, 0] < to_copy[:, 1:].amin(1),
            "share_original_to_copy": to_copy[:, 0],
            "share_other_to_copy": to_copy[:, 1:],
        }
        for answered, chosen in {"all": right | True, "right": right, "wrong": ~right}.items():
            row = {"arm": arm, "updates": updates, "seed": seed, "answered": answered, "canvases": int(chosen.sum())}
            rows.append(row | {name: trainings.top1(share[chosen]) for name, share in shares.items()})
    trainings.write_tables("photographs_maps", {"": rows})


def page(options: argparse.Namespace) -> None:
    """Write the pages and docs/photographs.png, their images side by side."""
    import skimage
    from playwright.sync_api import sync_playwright

    files = [read_image(Path(skimage.__file__).parent / "data" / name, (32, 32), crop_pct=1) for name in FREE]
    free, generator = torch.stack([(255 * file.pixels).round().byte() for file in files]), torch.Generator()
    chosen = torch.rand(3, len(free), generator=generator.manual_seed(0)).argsort(1)[:, :3]
    canvases, cells = seen_twice(free[chosen], generator)
    names = [f"{CELLS[first]} = {CELLS[second]}" for first, second in PAIRS]
    shown = [Input(f"canvas {n + 1}", canvases[n] / 255, names[answer]) for n, answer in enumerate(pair_answers(cells))]
    picture = Image.new("RGB", (3 * 364 + 40, 2 * 364 + 20), "white")
    options.seeds = [0]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        short = list(runs(options))[::2]  # a third of the updates
        for row, (arm, _, _, path) in enumerate(reversed(short)):
            model = {"recast": network(arm, path)}
            scene = make_scene("Which two are one photograph?", shown, model, names, IMAGENET, {"recast": "Network"})
            tab = browser.new_page(viewport={"width": 1180, "height": 900})
            tab.goto(write_scene(scene, path.with_suffix(".html")).absolute().as_uri())
            print(arm, [(image.label, image.predictions["recast"][0][:2]) for image in scene.pictures])
            for n, cell in enumerate(cells[:, 0].tolist()):
                at = [cell // 2 / 2 + 0.26, cell % 2 / 2 + 0.26]
                tab.evaluate(f"page.ready.then(() => page.choose({{picture: {n}, at: {at}, head: 0}}))")
                stage = io.BytesIO(tab.locator("#stage").screenshot())
                picture.paste(Image.open(stage).crop((0, 0, 364, 364)), (n * 384, row * 384))
        browser.close()
    picture.save(Path(__file__).parents[1] / "docs/photographs.png")


if __name__ == "__main__":
    trainings.main(__doc__, (), {"train": train, "measure": measure, "page": page})
