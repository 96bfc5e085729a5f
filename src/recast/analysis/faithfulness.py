"""Does a map show what the network looks at? Deletion and insertion: change pixels in its order, watch the class go.

Source: Petsiuk, Das & Saenko 2018, RISE (arXiv:1806.07421), section 4.2; pixel flipping, Bach et al. 2015, before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.analysis.blocks import device_of
from recast.errors import RecastError, suggest
from recast.tracing.hooks import in_eval

__all__ = ["Baseline", "Curves", "Unit", "blur", "deletion", "insertion", "removal_order"]

Baseline = Literal["mean", "blur", "zero"]
Unit = Literal["pixel", "cell"]
STEPS = 32
BATCH_SIZE = 64
SIGMA = 0.05
"""Of the blur, as a share of the image's shorter side."""


@dataclass(frozen=True)
class Curves:
    """The probability of a class while an image is taken away or brought back, for each of n images."""

    fractions: Tensor
    """(steps + 1,): share of the image that is changed, 0 to 1."""
    probabilities: Tensor
    """(n, steps + 1) at those shares."""

    @property
    def areas(self) -> Tensor:
        """(n,): the area under each image's curve by the trapezoidal rule, 0 to 1.

        Deletion: low is good. Insertion: high is good. One number an image, so that maps of the same images are
        compared in pairs (`recast.evaluation.scores.Resampled`).
        """
        return torch.trapezoid(self.probabilities, self.fractions)


def deletion(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    targets: Tensor,
    *,
    steps: int = STEPS,
    baseline: Baseline | Tensor = "mean",
    unit: Unit = "pixel",
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
) -> Curves:
    """Take the pixels away, the map's largest first: a map that knows what matters makes the curve fall at once.

        p(s) = softmax(model(x with the first s·N of N pixels replaced by the baseline))[target]

    images (B, C, H, W): what the model takes, normalised as it wants it; H and W may differ. maps (B, h, w): larger is
    more important; of any size. targets (B,): classes.
    steps: so many changes of equal size, all pixels gone after the last.
    baseline: what comes instead, for all the images or one for each: "mean", the image's own mean colour; "blur",
    itself blurred (`blur`); "zero", zeros, which is the mean colour of the data where images are normalised; or a
    tensor that can be broadcast to the images, in their units.
    unit: "pixel" orders pixels, by the map interpolated to the image's size; "cell" the map's own cells, each of which
    goes as a whole.
    Ties are broken by a random order from `seed`, another for each image: a constant map removes at random, and no map
    gains by the order in which pixels are stored.

    The model runs in eval mode without gradients, in batches of `batch_size`; images of the same call do not meet
    unless it lets them. Raises `RecastError` for shapes that do not fit, maps that are not finite, targets outside the
    logits, a model that gives no logits (B, classes), and steps that are none or more than there are units.
    """
    _check(images, maps, targets, steps, batch_size, unit)
    order = removal_order(maps, (images.shape[-2], images.shape[-1]), unit, seed)
    return _curves(model, images, _baseline(images, baseline), order, targets, steps, batch_size)


def insertion(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    targets: Tensor,
    *,
    steps: int = STEPS,
    baseline: Baseline | Tensor = "blur",
    unit: Unit = "pixel",
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
) -> Curves:
    """Bring the pixels back into the baseline, the map's largest first: a good map makes the curve rise at once.

    Everything else is as in `deletion`. The paper starts from a blur, as pixels put on a plain colour have edges of
    their own, which networks react to.
    """
    _check(images, maps, targets, steps, batch_size, unit)
    order = removal_order(maps, (images.shape[-2], images.shape[-1]), unit, seed)
    return _curves(model, _baseline(images, baseline), images, order, targets, steps, batch_size)


