"""Are the maps of attention pooling faithful? Deletion and insertion beside Grad-CAM, random maps and the middle.

    RECAST_DATA=DIR OMP_NUM_THREADS=1 python benchmarks/faithfulness.py [cifar100] [imagenet] [--images 1000]

cifar100  a trained ResNet-20, its average replaced by attention pooling; pooling and classifier trained on the 20,000
          training images, the trunk frozen, without augmentation. `--images` test images, three seeds of the training.
          Arms: a single token and a token a class, both started at the average; a single token with the paper's start.
imagenet  SqueezeNet 1.1 on 200 photographs: the pooling alone trained, in five folds on 160 images each with their
          labels and the parent's soft outputs, curves on the other 40. A token a class would be 1,000 tokens that learn
          from 160 images: not done. Small, and perhaps images that SqueezeNet was trained on: no more than an example.

Every map is judged on the network that it belongs to, for the class that network predicts. Maps (of one grid each,
8×8 or 13×13, interpolated): `pool`, the pooling's own, of a token a class the predicted class's row; `pool_mean`, the
mean of all classes' rows; `grad_cam` (Selvaraju et al. 2017) on the last map before the pooling, checked against
pytorch-grad-cam; `random`; `middle`, nearness to the image's centre, which is no explanation at all.

results/faithfulness.csv              mean area under the curves and its 95 % interval (bootstrap over images; not over
                                      trainings). deletion: low is good, insertion: high is good. Seed `mean`: each
                                      image's areas averaged over the seeds. The rest: seed 0 alone.
results/faithfulness_differences.csv  the same of paired differences of `pool` and another map; verdict: which is better
                                      where the interval excludes 0.
results/faithfulness_networks.csv     top-1 on the study's own images of the parent, of the network with pooling before
                                      and after its training; `uniformity`: entropy of the maps over that of a uniform
                                      one (1: the pooling looks at nothing in particular).
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deletion import deletion, insertion
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from timing import RESULTS, write
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize
from trained import trained

from recast.analysis.grad_cam import grad_cam
from recast.data import load_data
from recast.evaluation.stats import Resampled, plain_mean
from recast.layers.attention_pool import attention_pools
from recast.models.build import build
from recast.run.config import DataConfig, ModelConfig, PoolConfig
from recast.surgery.pooling.swap import attention_pool_

STEPS = 8
SEEDS = (0, 1, 2)
TRAINING = {"single": (5, 2e-3), "per_class": (2, 5e-3)}
"""Epochs and learning rate on CIFAR-100."""
CURVES = {"deletion": deletion, "insertion": insertion}
ARMS = (("single", "average"), ("per_class", "average"), ("single", "paper"))
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Areas = dict[tuple[str, str], np.ndarray]
"""(map, curve) → (n, 1)."""


@dataclass(frozen=True)
class Study:
    """A trained network, and where its last map is made and used."""

    name: str
    parent: nn.Module
    layer: str
    """Gives the last map before the pooling."""
    tail: Callable[[nn.Module, Tensor], Tensor]
    """That map to logits, in a network with attention pooling."""


def cam_of(model: nn.Module, layer: str, images: Tensor, targets: Tensor) -> Tensor:
    """Grad-CAM of one class an image: (B, h, w)."""
    found = grad_cam(model, images, targets[:, None], layer)
    assert found is not None
    return found[:, 0]


def check_grad_cam(model: nn.Module, layer: str, images: Tensor, targets: Tensor) -> None:
    """Ours against pytorch-grad-cam's, which enlarges its maps and stretches them to 0 … 1."""
    ours = cam_of(model, layer, images, targets)
    copied = copy.deepcopy(model).requires_grad_(True)
    with GradCAM(model=copied, target_layers=[copied.get_submodule(layer)]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(int(target)) for target in targets]))

    def stretched(maps: Tensor) -> Tensor:
        maps = maps - maps.amin((1, 2), keepdim=True)
        return maps / (1e-7 + maps.amax((1, 2), keepdim=True))  # their constant: it shows where maps are tiny

    large = F.interpolate(stretched(ours)[:, None], size=theirs.shape[1:], mode="bilinear")[:, 0]
    worst = float((stretched(large) - theirs).abs().max())
    print(f"grad_cam against pytorch-grad-cam: largest difference {worst:.1e}")
    assert worst < 1e-2, worst


def pool_of(model: nn.Module) -> Any:
    (pool,) = attention_pools(model).values()
    return pool


@torch.no_grad()
def last_maps(study: Study, images: Tensor) -> Tensor:
    """The parent's last maps, which the frozen trunk gives for good."""
    seen: list[Tensor] = []
    handle = study.parent.get_submodule(study.layer).register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )
    for batch in images.split(100):
        study.parent(batch)
    handle.remove()
    return torch.cat(seen)


