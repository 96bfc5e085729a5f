"""Does a map show what the network looks at? Deletion and insertion: change pixels in its order, watch the class go.

Source: Petsiuk, Das & Saenko 2018, RISE (arXiv:1806.07421), section 4.2; pixel flipping, Bach et al. 2015, before it.
`faithfulness.py` measures with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.tracing.hooks import in_eval

SIGMA = 0.05
"""Of the blur, as a share of the image's shorter side."""


def deletion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int, batch_size: int, seed: int = 0
) -> Tensor:
    """Take the pixels away, the map's largest first, and put the image's mean colour in their place. A map that knows
    what matters makes the curve fall at once: (B,) areas below it, 0 to 1, low is good.

        p(s) = softmax(model(x with the first s·N of N pixels replaced))[target]

    images (B, C, H, W), as the model takes them; maps (B, h, w), larger is more important, interpolated to the images;
    targets (B,) classes. All pixels are gone after `steps` changes of equal size.
    """
    mean = images.mean((-2, -1), keepdim=True).expand_as(images)
    return area(*curve(model, images, mean, order_of(maps, images, seed), targets, steps, batch_size))


def insertion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int, batch_size: int, seed: int = 0
) -> Tensor:
    """Bring the pixels back into a blurred image, the map's largest first: high is good. (Pixels on a plain colour have
    edges of their own, which networks react to.)"""
    order = order_of(maps, images, seed)
    return area(*curve(model, blur(images), images, order, targets, steps, batch_size))


def order_of(maps: Tensor, images: Tensor, seed: int = 0) -> Tensor:
    """The place of every pixel in the order of its map, (B, H, W): 0 … H·W − 1, the largest value first.

    Equal values are in random order, another for each image: a constant map removes at random, and no map gains by the
    order in which pixels are stored.
    """
    if not bool(torch.isfinite(maps).all()):
        raise ValueError("there is no order among NaN and infinite values")
    values = maps.detach().cpu().double()
    values = values - values.amin((1, 2), keepdim=True)  # so that an offset costs no digits in single precision
    values = F.interpolate(values[:, None], size=images.shape[-2:], mode="bilinear")[:, 0].float()  # ties stay ties
    flat = values.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.stack([torch.randperm(flat.shape[1], generator=generator) for _ in flat])
    ordered = shuffled.gather(1, flat.gather(1, shuffled).argsort(dim=1, descending=True, stable=True))
    places = torch.empty_like(ordered)
    places.scatter_(1, ordered, torch.arange(flat.shape[1]).expand_as(ordered))
    return places.view(values.shape)


def blur(images: Tensor) -> Tensor:
    """Images under a Gaussian of 5 % of the shorter side, 11 pixels at 224: what an object is can no longer be told.
    Borders are repeated. (RISE cuts a Gaussian of 5 pixels off at 11×11.)"""
    sigma = SIGMA * min(images.shape[-2:])
    reach = max(1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=torch.float32)
    kernel = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).to(images.dtype)
    channels = images.shape[1]
    x = F.pad(images, (reach,) * 4, mode="replicate")
    x = F.conv2d(x, kernel.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(x, kernel.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)


@torch.no_grad()
def curve(
    model: nn.Module, first: Tensor, last: Tensor, order: Tensor, targets: Tensor, steps: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """From `first` to `last`, pixels in their order: shares that are changed (steps + 1,), and the target's probability
    at each, (B, steps + 1)."""
    n, pixels = len(first), order[0].numel()
    changed = torch.arange(steps + 1) * pixels // steps
    probabilities = torch.empty(n * (steps + 1))
    with in_eval(model):
        for numbers in torch.arange(len(probabilities)).split(batch_size):
            image, step = numbers // (steps + 1), numbers % (steps + 1)
            replaced = (order[image] < changed[step][:, None, None])[:, None]
            logits = model(torch.where(replaced, last[image], first[image]))
            probabilities[numbers] = logits.float().softmax(1).gather(1, targets[image][:, None])[:, 0]
    return changed / pixels, probabilities.view(n, steps + 1)


def area(shares: Tensor, probabilities: Tensor) -> Tensor:
    """By the trapezoidal rule, one an image: maps of the same images are compared in pairs."""
    return torch.trapezoid(probabilities, shares)
