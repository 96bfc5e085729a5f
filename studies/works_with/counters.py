"""Multiply-adds of a ResNet-18 at 96×96 and of recast ones, by the usual counters, in millions.

In an environment with Recast: pip install fvcore==0.1.5.post20221221 ptflops==0.7.5 thop==0.1.1.post2209072238
torchinfo==1.8.0 calflops==0.3.2 transformers==5.24.0 accelerate, then python studies/works_with/counters.py. A row is
one counter; a cell is the difference from the parent, or the error.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recast

ARMS = {"beside": "last_of_blocks", "linear": "last_stage"}
"""Gate → layers."""


def by_torch(model: nn.Module, images: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops() / 2


def by_fvcore(model: nn.Module, images: Tensor) -> float:
    from fvcore.nn import FlopCountAnalysis

    return FlopCountAnalysis(model, images).unsupported_ops_warnings(False).total()


def by_ptflops(model: nn.Module, images: Tensor, backend: str = "pytorch") -> float:
    from ptflops import get_model_complexity_info

    count, _ = get_model_complexity_info(
        model, tuple(images.shape[1:]), backend=backend, as_strings=False, print_per_layer_stat=False
    )
    return count


def by_ptflops_aten(model: nn.Module, images: Tensor) -> float:
    return by_ptflops(model, images, "aten")


def by_thop(model: nn.Module, images: Tensor) -> float:
    from thop import profile

    return profile(model, (images,), verbose=False)[0]


def by_torchinfo(model: nn.Module, images: Tensor) -> float:
    from torchinfo import summary

    return summary(model, input_data=images, verbose=0).total_mult_adds


def by_calflops(model: nn.Module, images: Tensor) -> float:
    from calflops import calculate_flops

    return calculate_flops(model, args=[images], output_as_string=False, print_results=False)[1]


COUNTERS: tuple[Callable[[nn.Module, Tensor], float], ...] = (
    by_torch, by_fvcore, by_ptflops, by_ptflops_aten, by_thop, by_torchinfo, by_calflops,
)  # fmt: skip


def networks(images: Tensor) -> dict[str, nn.Module]:
    """Return the parent and a recast network for each of `ARMS`, with open heads."""
    parent = timm.create_model("resnet18").eval()
    models: dict[str, nn.Module] = {"parent": parent}
    for gate, where in ARMS.items():
        plan = recast.plan(parent, images, recast.RecastConfig(gate=gate), where=where)
        models[gate] = recast.recast_(copy.deepcopy(parent), plan).eval()
        for module in models[gate].modules():
            if isinstance(module, recast.AttentionBeside | recast.GPSA):
                nn.init.constant_(module.gamma, 0.1)
    return models


def main() -> None:
    images = torch.randn(1, 3, 96, 96)
    models = networks(images)
    print(f"| | {' | '.join(models)} |")
    for counter in COUNTERS:
        cells, before = [], 0.0
        for name, model in models.items():
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    count = counter(copy.deepcopy(model), images) / 1e6  # some leave hooks
            except Exception as error:  # whatever a package raises on a layer it does not know
                cells.append(f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            before = count if name == "parent" else before
            cells.append(f"{count:.1f}" if name == "parent" else f"{count - before:+.1f}")
        print(f"| {counter.__name__.removeprefix('by_')} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