def train(
    study: Study,
    model: nn.Module,
    parameters: list[nn.Parameter],
    maps: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    weight_decay: float,
    seed: int,
) -> None:
    """AdamW with a cosine to 0 on stored maps; `loss` of logits and the images' numbers."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    batches = -(-len(maps) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    for _ in range(epochs):
        for chosen in torch.randperm(len(maps), generator=generator).split(batch_size):
            optimizer.zero_grad()
            loss(study.tail(model, maps[chosen]), chosen).backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()


@torch.no_grad()
def logits_of(study: Study, model: nn.Module, maps: Tensor) -> Tensor:
    return torch.cat([study.tail(model, batch) for batch in maps.split(100)])


def top1(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).float().mean())


@torch.no_grad()
def pool_maps(model: nn.Module, maps: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """`pool`, and with a token a class `pool_mean`: (n, h, w)."""
    pool = pool_of(model)
    found: dict[str, list[Tensor]] = {}
    for batch, classes in zip(maps.split(100), targets.split(100), strict=True):
        rows = pool.attention_maps(batch).mean(1)  # (B, T, h, w)
        chosen = rows[:, 0] if pool.num_classes is None else rows[torch.arange(len(rows)), classes]
        found.setdefault("pool", []).append(chosen)
        if pool.num_classes is not None:
            found.setdefault("pool_mean", []).append(rows.mean(1))
    return {name: torch.cat(values) for name, values in found.items()}


def uniformity(maps: Tensor) -> float:
    """Mean entropy over that of a uniform map."""
    p = maps.flatten(1)
    p = p / p.sum(1, keepdim=True)
    return float(torch.special.entr(p).sum(1).mean() / np.log(p.shape[1]))


def areas_of(
    study: Study, model: nn.Module, images: Tensor, maps: Tensor, controls: bool, seed: int
) -> tuple[Areas, float]:
    """The areas of all maps of one network, and the uniformity of its pool's."""
    targets = logits_of(study, model, maps).argmax(1)
    found = pool_maps(model, maps, targets)
    uniform = uniformity(found["pool"])
    if not controls:
        found.pop("pool_mean", None)
    pairs = list(zip(images.split(50), targets.split(50), strict=True))
    found["grad_cam"] = torch.cat([cam_of(model, study.layer, *pair) for pair in pairs])
    if controls:
        check_grad_cam(model, study.layer, images[:16], targets[:16])
        n, height, width = found["pool"].shape
        found["random"] = torch.rand(n, height, width, generator=torch.Generator().manual_seed(seed))
        rows, columns = (torch.linspace(-1, 1, size).square() for size in (height, width))
        found["middle"] = -(rows[:, None] + columns).expand(n, height, width)
    areas: Areas = {}
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=torch.channels_last)
    for name, values in found.items():
        started = time.perf_counter()
        for curve, measure in CURVES.items():
            measured = measure(model, images, values, targets, steps=STEPS, batch_size=90, seed=seed)
            areas[name, curve] = measured.double().numpy()[:, None]
        print(f"  {name}: {time.perf_counter() - started:.0f} s", flush=True)
    return areas, uniform


