"""`tune_`: time the forms of every layer with gates on its own input, and use the fastest. All agree to rounding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from rich.table import Table
from torch import Tensor, nn

from recast.config import Positive, typed
from recast.errors import RecastError, listed
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import GatedLayer, gated_layers
from recast.layers.forms import Forms
from recast.layers.gpsa import GPSA
from recast.modes import in_eval
from recast.surgery.chosen_forms import Form
from recast.surgery.table import NAMED, render, terminal_width
from recast.surgery.wrappers import whole
from recast.tracing.examples import Example, check_values, run_example
from recast.tracing.hooks import hooked, undisturbed
from recast.tracing.timing import time_models

FORMS: tuple[Form, ...] = get_args(Form)
MARGIN = 0.03  # another form must save this share of the time
MAP_NUMBERS = 2**24  # B·H·N·M up to which forms that hold the maps whole are timed


@dataclass(frozen=True)
class Timed:
    """Times of the forms of a layer: of a forward pass (inference), of forward and backward (training)."""

    layers: str
    """Layers of the same kind with the same input, timed once: "layer3.1.conv2 and 3 more"."""
    mode: str
    batch: int
    channels: int
    height: int
    width: int
    dtype: str
    before: str
    chosen: str
    over_before: float
    """Time of the chosen form over that of `before`, measured once more; 1 where nothing changed."""
    split_ms: float | None
    merged_ms: float | None
    sdpa_ms: float | None
    dense_ms: float | None
    """Medians in milliseconds; None for a form that was not timed."""


class Tuning(list[Timed]):
    """Rows of `tune_`, and `left_out`: layers that the images did not reach, which keep their form."""

    def __init__(self, rows: list[Timed], left_out: list[str]) -> None:
        super().__init__(rows)
        self.left_out = left_out

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


_Kind = tuple[GatedLayer, Tensor, dict[str, None]]  # a layer, its input, and the names of all that compute the same


@typed("model", "seconds")
@torch.inference_mode(False)
def tune_(model: nn.Module, images: Example, *, seconds: Positive = 0.5) -> Tuning:
    """Time the forms of every layer with gates on this device, and use the fastest, in place.

    Each layer is timed on its own input, captured in one pass of `images`, in eval mode without gradients and in
    training (forward and backward): `split`, `merged`, and on small maps also `sdpa` and `dense`. Forms take turns, and
    medians are compared. A form replaces the previous one only if it saves 3 % of the time twice: when all forms are
    timed, and again in a direct comparison of the two. With one CPU thread process time is measured, without waits.

    A choice applies to inputs of the same height and width on the same type of device, separately in eval mode and in
    training; other inputs keep the rule of "auto". `save` stores it, and `load` restores it on a device of the same
    name. Tune again after training and `fold_`, in the precision that you use (inside `torch.autocast` if you use it);
    compiled code is not timed. A `backend` that was set counts as the previous form, and becomes "auto".

    Args:
        model: a recast network, in any wrapper.
        images: (B, C, H, W), as many as will run at a time, or another example as `plan` takes it.
        seconds: time of a measurement; there are up to four for each kind of layer and input.

    Returns:
        `Tuning`, a list of `Timed` rows that prints as a table. Its `left_out` names layers that did not run.

    Raises:
        RecastError: for a network without layers with gates, without images, or if the images reach none of them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> child = recast.recast_(model, recast.plan(model, images))
        >>> rows = recast.tune_(child, images, seconds=0.01)
        >>> [(row.layers, row.mode, row.before) for row in rows]
        [('0', 'inference', 'split'), ('0', 'training', 'split')]
    """
    layers = gated_layers(network := whole(model))
    if not layers:
        raise RecastError("tune_ found no layer with gates: call recast_ first, with another gate than 'bias'")
    check_values(images, model)
    kinds: dict[Any, _Kind] = {}

    def capture(name: str, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        key = type(layer), layer.extra_repr(), layer.gaussian_heads, layer.content_heads, x.shape, x.stride(), x.dtype
        kinds.setdefault(key, (layer, x.detach().clone(), {}))[2][name] = None

    with in_eval(network), undisturbed(network):
        with torch.no_grad(), hooked(layers.items(), before=capture):
            run_example(model, images)
        if not kinds:
            raise RecastError(f"these images do not reach {listed([*layers], 2)}: pass the network's own input")
        rows = [(kind, [_time(kind, training, seconds) for training in (False, True)]) for kind in kinds.values()]
    for (_, x, names), (inference, training) in rows:
        assert training is not None
        forms = Forms(x.device.type, (x.shape[2], x.shape[3]), inference.chosen if inference else None, training.chosen)
        for layer in map(layers.__getitem__, names):
            layer.backend = "auto"
            layer.tuned = (*(old for old in layer.tuned if old[:2] != forms[:2]), forms)
    reached = {name for *_, names in kinds.values() for name in names}
    return Tuning([row for _, both in rows for row in both if row], [name for name in layers if name not in reached])


@torch.no_grad()
def _time(kind: _Kind, training: bool, seconds: float) -> Timed | None:
    """Choose the form of a kind of layer for a mode; None where the layer is known to be its convolution."""
    layer, x, names = kind
    layer.training = training
    try:
        if isinstance(layer, GPSA) and not training and layer._is_closed():
            return None
        before = layer.chosen_backend((x.shape[2], x.shape[3]))
        calls = {form: _call(layer, form, training) for form in dict.fromkeys((before, *_forms(layer, x)))}
        clock = time.process_time if x.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
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
    milliseconds = (1e3 * times[form] if form in times else None for form in FORMS)
    b, c, h, w = x.shape
    return Timed(listed([*names], 1), mode, b, c, h, w, dtype, before, chosen, ratio, *milliseconds)


def _forms(layer: GatedLayer, x: Tensor) -> list[str]:
    """Return the forms that differ for a layer and are worth timing."""
    if isinstance(layer, AttentionBeside):
        return ["split", "sdpa"]
    queries, keys = (math.prod(of(*x.shape[2:])) for of in (layer.geometry.output_size, layer.geometry.padded_size))
    is_small = len(x) * layer.num_heads * queries * keys <= MAP_NUMBERS
    differs = layer.config.gate == "linear" and not layer.geometry.is_transposed  # elsewhere `merged` is `split`
    use = {"split": True, "merged": differs, "sdpa": is_small or x.is_cuda, "dense": is_small}
    return [form for form in FORMS if use[form]]


def _call(layer: GatedLayer, form: str, training: bool) -> Callable[[Tensor], object]:
    """Return a pass: forward, and in training backward to the input and every parameter."""

    def step(x: Tensor) -> object:
        with torch.enable_grad():
            y = layer.computed_by(form, x := x.detach().requires_grad_())
            trained = [p for p in layer.parameters() if p.requires_grad]
            return torch.autograd.grad(y, [x, *trained], torch.ones_like(y), allow_unused=True)

    return step if training else partial(layer.computed_by, form)
