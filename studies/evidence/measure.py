"""Evaluation on test images: right or wrong for every image, clean, corrupted and attacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.files import replaced
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.seeding import choose_balanced, mix_seed
from recast.lab.evaluation.attacks import pgd
from recast.lab.evaluation.imagenet_corruptions import KINDS, corrupt_bytes
from recast.layers.attention_pool import TokenAttention
from recast.surgery.wake import relative_entropy

NOISE = 0.05
"""σ of the Gaussian noise, for pixels in [0, 1]."""
SEVERITIES = (1, 3, 5)
BATCH = 250


@dataclass(frozen=True)
class Data:
    """The images of a study, on its device."""

    train: ImageTensors
    held_out: ImageTensors
    test: ImageTensors
    few: ImageTensors
    corrupted: dict[str, ImageTensors]


@torch.no_grad()
def correct(model: Callable[[Tensor], Tensor], images: ImageTensors) -> Tensor:
    """Return 1 for each image that is classified correctly, else 0: (N,) uint8 on the CPU."""
    predictions = [model(pixels.float() / 255).argmax(1) for pixels in images.pixels.split(BATCH)]
    return (torch.cat(predictions) == images.labels).to(torch.uint8).cpu()


def top1(model: nn.Module, images: ImageTensors) -> float:
    """Return the accuracy in percent."""
    return 100 * float(correct(model, images).float().mean())


def noisy(images: ImageTensors) -> ImageTensors:
    """Return the images with Gaussian noise of σ = NOISE, the same for all models."""
    noise = torch.randn(images.pixels.shape, generator=torch.Generator().manual_seed(0))
    pixels = images.pixels.cpu().float() + 255 * NOISE * noise
    return ImageTensors(pixels.round().clamp(0, 255).to(torch.uint8).to(images.pixels.device), images.labels)


def corrupted(images: ImageTensors, cache: Path) -> dict[str, ImageTensors]:
    """Return the images in the 15 corruptions of ImageNet-C, at severity 1, 3 or 5 in turn.

    They are made once and kept in `cache`. Without imagecorruptions the result is {}.
    """
    by_kind: dict[str, ImageTensors] = {}
    arrays = images.pixels.permute(0, 2, 3, 1).cpu().numpy()
    cache.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        file = cache / f"{kind}-{len(images)}.npy"
        if not file.is_file():
            try:
                changed = [
                    corrupt_bytes(array, kind, SEVERITIES[i % len(SEVERITIES)], mix_seed("evidence", kind, i))
                    for i, array in enumerate(arrays)
                ]
            except RecastError:
                return {}
            with replaced(file) as temporary, temporary.open("wb") as stream:
                np.save(stream, np.stack(changed))
        pixels = torch.from_numpy(np.load(file)).permute(0, 3, 1, 2).contiguous()
        by_kind[kind] = ImageTensors(pixels.to(images.pixels.device), images.labels)
    return by_kind


def attacked(model: Callable[[Tensor], Tensor], images: ImageTensors, eps: float, steps: int) -> Tensor:
    """Return `correct` after FGSM (one step) or PGD, for ε in 1/255."""
    answers = []
    for pixels, labels in zip(images.pixels.split(BATCH), images.labels.split(BATCH), strict=True):
        step_size = eps if steps == 1 else None
        inputs = pgd(model, pixels.float() / 255, labels, eps, steps=steps, step_size=step_size)  # type: ignore[arg-type]
        with torch.no_grad():
            answers.append(model(inputs).argmax(1) == labels)
    return torch.cat(answers).to(torch.uint8).cpu()


def measure(model: nn.Module, data: Data, is_attacked: bool = True) -> dict[str, np.ndarray]:
    """Return 0 or 1 for every image by metric.

    `clean` and `noise` are on all test images, attacks and corruptions on a few.
    """
    model.eval().requires_grad_(False)
    scores = {"clean": correct(model, data.test), "noise": correct(model, noisy(data.test))}
    if is_attacked:
        for eps in (1, 2):
            scores[f"fgsm@{eps}"] = attacked(model, data.few, eps, 1)
        scores["pgd@1"] = attacked(model, data.few, 1, 5)
        if data.corrupted:  # the share of an image's corruptions that are classified correctly
            scores["corruptions"] = torch.stack([correct(model, x) for x in data.corrupted.values()]).float().mean(0)
    return {name: values.numpy() for name, values in scores.items()}


@torch.no_grad()
def measure_pool(model: nn.Module, images: ImageTensors) -> dict[str, float]:
    """Return the entropy of an attention pool's maps and the top-1 with uniform maps (W_q = 0); restores the network.

    The entropy is relative to its maximum, the mean over images and tokens.
    """
    (attention,) = (module for module in model.modules() if isinstance(module, TokenAttention))
    entropies: list[Tensor] = []
    with attention.register_forward_hook(lambda _m, _x, output: entropies.append(relative_entropy(output[1]).mean(1))):
        correct(model, images)
    weights = {name: value.clone() for name, value in attention.q.state_dict().items()}
    attention.q.weight.zero_()
    attention.q.bias.zero_()
    uniform = top1(model, images)
    attention.q.load_state_dict(weights)
    return {"entropy of the pool's maps": float(torch.cat(entropies).mean()), "clean, uniform maps": uniform}


def balanced_part(images: ImageTensors, count: int) -> ImageTensors:
    """Return `count` class-balanced images, the same in every call."""
    return images.subset(choose_balanced(images.labels, count, "--few"))