def rows_of(study: str, arm: str, seed: object, areas: Areas) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of both files; every map and difference is resampled with the same draws."""
    resampled = Resampled(areas, {curve: plain_mean for curve in CURVES}, seed=0)
    names = list(dict.fromkeys(name for name, _ in areas))
    about = {"study": study, "arm": arm, "seed": seed}
    for name in names:
        for curve in CURVES:
            value, (low, high) = resampled.values[name, curve], resampled.interval(name, curve)
            row = {**about, "map": name, "curve": curve, "n": resampled.n, "area": f"{value:.4f}"}
            yield "faithfulness", {**row, "low": f"{low:.4f}", "high": f"{high:.4f}"}
    for other in names[1:]:
        for curve in CURVES:
            value, low, high = resampled.difference("pool", other, curve)
            better = "pool" if (value < 0) == (curve == "deletion") else other
            row = {**about, "map": "pool", "against": other, "curve": curve, "n": resampled.n}
            row |= {"difference": f"{value:+.4f}", "low": f"{low:+.4f}", "high": f"{high:+.4f}"}
            yield "faithfulness_differences", {**row, "verdict": better if low * high > 0 else "not told apart"}


def network_row(study: str, arm: str, seed: object, **values: float) -> tuple[str, dict[str, Any]]:
    row = {"study": study, "arm": arm, "seed": seed}
    return "faithfulness_networks", row | {name: f"{value:.3f}" for name, value in values.items()}


def cifar100(num_images: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """ResNet-20, three arms, three seeds."""
    parent, data = trained("cifar100_resnet20_chenyaofo", num_val=num_images)
    study = Study("cifar100", parent.requires_grad_(False), "layer3", lambda model, maps: model.forward_head(maps))
    whole = load_data(DataConfig("cifar100", data_dir=f"{os.environ['RECAST_DATA']}/cifar100"))
    mean, std = list(data.mean), list(data.std)
    train_images, train_labels = whole.train.augmented(None).batch(range(len(whole.train)))  # type: ignore[attr-defined]
    images, labels = data.val.batch(range(len(data.val)))
    images = normalize(images, mean, std)
    train_maps = torch.cat([last_maps(study, normalize(batch, mean, std)) for batch in train_images.split(1000)])
    maps = last_maps(study, images)
    before = top1(torch.cat([parent(batch) for batch in images.split(100)]), labels)

    def loss(logits: Tensor, i: Tensor) -> Tensor:
        return F.cross_entropy(logits, train_labels[i])

    for kind, start in ARMS:
        arm, by_seed = f"{kind} {start}", []
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = attention_pool_(copy.deepcopy(parent), config=PoolConfig(kind, start=start), example=images[:2])  # type: ignore[arg-type]
            swapped = top1(logits_of(study, model, maps), labels)
            parameters = [*pool_of(model).parameters(), *model.get_classifier().parameters()]
            for parameter in parameters:
                parameter.requires_grad_(True)
            epochs, lr = TRAINING[kind]
            settings = {"epochs": epochs, "batch_size": 200, "lr": lr, "weight_decay": 0.05, "seed": seed}
            train(study, model, parameters, train_maps, loss, **settings)
            after = top1(logits_of(study, model, maps), labels)
            areas, uniform = areas_of(study, model.eval(), images, maps, seed == 0, seed)
            yield network_row("cifar100", arm, seed, parent=before, before=swapped, after=after, uniformity=uniform)
            yield from rows_of("cifar100", arm, seed, areas)
            by_seed.append(areas)
        shared = [key for key in by_seed[0] if all(key in areas for areas in by_seed)]
        yield from rows_of("cifar100", arm, "mean", {k: np.mean([a[k] for a in by_seed], axis=0) for k in shared})


def imagenet(_num_images: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """SqueezeNet, cross-fitted."""
    root = os.environ["RECAST_DATA"]
    weights = f"{root}/weights/imagenet_squeezenet1_1.safetensors"
    parent = build(ModelConfig("torchvision:squeezenet1_1", weights), num_classes=1000).eval().requires_grad_(False)

    def tail(model: Any, maps: Tensor) -> Tensor:
        return model.classifier(pool_of(model)(maps)).flatten(1)

    study = Study("imagenet", parent, "features.12", tail)
    data = load_data(DataConfig("folder", data_dir=f"{root}/imagenet_sample"))
    pixels, labels = data.val.batch(range(len(data.val)))
    images = normalize(pixels, *IMAGENET)
    flipped = images.flip(-1)
    maps, flipped_maps = last_maps(study, images), last_maps(study, flipped)
    with torch.no_grad():
        soft = torch.cat([parent(batch) for batch in images.split(50)])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    logits, logits_before, merged, uniform = torch.empty_like(soft), torch.empty_like(soft), [], []
    for number, held_out in enumerate(order.chunk(5)):
        kept = order[~torch.isin(order, held_out)]
        torch.manual_seed(number)
        model = attention_pool_(copy.deepcopy(parent), config=PoolConfig("single"), example=images[:2])
        logits_before[held_out] = logits_of(study, model, maps[held_out])
        both_labels, both_soft = labels[kept].repeat(2), soft[kept].repeat(2, 1).softmax(1)

        def loss(found: Tensor, i: Tensor, labels: Tensor = both_labels, soft: Tensor = both_soft) -> Tensor:
            return 0.5 * F.cross_entropy(found, labels[i]) + 0.5 * F.cross_entropy(found, soft[i])

        parameters = list(pool_of(model).parameters())
        both = torch.cat([maps[kept], flipped_maps[kept]])
        train(study, model, parameters, both, loss, epochs=15, batch_size=40, lr=5e-4, weight_decay=0.5, seed=number)
        logits[held_out] = logits_of(study, model.eval(), maps[held_out])
        areas, entropy = areas_of(study, model, images[held_out], maps[held_out], True, number)
        merged.append(areas)
        uniform.append(entropy)
    values = {"parent": top1(soft, labels), "before": top1(logits_before, labels), "after": top1(logits, labels)}
    yield network_row("imagenet", "single average", "folds", **values, uniformity=float(np.mean(uniform)))
    yield from rows_of(
        "imagenet", "single average", "folds", {k: np.concatenate([a[k] for a in merged]) for k in merged[0]}
    )


def main() -> None:
    """The studies that are named; the rows of others stay in the files."""
    studies = {"cifar100": cifar100, "imagenet": imagenet}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(studies)}; all without one")
    parser.add_argument("--images", type=int, default=1000, help="test images of cifar100")
    options = parser.parse_args()
    chosen = options.studies or list(studies)
    if unknown := set(chosen) - set(studies):
        parser.error(f"studies are {', '.join(studies)}, got {', '.join(unknown)}")
    if "RECAST_DATA" not in os.environ:
        raise SystemExit("RECAST_DATA must name the folder that holds cifar100/, imagenet_sample/ and weights/")
    torch.set_num_threads(1)
    files: dict[str, list[dict[str, Any]]] = {}
    started = time.perf_counter()
    for study in chosen:
        for file, row in studies[study](options.images):
            files.setdefault(file, []).append(row)
            print(*row.values(), flush=True)
    for file, rows in files.items():
        path = RESULTS / f"{file}.csv"
        with path.open(encoding="utf-8") if path.exists() else open(os.devnull) as old:
            kept = [row for row in csv.DictReader(old) if row["study"] not in chosen]
        write(path, sorted([*kept, *rows], key=lambda row: row["study"]))
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
