"""Which layers attention would pay in, asked of images before anything is trained.

A layer is recast on a copy, exactly (γ = s = 0), with queries and keys from half of the images (`wake_`); over the
other half the loss is differentiated with respect to the gate γ of every head:

    promised = Σ_h max(0, |ḡ_h| − 2·e_h)        ḡ, e: mean of ∂L/∂γ_h over batches, and its standard error

To first order the loss falls by that much where every head's content map takes its kernel position's place; what the
images do not agree on is noise and does not count. Gradients are of one network, in which all the layers wait: what
one layer's gates promise may be gone once another's are open. The rule is this library's own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.config import typed
from recast.errors import RecastError, blamed
from recast.layers.config import PAPERS_LAYER, PoolConfig, RecastConfig
from recast.layers.gpsa import gpsa_layers
from recast.surgery.apply import recast_
from recast.surgery.limits import Budget
from recast.surgery.plan import Plan, plan_of, set_plan_
from recast.surgery.planning import plan as make_plan
from recast.surgery.table import WIDTH, quantity, render
from recast.surgery.wake import wake_
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import Example, batch_of, part_of, run_example
from recast.tracing.hooks import in_eval, undisturbed
from recast.tracing.outputs import answer_of

Loss = Callable[[Any, Tensor], Tensor]
Batch = tuple[Example, Tensor]

LEAST = 32
"""Images: 16 that the gradient is taken over, one by one."""
PARTS = 16
"""Batches that the standard error is of, or more."""
PART = 64
"""Images of one pass: content maps of every head are held for the gradient."""


@dataclass(frozen=True)
class Ranked:
    """What a layer's gates promise, and what the layer adds for one image."""

    name: str
    promised: float
    slopes: tuple[float, ...]
    """∂L/∂γ of every head with content, and its standard error:"""
    errors: tuple[float, ...]
    macs: int
    activation_bytes: int

    def per(self, cost: Literal["macs", "activation_bytes"]) -> float:
        """Promised fall of the loss per 10⁹ added multiply-adds or added MiB."""
        units = {"macs": 1e9, "activation_bytes": 2**20}
        return self.promised / max(getattr(self, cost) / units[cost], 1e-6)


@dataclass(frozen=True)
class Ranking:
    """Layers by what their gates promise per added multiply-add."""

    model: str
    images: int
    """Held out of the start of queries and keys: what the gradient is taken over."""
    layers: tuple[Ranked, ...]

    def order(self) -> list[str]:
        """Return the names of the layers that promise something, those first that promise most for their cost."""
        return [layer.name for layer in self.layers if layer.promised > 0]

    def to_json(self) -> str:
        """Every layer and head, as indented JSON."""
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"model": self.model, "images": self.images, "layers": layers}, indent=1)

    def __str__(self) -> str:
        table = Table()
        table.add_column("layer", no_wrap=True)
        heads = ("heads that promise", "loss promised")
        for column in (*heads, "MACs", "per GMAC", "activations", "per MiB"):
            table.add_column(column, justify="right", no_wrap=True)
        for layer in self.layers:
            telling = sum(abs(slope) > 2 * error for slope, error in zip(layer.slopes, layer.errors, strict=True))
            table.add_row(
                layer.name or "(the model)", f"{telling} of {len(layer.slopes)}", f"{layer.promised:.3g}",
                f"+{quantity(layer.macs)}", f"{layer.per('macs'):.3g}",
                f"+{quantity(layer.activation_bytes, 'B', 1024)}", f"{layer.per('activation_bytes'):.3g}",
            )  # fmt: skip
        title = f"{self.model}: {len(self.layers)} layers by the fall of the loss that their gates promise"
        note = f"to first order, over {self.images} images; costs are for one image, with every head open"
        return f"{title}\n{render(table, WIDTH)}\n{note}\n"


