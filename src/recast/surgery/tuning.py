"""`tune_`: time the forms of every GPSA layer on its own input, and let the fastest run. All agree to rounding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from recast.config import Positive, typed
from recast.errors import RecastError, listed
from recast.layers.gpsa import GPSA, Forms, gpsa_layers
from recast.surgery.table import NAMED, render, terminal_width
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import Example, check_values, run_example
from recast.tracing.hooks import hooked, in_eval, undisturbed
from recast.tracing.timing import time_models

FORMS = ("split", "merged", "sdpa", "dense")
MARGIN = 0.03
"""Another form must save this share of the time of the one that runs now."""
DENSE_NUMBERS = 2**24
"""Numbers of all attention maps (B·H·N·M) up to which `dense`, which holds several such tensors, is timed."""


@dataclass(frozen=True)
class Timed:
    """Times of the forms of a layer, in a pass of one mode: forward in eval, forward and backward in training."""

    layers: str
    """Layers of the same kind with the same input, timed once: "layer3.1.conv2 and 3 more"."""
    mode: str
    """inference or training."""
    batch: int
    channels: int
    height: int
    width: int
    dtype: str
    before: str
    """The form that ran so far."""
    chosen: str
    over_before: float
    """Time of the chosen form over that of `before`, measured once more after the choice; 1 where nothing changed."""
    split_ms: float | None = None
    merged_ms: float | None = None
    sdpa_ms: float | None = None
    dense_ms: float | None = None
    """Medians in milliseconds; None for a form that was not timed."""


class Tuning(list[Timed]):
    """Rows of `tune_`, with the layers that did not run; printed as a table."""

    def __init__(self, rows: list[Timed], left_out: list[str]) -> None:
        super().__init__(rows)
        self.left_out = left_out
        """Layers that the images did not reach: they keep their form."""

    def __str__(self) -> str:
        table = Table()
        for column in ("layers", "mode", "input", *FORMS, "before → chosen", "time"):
            table.add_column(column, overflow="fold")
        for row in self:
            size = f"{row.batch}×{row.channels}×{row.height}×{row.width} {row.dtype}"
            times = ("" if (ms := getattr(row, f"{form}_ms")) is None else f"{ms:.3g} ms" for form in FORMS)
            table.add_row(row.layers, row.mode, size, *times, f"{row.before} → {row.chosen}", f"{row.over_before:.2f}×")
        text = render(table, terminal_width())
        return text if not self.left_out else f"{text}\nnot run by these images: {listed(self.left_out, NAMED)}"


class _Kind(NamedTuple):
    """A layer, its input, and the names of all layers that compute the same on inputs of this kind."""

    layer: GPSA
    x: Tensor
    names: list[str]


@typed("model", "seconds")
def tune_(model: nn.Module, images: Example, *, seconds: Positive = 0.5) -> Tuning:
    """Time the forms of every GPSA layer on this device, and let the fastest run, in place.

    Each layer is timed on its own input, captured in one pass of `images`, in eval mode without gradients and in
    training (forward and backward): `split`, `merged`, `sdpa`, and `dense` where its maps are small. The forms take
    turns, and medians are compared. Another form is chosen only if it saves 3 % of the time twice: among all forms, and
    once more beside the one that ran before. With one CPU thread the process's own time counts, without waiting.

    A choice holds for inputs of the same height and width on the same type of device, in eval mode and in training
    apart; other inputs keep the rule of "auto". It is not saved: tune again after `load`, and after training and
    folding, which change what a layer computes. Tune in the precision that runs, inside `torch.autocast` if that is so;
    compiled code is not timed. A `backend` set before is the form that ran before, and becomes "auto".

    Args:
        model: a recast network, in any wrapper.
        images: a batch (B, C, H, W), as large as those that will run, or another example as `plan` takes it.
        seconds: time of a measurement; there are up to four for each kind of layer and input.

    Returns:
        A `Tuning`: a list of `Timed` rows, which prints as a table. Its `left_out` names layers that did not run.

    Raises:
        RecastError: for a network without GPSA layers, without images, or if the images reach no GPSA layer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> child = recast.recast_(model, recast.plan(model, images))
        >>> rows = recast.tune_(child, images, seconds=0.01)
        >>> [(row.layers, row.mode, row.before) for row in rows]
        [('0', 'training', 'split')]
    """
    network = unwrapped(model)
    layers = gpsa_layers(network)
    if not layers:
        raise RecastError("tune_ found no GPSA layer: call recast_ first, with gate='linear' or 'sigmoid'")
    check_values(images, model)
    kinds: dict[Any, _Kind] = {}

    def capture(name: str, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        heads = layer.gaussian_heads, layer.content_heads, layer.open_heads
        key = type(layer), layer.extra_repr(), heads, x.shape, x.stride(), x.dtype
        kinds.setdefault(key, _Kind(layer, x.detach().clone(), [])).names.append(name)

    with in_eval(network), undisturbed(network):
        with torch.no_grad(), hooked(layers.items(), before=capture):
            run_example(model, images)
        if not kinds:
            raise RecastError(f"the images reach no GPSA layer, not {listed(list(layers), 1)}: call recast_ again")
        rows = [(kind, [_time(kind, training, seconds) for training in (False, True)]) for kind in kinds.values()]
    for kind, (inference, training) in rows:
        assert training is not None
        size = kind.x.shape[2], kind.x.shape[3]
        forms = Forms(kind.x.device.type, size, inference and inference.chosen, training.chosen)
        for layer in map(layers.__getitem__, kind.names):
            layer.backend = "auto"
            layer.tuned = (*(old for old in layer.tuned if old[:2] != forms[:2]), forms)
    reached = {name for kind in kinds.values() for name in kind.names}
    return Tuning([row for _, both in rows for row in both if row], [name for name in layers if name not in reached])


@torch.no_grad()
def _time(kind: _Kind, training: bool, seconds: float) -> Timed | None:
    """Choose the form of a kind of layer for a mode; None where the layer is known to be its convolution."""
    layer, x, names = kind
    layer.training = training  # the flag alone: `train` would forget which heads are open
    try:
        if layer._is_known_closed():
            return None
        before = layer.chosen_backend((x.shape[2], x.shape[3]))
        calls = {form: _call(layer, form, training) for form in dict.fromkeys((before, *_forms(layer, x)))}
        one_thread = x.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if one_thread else time.perf_counter
        times = {form: statistics.median(of) for form, of in time_models(calls, x, seconds, clock).items()}
        chosen, ratio = min(times, key=lambda form: times[form]), 1.0
        if times[chosen] < (1 - MARGIN) * times[before]:
            again = time_models({form: calls[form] for form in (before, chosen)}, x, seconds, clock)
            ratio = statistics.median(again[chosen]) / statistics.median(again[before])
        if ratio > 1 - MARGIN:
            chosen, ratio = before, 1.0
    finally:
        layer.training = False
    mode, dtype = "training" if training else "inference", str(x.dtype).removeprefix("torch.")
    shown = {f"{form}_ms": 1e3 * of for form, of in times.items() if form in FORMS}
    return Timed(listed(names, 1), mode, *x.shape, dtype, before, chosen, ratio, **shown)


def _forms(layer: GPSA, x: Tensor) -> list[str]:
    """Return the forms that differ for a layer and are worth timing."""
    forms = ["split", "sdpa"]
    if layer.config.gate == "linear" and not layer.geometry.is_transposed:
        forms.append("merged")  # elsewhere it is `split`
    queries, keys = (math.prod(of(*x.shape[2:])) for of in (layer.geometry.output_size, layer.geometry.padded_size))
    if len(x) * layer.num_heads * queries * keys <= DENSE_NUMBERS:
        forms.append("dense")
    return forms


def _call(layer: GPSA, form: str, training: bool) -> Callable[[Tensor], object]:
    """Return a pass: forward, and in training backward to the input and every parameter."""

    def inference(x: Tensor) -> Tensor:
        return layer.computed_by(form, x)

    def step(x: Tensor) -> object:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = layer.computed_by(form, x)
            trained = [p for p in layer.parameters() if p.requires_grad]
            return torch.autograd.grad(y, [x, *trained], torch.ones_like(y), allow_unused=True)

    return step if training else inference
