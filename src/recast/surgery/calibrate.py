"""`calibrate_`: a soft start that reproduces the parent as well as a linear map can (our extension; in no paper).

With the sigmoid gate at α = λ = 1 a head sees a blurred pixel mixed with a global mean: the layer is far from the
convolution. The output is still linear in W_out, so the best W_out and bias are a ridge regression from what the
child's heads gather to what the parent's layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.config import Positive, typed
from recast.errors import RecastError
from recast.layers import functional
from recast.layers.cmhsa import RecastLayer, recast_layers
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.modes import in_eval
from recast.surgery.plan import applied_plan, set_plan_
from recast.surgery.rules import is_convolution
from recast.surgery.verify import full_precision
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import Example, check_values, read_batches, run_example
from recast.tracing.hooks import hooked
from recast.tracing.outputs import tensors_of


class _Reached(BaseException):
    """Ends a forward pass at the layer that was waited for."""


@typed("child", "parent", "batches", "ridge")
@torch.no_grad()
def calibrate_(
    child: nn.Module, parent: nn.Module, batches: Tensor | Iterable[Any], ridge: Positive = 1e-4
) -> nn.Module:  # fmt: skip
    """Fit W_out and the bias of every GPSA layer of `child` to the outputs of `parent`, by ridge regression, in place.

        min_W ‖F W − T‖² + ridge · tr(FᵀF)/K · ‖W − prior‖²      F: gathers of the child, T: outputs of the parent,
                                                                 prior: the kernel over the gate's share

    Layers are solved in order, each on inputs from the calibrated layers before it. A layer without bias gets one.

    Args:
        child: a recast network, usually with gate="sigmoid".
        parent: the network before `recast_`.
        batches: images, or batches of them, read as `wake_` does; all are held in memory and run twice per layer.
        ridge: weight of the penalty, relative to the mean square of the features.

    Returns:
        `child`.

    Raises:
        RecastError: with `child` unchanged, for batches without images or with NaN, a parent that lacks a layer, and
            C-MHSA layers.

    Example:
        >>> parent = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        >>> images = torch.randn(8, 3, 6, 6)
        >>> plan = recast.plan(parent, images, recast.RecastConfig(gate="sigmoid"))
        >>> child = recast.recast_(copy.deepcopy(parent), plan)
        >>> child = recast.calibrate_(child, parent, images)
    """
    plan = applied_plan(child)
    whole, child, parent = child, unwrapped(child), unwrapped(parent)
    layers = gpsa_layers(child)
    convolutions = _convolutions_of(child, parent, layers)
    images = _finite_batches(child, parent, batches)
    with in_eval(child, parent), full_precision(), _restored_on_error(layers):
        for name in _order_of_calls(child, layers, images[0]):
            layer = layers[name]
            pairs = (_features_and_targets(child, parent, layer, convolutions[name], batch) for batch in images)
            weights, bias = _ridge_regression(pairs, ridge, _kernel_over_share(layer))
            layer.weight.copy_(weights.mT.reshape(layer.weight.shape))
            layer.add_bias_()
            assert layer.bias is not None
            layer.bias.copy_(bias.flatten())
    steps = tuple(replace(step, bias_added=step.name in layers or step.bias_added) for step in plan.steps)
    set_plan_(child, replace(plan, steps=steps))
    return whole


def _convolutions_of(child: nn.Module, parent: nn.Module, layers: dict[str, GPSA]) -> dict[str, nn.Module]:
    """Return the parent's convolutions by name. Raises `RecastError` for a layer that cannot be fitted to one."""
    if others := [name for name in recast_layers(child) if name not in layers]:
        raise RecastError(
            f"calibrate_ requires gate='sigmoid' or 'linear', but {others[0]} is CMHSA: raise bias_init instead"
        )
    convolutions = {n: m for n, m in parent.named_modules() if is_convolution(m) and not isinstance(m, RecastLayer)}
    if missing := [name for name in layers if name not in convolutions]:
        raise RecastError(f"the parent has no convolution at {missing[0]!r}: pass the network the child was made from")
    return convolutions


def _finite_batches(child: nn.Module, parent: nn.Module, batches: Any) -> list[Example]:
    """Return the batches. Raises `RecastError` if there is none, and for NaN and infinity."""
    examples = [batch for batch, _ in read_batches(child, batches)]
    if not examples:
        raise RecastError("calibrate_ requires at least one batch of images")
    for batch in examples:
        check_values(batch, child, parent)
        if not all(bool(t.isfinite().all()) for t in tensors_of(batch)):
            raise RecastError("a batch holds NaN or infinite values: check the images")
    return examples


