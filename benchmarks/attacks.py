"""FGSM and PGD against foolbox on trained networks; is robustness real, or are gradients masked?

    RECAST_DATA=DIR python benchmarks/attacks.py          # 1,000 CIFAR-10 images, ResNet-20; 10 minutes of a core

Writes results/attacks.csv: top-1 in percent under each attack and ε by us and by foolbox (Rauber et al. 2017), which
attacks the same images through its own normalisation. Signs of masked gradients (Athalye et al. 2018, §3.1), none of
which must show: random noise as strong as FGSM; iterations weaker than one step; accuracy left at a large ε; images
whose gradient is zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import foolbox
import torch
from timing import RESULTS, machine, write
from torch import Tensor, nn
from trained import trained

from recast.data import Loader
from recast.evaluation import evaluate
from recast.run.config.evaluation import Options

EPS = (0.0, 1.0, 4.0, 8.0)


def ours(model: nn.Module, data: Any, options: Options, suites: list[str]) -> dict[str, float]:
    rows = evaluate(model, suites, data, options=options, batch_size=250, progress=False)
    return {f"{row.suite} {row.metric}": row.value for row in rows}


def theirs(model: nn.Module, data: Any, attack: Any, eps: float) -> float:
    """Percent of images that stay right; foolbox makes adversarial examples of wrong ones too."""
    preprocessing = {"mean": list(data.mean), "std": list(data.std), "axis": -3}
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu", preprocessing=preprocessing)
    right = 0
    for images, labels in Loader(data.val, 250):
        _, attacked, _ = attack(wrapped, images, labels, epsilons=eps / 255)
        right += int((predict(wrapped, attacked) == labels).sum())
    return 100 * right / len(data.val)


def predict(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(1)


def noise(model: nn.Module, data: Any, eps: float) -> float:
    """Top-1 with the sign of every pixel's change drawn at random."""
    generator = torch.Generator().manual_seed(0)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    right = 0
    for images, labels in Loader(data.val, 250):
        signs = torch.randint(0, 2, images.shape, generator=generator) * 2 - 1
        pixels = (images + eps / 255 * signs).clamp(0, 1)
        right += int((predict(model, (pixels - mean) / std) == labels).sum())
    return 100 * right / len(data.val)


def rows_of(weights: str, count: int) -> Iterator[tuple[str, float, float, float | None]]:
    """(attack, ε, our top-1, foolbox's), as they are measured."""
    model, data = trained(weights, count)
    fgsm = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    found = ours(model, data, Options(eps=EPS), ["clean", "fgsm", "pgd"])
    yield "clean", 0, found["clean top1"], None
    yield "images without gradient", 0, found["fgsm no_gradient"], None
    for eps in EPS:
        yield "fgsm", eps, found[f"fgsm top1@{eps:g}"], theirs(model, data, fgsm, eps)
        pgd = foolbox.attacks.LinfPGD(abs_stepsize=2.5 * eps / 5 / 255, steps=5, random_start=False)
        yield "pgd, 5 steps", eps, found[f"pgd top1@{eps:g}"], theirs(model, data, pgd, eps)
        yield "random signs", eps, noise(model, data, eps), None
    for name, options in (
        ("pgd, 20 steps", Options(eps=(1.0,), steps=20)),
        ("pgd, 5 steps, 3 starts", Options(eps=(1.0,), restarts=3)),
        ("pgd, 10 steps", Options(eps=(64.0,), steps=10)),  # far more than any network stands
    ):
        (eps,) = options.eps
        yield name, eps, ours(model, data, options, ["pgd"])[f"pgd top1@{eps:g}"], None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["cifar10_resnet20_akamaster"])
    parser.add_argument("--images", type=int, default=1000)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for weights in options.weights:
        for attack, eps, value, reference in rows_of(weights, options.images):
            rows.append(
                {
                    "weights": weights,
                    "images": options.images,
                    "attack": attack,
                    "eps": eps,
                    "top1": round(value, 2),
                    "foolbox": "" if reference is None else round(reference, 2),
                    "machine": machine(),
                }
            )
            print(rows[-1], flush=True)
            write(RESULTS / "attacks.csv", rows)


if __name__ == "__main__":
    main()