def removal_order(maps: Tensor, size: tuple[int, int], unit: Unit = "pixel", seed: int = 0) -> Tensor:
    """The place of every pixel in the order of its map: (B, h, w) → (B, H, W), 0 … N − 1, the largest value first.

    "pixel": N = H·W, all different, of the map interpolated bilinearly. "cell": N = h·w, pixels of a cell share its
    place; pixel (y, x) is in the cell (⌊y·h/H⌋, ⌊x·w/W⌋). Equal values are in random order, drawn from `seed` and the
    image's number.
    """
    values = maps.detach().cpu().double()
    values = values - values.amin((1, 2), keepdim=True)  # so that an offset costs no digits in single precision
    if unit == "pixel":
        values = F.interpolate(values[:, None], size=size, mode="bilinear")[:, 0].float()  # ties stay ties
    flat = values.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.stack([torch.randperm(flat.shape[1], generator=generator) for _ in flat])
    ordered = shuffled.gather(1, flat.gather(1, shuffled).argsort(dim=1, descending=True, stable=True))
    places = torch.empty_like(ordered)
    places.scatter_(1, ordered, torch.arange(flat.shape[1]).expand_as(ordered))
    places = places.view(values.shape)
    if unit == "pixel":
        return places
    rows, columns = (torch.arange(pixels) * cells // pixels for pixels, cells in zip(size, maps.shape[1:], strict=True))
    return places[:, rows][:, :, columns]


def blur(images: Tensor, sigma: float | None = None) -> Tensor:
    """Images (B, C, H, W) under a Gaussian of standard deviation `sigma` pixels, borders repeated.

    None: 5 % of the shorter side, 11 pixels at 224: what an object is can no longer be told. (RISE cuts a Gaussian of
    5 pixels off at 11×11.)
    """
    sigma = SIGMA * min(images.shape[-2:]) if sigma is None else sigma
    reach = max(1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=torch.float32)
    kernel = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).to(images.dtype)
    channels = images.shape[1]
    x = F.pad(images, (reach,) * 4, mode="replicate")
    x = F.conv2d(x, kernel.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(x, kernel.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)


@torch.no_grad()
def _curves(
    model: nn.Module, first: Tensor, last: Tensor, order: Tensor, targets: Tensor, steps: int, batch_size: int
) -> Curves:
    """From `first` at step 0 to `last` at the end, pixels in their order."""
    n, units = len(first), int(order.amax()) + 1
    if steps > units:
        raise RecastError(f"steps may be at most the {units} parts that can be changed one by one, got {steps}")
    changed = torch.arange(steps + 1) * units // steps
    device = device_of(model)
    probabilities = torch.empty(n * (steps + 1))
    with in_eval(model):
        for begin in range(0, len(probabilities), batch_size):
            numbers = torch.arange(begin, min(begin + batch_size, len(probabilities)))
            image, step = numbers // (steps + 1), numbers % (steps + 1)
            replaced = (order[image] < changed[step][:, None, None])[:, None].to(first.device)
            where = image.to(first.device)
            logits = model(torch.where(replaced, last[where], first[where]).to(device))
            _check_logits(logits, len(numbers), targets)
            chosen = logits.float().softmax(1).cpu().gather(1, targets.cpu()[image][:, None])
            probabilities[numbers] = chosen[:, 0]
    return Curves(changed / units, probabilities.view(n, steps + 1))


def _baseline(images: Tensor, baseline: Baseline | Tensor) -> Tensor:
    if isinstance(baseline, Tensor):
        try:
            return baseline.to(images).expand_as(images)
        except RuntimeError:
            raise RecastError(
                f"a baseline is broadcast to the images {tuple(images.shape)}, got {tuple(baseline.shape)}"
            ) from None
    if baseline == "mean":
        return images.mean((-2, -1), keepdim=True).expand_as(images)
    if baseline == "blur":
        return blur(images)
    if baseline == "zero":
        return torch.zeros_like(images)
    raise RecastError(
        f"baseline must be a tensor or one of {get_args(Baseline)}, got {baseline!r}."
        f"{suggest(str(baseline), get_args(Baseline))}"
    )


def _check(images: Tensor, maps: Tensor, targets: Tensor, steps: int, batch_size: int, unit: str) -> None:
    if images.dim() != 4 or 0 in images.shape:
        raise RecastError(f"images are (batch, channels, height, width) tensors, got {tuple(images.shape)}")
    if maps.dim() != 3 or len(maps) != len(images) or 0 in maps.shape:
        raise RecastError(
            f"a map is expected for each of the {len(images)} images, ({len(images)}, h, w), got {tuple(maps.shape)}"
        )
    if not bool(torch.isfinite(maps).all()):
        raise RecastError("maps must be finite: there is no order among NaN and infinite values")
    if targets.shape != (len(images),) or targets.is_floating_point():
        raise RecastError(
            f"targets are a class number for each of the {len(images)} images, got {tuple(targets.shape)} of "
            f"{targets.dtype}"
        )
    if steps < 1 or batch_size < 1:
        raise RecastError(f"steps and batch_size must be 1 or more, got {steps} and {batch_size}")
    if unit not in get_args(Unit):
        raise RecastError(f"unit must be one of {get_args(Unit)}, got {unit!r}.{suggest(unit, get_args(Unit))}")
    if unit == "cell" and (maps.shape[1] > images.shape[2] or maps.shape[2] > images.shape[3]):
        raise RecastError(
            f"cells are pixels or larger, but maps {tuple(maps.shape[1:])} are finer than images "
            f"{tuple(images.shape[2:])}: pass unit='pixel'"
        )


def _check_logits(logits: object, n: int, targets: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != n:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RecastError(f"the model must give logits (batch, classes), got {got} for a batch of {n}")
    if bool((targets < 0).any()) or bool((targets >= logits.shape[1]).any()):
        raise RecastError(
            f"targets must be classes 0 to {logits.shape[1] - 1} of the model's logits, got "
            f"{int(targets.min())} to {int(targets.max())}"
        )