def _order_of_calls(child: nn.Module, layers: dict[str, GPSA], batch: Example) -> list[str]:
    """Return the layers in the order of their first calls.

    Each once: solved again, a layer would be pulled towards its own solution.
    """
    order: dict[str, None] = {}
    with hooked(layers.items(), before=lambda name, _module, _inputs: order.setdefault(name)):
        run_example(child, batch)
    return list(order)


@contextmanager
def _restored_on_error(layers: dict[str, GPSA]) -> Iterator[None]:
    """Restore kernels and biases if the block raises."""
    before = [(m, m.weight.clone(), None if m.bias is None else m.bias.clone()) for m in layers.values()]
    try:
        yield
    except BaseException:
        for layer, weight, bias in before:
            layer.weight.copy_(weight)
            if bias is None or layer.bias is None:
                layer.bias = None
            else:
                layer.bias.copy_(bias)
        raise


def _seen_by(model: nn.Module, layer: nn.Module, batch: Example, output: bool = False) -> Tensor:
    """Return the input or the output of `layer` for a batch; the pass ends there."""
    tensors: list[Tensor] = []

    def keep(_name: str, _module: nn.Module, inputs: tuple[Any, ...], result: Any = None) -> None:
        tensors.append(result if output else inputs[0])
        raise _Reached

    hooks: dict[str, Any] = {"after" if output else "before": keep}
    with suppress(_Reached), hooked([("", layer)], **hooks):
        run_example(model, batch)
    return tensors[0]


def _features_and_targets(
    child: nn.Module, parent: nn.Module, layer: GPSA, convolution: nn.Module, batch: Example
) -> tuple[Tensor, Tensor]:
    """Return the features (g, n, C/g·H) that the child's heads gather, and the parent's outputs (g, n, O/g)."""
    x, target = _seen_by(child, layer, batch), _seen_by(parent, convolution, batch, output=True)
    gathered = functional.gather(x, layer.weights())
    if gathered.shape[-2:] != target.shape[-2:]:
        raise RecastError(
            f"calibrate_ requires the parent's map size, got {tuple(gathered.shape[-2:])} for "
            f"{tuple(target.shape[-2:])}: with stride='remove' pass the parent with its stride removed"
        )
    features = gathered.flatten(3).flatten(1, 2).unflatten(1, (layer.groups, -1))
    targets = target.flatten(2).unflatten(1, (layer.groups, -1))
    return (t.permute(1, 0, 3, 2).flatten(1, 2) for t in (features, targets))  # type: ignore[return-value]


def _kernel_over_share(layer: GPSA) -> Tensor:
    """Return the kernel (g, K, P) over the share of the gate that a head's position has."""
    kernel = layer.weight.cpu().double().flatten(1).unflatten(0, (layer.groups, -1)).mT
    gates = functional.expand_heads(layer.weights()).gates
    share = (1 - gates.content).cpu().double()
    return kernel / share.repeat(kernel.shape[1] // layer.num_heads)[None, :, None]


def _ridge_regression(pairs: Iterable[tuple[Tensor, Tensor]], ridge: float, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (g, K, P) that fit features F (g, n, K) to targets T (g, n, P), and the intercept (g, P).

    Minimises ‖F W − T‖² + ridge · tr(FᵀF)/K · ‖W − prior‖² with centred F and T. Products of a pair are made in its own
    precision, and summed over the pairs in fp64.
    """
    count = 0
    # sums over samples of FᵀF, FᵀT, F and T; a scalar zero grows into the right shape
    ff, ft, f, t = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    for features, targets in pairs:
        count += features.shape[1]
        # sums on the CPU: MPS has no fp64, and they are small
        ff = ff + (features.mT @ features).cpu().double()
        ft = ft + (features.mT @ targets).cpu().double()
        f = f + features.cpu().double().sum(1)
        t = t + targets.cpu().double().sum(1)
    mean_f, mean_t = f / count, t / count
    ff = ff - count * mean_f[:, :, None] * mean_f[:, None, :]
    ft = ft - count * mean_f[:, :, None] * mean_t[:, None, :]
    scale = ff.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(ff.dtype).tiny) * ridge
    penalty = scale[:, None, None] * torch.eye(ff.shape[1], dtype=ff.dtype, device=ff.device)
    weights = torch.linalg.solve(ff + penalty, ft + scale[:, None, None] * prior)
    return weights, mean_t - (mean_f[:, None, :] @ weights).squeeze(1)
