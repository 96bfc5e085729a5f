"""Is the recast model the same function? `verify` compares parent and child, layer by layer and end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.layers.cmhsa import recast_layers
from recast.layers.gpsa import gpsa_layers
from recast.run.config import Backend
from recast.surgery.plan import Plan, applied_plan
from recast.surgery.rules import parametrization_of
from recast.tracing.hooks import captured_outputs, hooked, in_eval, named
from recast.tracing.observe import Example, batch_of, run_example

TOLERANCE = 1e-5
QUERY = 10.0
"""What the control adds to a query: far from the average, whose queries are 0."""
TIES = 10_000
"""One prediction in so many may differ: of 300,000 pixels some have two classes that are equal to rounding."""


@dataclass(frozen=True)
class Trace:
    """What a model computed for a batch: its output, and the output of every planned layer, by name."""

    output: Any
    layers: dict[str, list[Tensor]]


@dataclass(frozen=True)
class Exactness:
    """How far a child is from its parent. Relative error is max|child − parent| / max|parent| over a tensor."""

    images: int
    max_relative_error: float
    bitwise: bool
    argmax_agreement: float
    """Share of images (of pixels, where a map is predicted) with the same argmax over the first output's channels, 0 to
    1; NaN where there is none to compare."""
    backend: str
    layers: dict[str, float]
    predictions: int = 0
    """Images or pixels whose argmax was compared."""

    def ok(self, tol: float = TOLERANCE) -> bool:
        """Relative error within `tol`, and the same argmax everywhere but for one in 10,000 (ties, among pixels)."""
        agree = math.isnan(self.argmax_agreement) or self.differing <= self.predictions // TIES
        return agree and self.max_relative_error <= tol

    @property
    def differing(self) -> int:
        """Images or pixels with another argmax."""
        return 0 if math.isnan(self.argmax_agreement) else round((1 - self.argmax_agreement) * self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self)

    def __add__(self, other: Exactness) -> Exactness:
        """Both batches together."""
        images = self.images + other.images
        predictions = self.predictions + other.predictions
        agreement = 1 - (self.differing + other.differing) / predictions if predictions else float("nan")
        return Exactness(
            images,
            max(self.max_relative_error, other.max_relative_error),
            self.bitwise and other.bitwise,
            agreement,
            self.backend,
            {name: max(error, other.layers[name]) for name, error in self.layers.items()},
            predictions,
        )

    def __str__(self) -> str:
        how = "bitwise equal" if self.bitwise else f"max relative error {self.max_relative_error:.2e}"
        if math.isnan(self.argmax_agreement):
            return f"{how} ({self.backend})"
        same = self.predictions - self.differing
        of = "images" if self.predictions == self.images else "pixels"
        return f"{how}; same prediction on {same} of {self.predictions} {of} ({self.backend})"


def relative_error(a: Tensor, b: Tensor) -> float:
    """max|a − b| / max|b|; infinite where a value is not finite or the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not (a.is_floating_point() and b.is_floating_point()):
        a, b = a.cpu().double(), b.cpu().double()
    scale = b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)
    error = float((a - b).abs().max() / scale)
    return error if error == error else float("inf")


