"""Counters of multiply-adds: does what recasting adds show, against torch's own counter?"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import wraps

import torch
from tools import Case, Cell, tool
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

REMEDY = dict.fromkeys(("loses attention", "wrong", "refused"), "count with `torch.utils.flop_counter`")


def by_torch(model: nn.Module, images: Tensor) -> float:
    """Return the multiply-adds of a pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops() / 2


def counter(name: str, *packages: str) -> Callable[[Callable[[nn.Module, Tensor], float]], object]:
    """Add a counter: its increase over the parent is compared with torch's."""

    def add(count: Callable[[nn.Module, Tensor], float]) -> object:
        @wraps(count)
        def run(case: Case) -> Cell:
            with contextlib.redirect_stdout(io.StringIO()):  # copies: some leave hooks
                before, after = (count(copy.deepcopy(m), case.images[:1]) for m in (case.parent, case.model))
            true = by_torch(case.model, case.images[:1]) - by_torch(case.parent, case.images[:1])
            if case.layer == "parent":
                return Cell("exact")
            error = abs(after - before - true) / true
            cell = "loses attention" if after - before < true / 2 else "wrong"
            cell = "exact" if error < 1e-3 else "works" if error < 0.05 else cell
            return Cell(cell, error, f"{(after - before) / 1e6:+.1f} M, true {true / 1e6:+.1f}")

        return tool(name, "count multiply-adds", *packages, remedy=REMEDY)(run)

    return add


counter("torch.utils.flop_counter", "torch")(by_torch)


@counter("fvcore", "fvcore==0.1.5.post20221221")
def by_fvcore(model: nn.Module, images: Tensor) -> float:
    from fvcore.nn import FlopCountAnalysis

    return FlopCountAnalysis(model, images).unsupported_ops_warnings(False).total()


def by_ptflops(model: nn.Module, images: Tensor, backend: str) -> float:
    from ptflops import get_model_complexity_info

    count, _ = get_model_complexity_info(
        model, tuple(images.shape[1:]), backend=backend, as_strings=False, print_per_layer_stat=False
    )
    return count


counter("ptflops", "ptflops==0.7.5")(lambda model, images: by_ptflops(model, images, "pytorch"))
counter('ptflops, `backend="aten"`', "ptflops==0.7.5")(lambda model, images: by_ptflops(model, images, "aten"))


@counter("thop", "thop==0.1.1.post2209072238")
def by_thop(model: nn.Module, images: Tensor) -> float:
    from thop import profile

    return profile(model, (images,), verbose=False)[0]


@counter("torchinfo", "torchinfo==1.8.0")
def by_torchinfo(model: nn.Module, images: Tensor) -> float:
    from torchinfo import summary

    return summary(model, input_data=images, verbose=0).total_mult_adds


@counter("calflops", "calflops==0.3.2", "transformers==5.23.0", "accelerate==1.15.0")
def by_calflops(model: nn.Module, images: Tensor) -> float:
    from calflops import calculate_flops

    return calculate_flops(model, args=[images], output_as_string=False, print_results=False)[1]


@counter("torch-flops", "torch-flops==0.4.1", "tabulate")
def by_torch_flops(model: nn.Module, images: Tensor) -> float:
    from torch_flops import TorchFLOPsByFX

    counter = TorchFLOPsByFX(model)
    counter.propagate(images)
    return counter.print_total_flops(show=False) / 2
