"""What a trained arm does on test images: right or wrong for every image, clean, corrupted and attacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from images import Labelled
from torch import Tensor, nn

from recast.errors import RecastError
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

    train: Labelled
    held_out: Labelled
    test: Labelled
    few: Labelled
    corrupted: dict[str, Labelled]


def right(model: Callable[[Tensor], Tensor], images: Labelled) -> Tensor:
    """Whether each image is put into its class, (N,) uint8 on the CPU."""
    with torch.no_grad():
        said = [model(part.float() / 255).argmax(1) for part in images.pixels.split(BATCH)]
    return (torch.cat(said) == images.labels).to(torch.uint8).cpu()


def noisy(images: Labelled, seed: int = 0) -> Labelled:
    """The images with Gaussian noise of σ = NOISE, the same for all models."""
    noise = torch.randn(images.pixels.shape, generator=torch.Generator().manual_seed(seed))
    pixels = images.pixels.cpu().float() + 255 * NOISE * noise
    return Labelled(pixels.round().clamp(0, 255).to(torch.uint8).to(images.pixels.device), images.labels)


def corrupted(images: Labelled, cache: Path) -> dict[str, Labelled]:
    """The 15 corruptions of ImageNet-C, each image at severity 1, 3 or 5 in turn, made once.

    {} where imagecorruptions is missing.
    """
    found: dict[str, Labelled] = {}
    plain = images.pixels.permute(0, 2, 3, 1).cpu().numpy()
    for kind in KINDS:
        file = cache / f"{kind}-{len(images)}.npy"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            try:
                make = [partial(corrupt_bytes, kind=kind, severity=severity) for severity in SEVERITIES]
                seeds = (mix_seed("evidence", kind, i) for i in range(len(plain)))
                changed = np.stack([make[i % len(make)](x, seed=next(seeds)) for i, x in enumerate(plain)])
            except RecastError:
                return {}
            temporary = file.with_suffix(".part.npy")
            np.save(temporary, changed)
            temporary.replace(file)
        pixels = torch.from_numpy(np.load(file)).permute(0, 3, 1, 2).contiguous()
        found[kind] = Labelled(pixels.to(images.pixels.device), images.labels)
    return found


def attacked(model: Callable[[Tensor], Tensor], images: Labelled, eps: float, steps: int) -> Tensor:
    """Whether each image is still put into its class after FGSM (one step) or PGD of ε in 1/255."""
    answers = []
    for pixels, labels in zip(images.pixels.split(BATCH), images.labels.split(BATCH), strict=True):
        step = eps if steps == 1 else None
        found = pgd(model, pixels.float() / 255, labels, eps, steps=steps, step_size=step)  # type: ignore[arg-type]
        with torch.no_grad():
            answers.append(model(found).argmax(1) == labels)
    return torch.cat(answers).to(torch.uint8).cpu()


def measure(model: nn.Module, data: Data, attacked_too: bool = True) -> dict[str, np.ndarray]:
    """Rightness of every image by metric: `clean` and `noise` on the test images; attacks and corruptions on a few."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = {"clean": right(model, data.test), "noise": right(model, noisy(data.test))}
    if attacked_too:
        for eps in (1, 2):
            found[f"fgsm@{eps}"] = attacked(model, data.few, eps, 1)
        found["pgd@1"] = attacked(model, data.few, 1, 5)
        if data.corrupted:
            kinds = torch.stack([right(model, images) for images in data.corrupted.values()])
            found["corruptions"] = kinds.float().mean(0)  # the share of an image's corruptions that are survived
    return {name: values.numpy() for name, values in found.items()}


@torch.no_grad()
def pool_at_work(model: nn.Module, images: Labelled) -> dict[str, float]:
    """Of a network that pools by attention: the entropy of its maps over its maximum, in the mean over images and
    tokens, and top-1 in percent with uniform maps (W_q = 0); the network is left as it was."""
    (attention,) = (module for module in model.modules() if isinstance(module, TokenAttention))
    found: list[Tensor] = []

    def look(_module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        found.append(relative_entropy(output[1]).mean(1))

    with attention.register_forward_hook(look):
        right(model, images)
    before = attention.q.weight.clone(), attention.q.bias.clone()
    attention.q.weight.zero_()
    attention.q.bias.zero_()
    uniform = 100 * float(right(model, images).float().mean())
    attention.q.weight.copy_(before[0])
    attention.q.bias.copy_(before[1])
    return {"entropy of the pool's maps": float(torch.cat(found).mean()), "clean, uniform maps": uniform}


def few_of(test: Labelled, count: int) -> Labelled:
    """A class-balanced part of the test images, the same for all."""
    return test.take(choose_balanced(test.labels.cpu(), count, "few").to(test.pixels.device))