@typed("model", "plan", "labels")
def rank(model: nn.Module, plan: Plan, images: Example, labels: Tensor, *, loss: Loss | None = None) -> Ranking:
    """Rank the layers of a `plan` by what attention promises per added multiply-add; `model` is only read.

    images (N, C, H, W): normalised, training images, in any order: every other one gives queries and keys their start;
    other arguments as for `plan`, with a row for each image. labels (N,): what `loss(outputs, labels)` takes, by
    default cross entropy of the logits. The same images give the same ranking. Raises `RecastError` for too few images,
    labels that do not fit them, a plan without layers or whose strides go, and a loss that is not finite.
    """
    if (count := batch_of(images)) != len(labels) or count < LEAST:
        raise RecastError(f"a ranking takes {LEAST} images or more and their labels, got {count}, {len(labels)}")
    names = [step.name for step in plan.steps]
    if not names:
        raise RecastError("the plan recasts no layer: there is nothing to rank")
    device = next(model.parameters()).device
    images, labels = tree_map_only(Tensor, lambda x: x.to(device), (images, labels))
    size = min(PART, count // 2 // PARTS)
    pixels, answers = part_of(images, slice(1, None, 2)), labels[1::2]
    batches = [(part_of(pixels, slice(i, i + size)), answers[i : i + size]) for i in range(0, len(answers), size)]
    other = part_of(images, slice(0, None, 2))
    seen = [part_of(other, slice(i, i + PART)) for i in range(0, batch_of(other), PART)]
    awake = replace(plan, config=plan.config.replace(query_key="images"))
    with torch.inference_mode(False), undisturbed(model):
        slopes = gate_slopes(model, awake, names, batches, loss or _cross_entropy, seen)
    layers = []
    for step in plan.steps:
        every = slopes[step.name][: len(answers) // size].double()
        every = every[
            :, : len(step.geometry.heads(getattr(plan.config, "content_heads", "all")))
        ].cpu()  # γ; the rest is s
        mean, error = every.mean(0), every.std(0) / len(every) ** 0.5
        promised = float((mean.abs() - 2 * error).clamp_min(0).sum())
        added = step.after - step.before
        layers.append(
            Ranked(step.name, promised, tuple(mean.tolist()), tuple(error.tolist()), added.macs, added.memory)
        )
    return Ranking(plan.model, len(answers), tuple(sorted(layers, key=lambda layer: -layer.per("macs"))))


def _cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy of the logits; on a GPU a class that is not there would end the process."""
    logits = answer_of(outputs)
    classes = logits.shape[1]
    if labels.dim() == 1 and (labels.is_floating_point() or labels.min() < -100 or labels.max() >= classes):
        raise RecastError(
            f"labels must be whole numbers from 0 to {classes - 1}, the network's classes: got {labels.dtype} from "
            f"{labels.min().item()} to {labels.max().item()}"
        )
    return nn.functional.cross_entropy(logits, labels)


def plan_best(
    model: nn.Module, images: Example, labels: Tensor, config: RecastConfig, limits: Budget,
    pool: PoolConfig | None = None,
) -> tuple[Plan, Ranking]:  # fmt: skip
    """Plan the layers that promise most for their cost, as many as fit into the budget; rank all layers for it.

    Raises `RecastError` where no layer's gates promise anything, or none fits.
    """
    first = part_of(images, slice(0, 1))
    every = make_plan(model, first, config, where="all", budget=Budget(tokens=limits.tokens))
    ranking = rank(model, every, images, labels)
    plan: Plan | None = None
    refusal = RecastError("no layer's gates promise anything: rank on more images (num_images), or name layers")
    names: list[str] = []
    for name in ranking.order():
        try:
            plan = make_plan(model, first, config, where=[*names, name], budget=limits, pool=pool)
            names.append(name)
        except RecastError as error:  # it does not fit; a smaller one may
            refusal = error
    if plan is None:
        raise refusal
    return plan, ranking


def gate_slopes(
    network: nn.Module, plan: Plan, layers: Sequence[str], batches: Sequence[Batch], loss: Loss,
    seen: Sequence[Example],
) -> dict[str, Tensor]:  # fmt: skip
    """∂L/∂(γ, s) of `layers` for every batch, (batches, H_c + H_g) each, where the network computes what it does.

    loss: mean over a batch. seen: images that queries and keys are taken from where the plan has query_key=images.

    Raises RecastError for a plan whose stride goes: the network would not be the same function there.
    """
    if plan.config.stride != "keep":
        raise RecastError("gates are measured where the function is exact: stride='keep' is needed")
    probe = copy.deepcopy(unwrapped(network))
    own = plan.config
    start = own.query_key if own.gate == "linear" else "zero"
    names = ("alpha", "content", "attend_padding", "content_heads", "gaussian_heads", "project_values")
    kept = PAPERS_LAYER | {name: getattr(own, name) for name in names if hasattr(own, name)}
    exact = RecastConfig(head_dim=own.head_dim, query_key=start, logit_std=own.logit_std, **kept)
    if (done := plan_of(probe)) is not None:  # a plan goes on with its own settings: layers that are recast keep theirs
        set_plan_(probe, replace(done, config=exact))
    with undisturbed(probe):  # every call for the same network sees the same queries and keys
        torch.manual_seed(0)
        recast_(probe, replace(plan, config=exact), steps=layers)
    if start == "images":
        wake_(probe, seen, own.logit_std, layers=layers)
    found = gpsa_layers(probe)
    gates = [gate for name in layers for gate in (found[name].gamma, found[name].spread)]
    probe.requires_grad_(False)
    for gate in gates:
        gate.requires_grad_(True)
    slopes: list[list[Tensor]] = []
    with in_eval(probe), torch.enable_grad():
        for pixels, labels in batches:
            outputs = run_example(probe, pixels)
            with blamed(f"the loss {getattr(loss, '__name__', type(loss).__name__)} of outputs and labels"):
                value = loss(outputs, labels)
                finite = bool(value.isfinite())
            if not finite:
                raise RecastError("the loss of the network is not finite on these images: look at the weights")
            own_slopes = torch.autograd.grad(value, gates, materialize_grads=True)
            slopes.append([slope.detach() for slope in own_slopes])
    return {
        name: torch.stack([torch.cat(batch[2 * i : 2 * i + 2]) for batch in slopes]) for i, name in enumerate(layers)
    }