@contextmanager
def full_precision() -> Iterator[None]:
    """TF32 off: with it, equal functions differ by 1e-3 on recent GPUs."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@contextmanager
def use_backend(model: nn.Module, backend: Backend | None) -> Iterator[None]:
    """Let every GPSA layer compute with `backend` (None: leave each its own); C-MHSA has one way only."""
    before = [(layer, layer.backend) for layer in gpsa_layers(model).values()]
    try:
        for layer, own in before:
            layer.backend = backend or own
        yield
    finally:
        for layer, own in before:
            layer.backend = own


@torch.no_grad()
def trace(model: nn.Module, plan: Plan, batch: Example) -> Trace:
    """Run `batch` in eval mode and keep the outputs that `verify` compares: take it before an in-place recast."""
    steps = named(model, (step.name for step in plan.steps))
    with in_eval(model), full_precision(), captured_outputs(steps) as layers:
        output = run_example(model, batch)
    return Trace(tree_map_only(Tensor, torch.clone, output), layers)


def verify(parent: nn.Module | Trace, child: nn.Module, batch: Example, *, backend: Backend | None = None) -> Exactness:
    """Compare `child` with its parent (the model, or a `trace` of it taken before the recast) on `batch`.

    Sets eval mode and TF32 off, and restores both. `backend` makes every layer compute with that code. With
    `stride="dilate"` layers are compared at the parent's positions, the even ones of the child. Outputs may be any nest
    of tensors. Raises `RecastError` if the outputs cannot be compared.
    """
    plan = applied_plan(child)
    before = parent if isinstance(parent, Trace) else trace(parent, plan, batch)
    with use_backend(child, backend):
        after = trace(child, plan, batch)
        with in_eval(child), torch.no_grad():  # as it just ran
            backends = sorted({layer.chosen_backend() for layer in recast_layers(child).values()})
    if silent := [name for name in before.layers if name not in after.layers]:
        raise RecastError(f"the child never calls {silent[0] or 'its layer'}: something goes on calling the old one")
    outputs, expected = tree_leaves(after.output), tree_leaves(before.output)
    pairs = zip(outputs, expected, strict=False)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if not tensors or len(outputs) != len(expected):
        raise RecastError("parent and child return different kinds of output: they cannot be compared")
    images, (first, reference) = batch_of(batch), tensors[0]
    # one dictionary of boxes an image, as detectors return, has no classes in its first tensor
    boxes = isinstance(before.output, list) and any(isinstance(item, dict) for item in before.output)
    comparable = not boxes and first.shape == reference.shape and first.dim() > 1 and len(first) == images
    equal = first.argmax(1) == reference.argmax(1) if comparable else torch.zeros(0)
    return Exactness(
        images=images,
        max_relative_error=max(relative_error(a, b) for a, b in tensors),
        bitwise=all(torch.equal(a, b) for a, b in tensors),
        argmax_agreement=float(equal.double().mean()),
        backend=", ".join(backends) or ("convolution" if plan.pool is None else "attention pooling"),
        layers={name: _layer_error(after.layers[name], outputs) for name, outputs in before.layers.items()},
        predictions=equal.numel(),
    )


def _layer_error(child: Sequence[Tensor], parent: Sequence[Tensor]) -> float:
    """Over all calls of a layer. Of a map that is s times denser than the parent's, every s-th pixel is compared."""
    if len(child) != len(parent):
        return float("inf")
    errors = []
    for a, b in zip(child, parent, strict=True):
        if a.dim() == 4 and a.shape != b.shape:
            s0, s1 = (-(-c // p) for c, p in zip(a.shape[2:], b.shape[2:], strict=True))
            a = a[:, :, ::s0, ::s1]
        errors.append(relative_error(a, b))
    return max(errors)


@contextmanager
def shifted_queries(model: nn.Module) -> Iterator[None]:
    """The control of a proof for attention pooling: inside the block its queries are others; the output must change."""
    projections = [(name, pool.attn.q) for name, pool in attention_pools(model).items()]
    if not projections:
        raise RecastError("the control needs attention pooling")
    with hooked(projections, after=lambda _name, _module, _inputs, queries: queries + QUERY):
        yield


@contextmanager
def swapped_heads(model: nn.Module) -> Iterator[None]:
    """The control of a proof: W_out of two heads of the first recast layer is swapped inside the block; the output must
    change.

    The middle of the kernel is one of the two: on a small map its border may see nothing but padding.
    """
    layer = next((m for m in recast_layers(model).values() if m.num_heads > 1), None)
    if layer is None:
        raise RecastError("the control needs a recast layer with two taps")
    makers = parametrization_of(layer)
    # of a computed weight, the tensor that it is made from
    weight = layer.weight if makers is None else max(makers.parameters(recurse=False), key=Tensor.numel)
    kept, order, middle = weight.detach().clone(), list(range(layer.num_heads)), layer.num_heads // 2
    order[0], order[middle] = middle, 0
    with torch.no_grad():
        weight.copy_(kept.flatten(2)[..., order].view_as(kept))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
