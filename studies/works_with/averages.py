"""Moving averages of weights: is the average that of the formula, attention's parameters included?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tools import Case, Cell, tool
from torch import nn

DECAY, STEPS = 0.8, 4
Weights = dict[str, torch.Tensor]


def weights(model: nn.Module) -> Weights:
    """Return copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def average(
    name: str, does: str, *packages: str, from_first: bool = False
) -> Callable[[Callable[[nn.Module], Any]], object]:
    """Add a tool: a function of the network returns one to call after each step, and one that returns the average.

    `from_first`: the first call copies the weights. Otherwise the average starts where the network starts.
    """

    def add(make: Callable[[nn.Module], Any]) -> object:
        def run(case: Case) -> Cell:
            model = copy.deepcopy(case.model)
            update, averaged = make(model)
            expected = weights(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(STEPS):
                optimizer.zero_grad()
                model(case.images).square().mean().backward()
                optimizer.step()
                update()
                decay = 0.0 if from_first and step == 0 else DECAY
                expected = {n: decay * expected[n] + (1 - decay) * now for n, now in weights(model).items()}
            result = averaged()
            missing = sorted(expected.keys() - result.keys())
            if missing:
                return Cell("loses attention", None, f"lacks {missing[0]}")
            error = max(
                float((result[n] - value).abs().max() / value.abs().max().clamp(min=1e-6))
                for n, value in expected.items()
            )
            return Cell("exact" if error <= 1e-5 else "wrong", error)

        return tool(name, does, *packages)(run)

    return add


@average("AveragedModel", "average, `get_ema_multi_avg_fn`", "torch", from_first=True)
def by_torch(model: nn.Module) -> Any:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return partial(ema.update_parameters, model), lambda: weights(ema.module)


@average("timm, ModelEmaV3", "average", "timm")
def by_timm(model: nn.Module) -> Any:
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(model, decay=DECAY)
    return partial(ema.update, model), lambda: weights(ema.module)


@average("torch-ema", "average, and `copy_to` for evaluation", "torch-ema==0.3")
def by_torch_ema(model: nn.Module) -> Any:
    from torch_ema import ExponentialMovingAverage

    ema, twin = ExponentialMovingAverage(model.parameters(), decay=DECAY, use_num_updates=False), copy.deepcopy(model)

    def averaged() -> Weights:
        ema.copy_to(twin.parameters())
        return weights(twin)

    return partial(ema.update, list(model.parameters())), averaged


@average("ema-pytorch", "average, from the first step", "ema-pytorch==0.8.3", from_first=True)
def by_ema_pytorch(model: nn.Module) -> Any:
    from ema_pytorch import EMA

    ema = EMA(model, beta=DECAY, min_value=DECAY, update_after_step=0, update_every=1)
    return ema.update, lambda: weights(ema.ema_model)
