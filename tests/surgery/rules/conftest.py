"""Random modules of every class with a rule of its own, and kernels written out a second time."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import timm.layers
import torch
from torch import Tensor, nn

Case = tuple[Any, Tensor, str]
"""A random module, an input it fits, and a text that names it."""


def _random_case(name: str, seed: int, dtype: torch.dtype) -> Case:
    """Any kernel, stride, dilation, groups, padding and output padding that the class accepts, on a tiny input."""
    rng = random.Random(seed)
    kernel = rng.choice([(1, 1), (3, 3), (2, 2), (1, 5), (4, 3), (rng.randint(1, 4), rng.randint(1, 4))])
    dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
    stride = (rng.choice((1, 2, 3)), rng.choice((1, 2, 3)))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    groups = rng.choice((1, 1, 2, 3))
    channels = (groups * rng.choice((1, 1, 2)), groups * rng.choice((1, 2)))
    if "Std" in name and kernel == (1, 1):  # one number has no variance: timm's own forward refuses it
        channels = (groups * 2, channels[1])
    settings: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups, "bias": rng.random() < 0.5}
    smallest = [1, 1]
    if name == "ConvTranspose2d":
        cropped = tuple(rng.randint(0, r) for r in reach)
        added = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        settings |= {"padding": cropped, "output_padding": added}
        smallest = [-(-(2 * p - r - a) // s) + 1 for p, r, a, s in zip(cropped, reach, added, stride, strict=True)]
    elif name in ("StdConv2dSame", "ScaledStdConv2dSame"):
        settings["padding"] = rng.choice(("SAME", "SAME", "SAME", "valid", ""))
    elif name != "Conv2dSame":
        settings["padding"] = rng.choice((None, 0, (1, 2)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = nn.ConvTranspose2d if name == "ConvTranspose2d" else getattr(timm.layers, name)
        module = kind(*channels, kernel, **settings, dtype=dtype)
        if hasattr(module, "gain"):
            nn.init.uniform_(module.gain, 0.5, 1.5)
        follows_input = name == "Conv2dSame" or getattr(module, "same_pad", False)
        if name != "ConvTranspose2d" and not follows_input:
            paddings = module.padding if isinstance(module.padding, tuple | list) else (module.padding,) * 2
            smallest = [r + 1 - 2 * p for r, p in zip(reach, paddings, strict=True)]
        size = [max(1, least) + rng.randint(0, 5) for least in smallest]
        x = torch.randn(2, channels[0], *size, dtype=dtype)
    return module, x, f"seed {seed}: {module} on {tuple(x.shape)}"


def _kernel_of(module: Any) -> Tensor:
    """The kernel of the cross-correlation that a module is, (O, C/g, …), from the papers' formulas; differentiable."""
    weight: Tensor = module.weight
    if isinstance(module, nn.ConvTranspose2d):
        return torch.cat([part.transpose(0, 1).flip(2, 3) for part in weight.chunk(module.groups)])
    if not hasattr(module, "eps"):
        return weight
    mean = weight.mean((1, 2, 3), keepdim=True)
    variance = (weight - mean).square().mean((1, 2, 3), keepdim=True)
    standardised = (weight - mean) / (variance + module.eps).sqrt()
    return standardised * module.gain * module.scale if hasattr(module, "gain") else standardised


@pytest.fixture(scope="session")
def case_of(random_case: Callable[..., Any]) -> Callable[..., Case]:
    """`case_of(class name, seed, dtype)`: a random module of that class, an input, and a text that names it."""

    def case(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Case:
        return random_case(seed, dtype) if name == "Conv2d" else _random_case(name, seed, dtype)

    return case


@pytest.fixture(scope="session")
def kernel_of() -> Callable[[Any], Tensor]:
    """`kernel_of(module)`: the kernel that the new layer should have, computed without the package."""
    return _kernel_of
