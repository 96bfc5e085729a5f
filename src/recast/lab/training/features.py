"""A warm-up with the parent as teacher: every recast layer learns to give what its convolution gives there.

    L = mean over the layers of ‖f_S − f_T‖² / ‖f_T‖²

f_S is the output of a GPSA layer in the student, f_T that of the convolution of the same name in the parent, for the
same images; the norms are over a part of a batch (in every process). Gradients flow through the whole student, but only
the GPSA layers are to move. The idea is FitNets' (Romero et al. 2015) with every recast layer as a hint; the relative
error, so that all layers count the same, is ours.

    features = FeatureDistillation(student, parent)
    with features:
        for images, labels in batches:
            outputs = network(images)  # the student, or its DistributedDataParallel
            features(outputs, images, labels).backward()
            keep_recast_gradients_(student)
            optimizer.step()
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from recast.errors import RecastError
from recast.lab.training.distill import widened
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.plan import applied_plan
from recast.surgery.rules import is_convolution
from recast.tracing.hooks import captured_outputs, hooked, named


class FeatureDistillation:
    """The loss above for the student's last forward pass: `features(outputs, images, targets)` → a scalar, float32.

    In a `with` block every forward pass of `student` with gradients is watched by hooks on its modules, so it may be
    called through DistributedDataParallel, in parts, and under autocast. Before each such pass the parent, a copy of
    which nothing ever changes, sees the same images: in the same mode, module by module, and with the same random
    draws. So both normalise with the statistics of the batch where BatchNorm trains, and drop the same units: the
    linear gate starts at 0, to rounding. `errors` has the error of every layer in the last pass.

    Raises RecastError for a student without GPSA layers or a layer that is no convolution in `parent`, for layers that
    give another size than there (a stride removed) or hold a folded BatchNorm, and for `torch.compile`.
    """

    def __init__(self, student: nn.Module, parent: nn.Module) -> None:
        self._layers = gpsa_layers(student)
        _check(student, parent, self._layers)
        self.student, self.errors = student, dict[str, Tensor]()
        self.parent = copy.deepcopy(parent).requires_grad_(False).to(next(student.parameters()).device)
        self._given, self._wanted = defaultdict[str, list[Tensor]](list), dict[str, list[Tensor]]()
        self._in_pass, self._hooks, self.watching = False, ExitStack(), False

    def __enter__(self) -> Self:
        """Watch the student's forward passes from now on."""
        self._hooks.enter_context(hooked(self._layers.items(), after=self._keep))
        student = [("", self.student)]
        self._hooks.enter_context(hooked(student, before=self._ask_parent, after=self._end_of_pass))
        self.watching = True
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the student alone."""
        self._hooks.close()
        self._forget()
        self._in_pass, self.watching = False, False

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of the pass that gave `outputs`; each pass is good for one. Labels have no part in it."""
        given, wanted = self._given, self._wanted
        self._forget()
        if not given:
            raise RecastError(
                "no forward pass of the student was seen: call it inside `with features:`, with gradients, not compiled"
            )
        errors = {name: _relative_error(name, given[name], wanted[name]) for name in self._layers if name in wanted}
        self.errors = {name: error.detach() for name, error in errors.items()}
        # DistributedDataParallel waits for a gradient of every parameter, also of those behind the last recast layer
        # (the classifier), which the errors do not depend on: zero times the outputs gives them one, of zeros.
        touched = [widened(leaf).sum() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return torch.stack(list(errors.values())).mean() + 0.0 * torch.stack(touched).sum()

    def _forget(self) -> None:
        self._given, self._wanted = defaultdict(list), {}

    def _ask_parent(self, _name: str, _student: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():  # an evaluation in between
            return
        self._forget()
        modes = {name: module.training for name, module in self.student.named_modules()}
        for name, module in self.parent.named_modules():
            module.training = modes.get(name, self.student.training)
        # clones take what a training pass writes: BatchNorm's running statistics, the vectors of spectral norm
        buffers = {name: buffer.clone() for name, buffer in self.parent.named_buffers()}
        device = next(self.parent.parameters()).device
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),  # the student draws the same
            captured_outputs(named(self.parent, self._layers)) as self._wanted,
        ):
            functional_call(self.parent, buffers, inputs)
        self._in_pass = True

    def _keep(self, name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        # Not while checkpointed activations are recomputed in the backward pass. A clone, because an in-place ReLU may
        # follow; and no more than that here: what autograd saves must be the same when the layer is recomputed.
        if self._in_pass:
            self._given[name].append(output.clone())

    def _end_of_pass(self, *_: Any) -> None:
        self._in_pass = False


def keep_recast_gradients_(model: nn.Module) -> None:
    """Forget the gradient of every parameter outside the GPSA layers: an optimiser neither moves nor decays them.

    After the last backward pass of an update, before gradients are clipped. Freezing them instead would not do: they
    train later, and DistributedDataParallel looks once, when it is made, at what requires a gradient.
    """
    recast = {id(p) for layer in gpsa_layers(model).values() for p in layer.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in recast:
            parameter.grad = None


def _relative_error(name: str, given: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """The relative squared error of a layer, averaged over its uses in the pass."""
    if len(given) != len(wanted):
        raise RecastError(f"{name} ran {len(given)} times in the student and {len(wanted)} times in the parent")
    errors = []
    for ours, theirs in zip(given, wanted, strict=True):
        if ours.shape != theirs.shape:
            raise RecastError(
                f"{name} gives {tuple(ours.shape)}, its convolution in the parent {tuple(theirs.shape)}: features can "
                "only be compared where the size stayed (stride='keep'); set schedule.feature_epochs=0"
            )
        if not ours.requires_grad:
            raise RecastError(
                f"{name} passes no gradient on (frozen, or reentrant checkpointing): it cannot learn from its features"
            )
        ours, theirs = widened(ours), widened(theirs)
        scale = theirs.square().sum().clamp_min(torch.finfo(theirs.dtype).tiny)  # of a convolution that is dead
        errors.append((ours - theirs).square().sum() / scale)
    return torch.stack(errors).mean()


def _check(student: nn.Module, parent: nn.Module, layers: Mapping[str, GPSA]) -> None:
    if not layers:
        raise RecastError(f"{type(student).__name__} has no recast layers: set schedule.feature_epochs=0")
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in student.modules()):
        # hooks that come after the first compiled pass are not called
        raise RecastError("features are read by hooks, which torch.compile leaves out: set compile=false")
    plan = applied_plan(student)
    if plan.config.stride != "keep":
        raise RecastError(
            f"features can only be compared where the size stayed: stride={plan.config.stride!r} changes it; "
            "set schedule.feature_epochs=0, or stride='keep'"
        )
    parents = dict(parent.named_modules())
    for name in layers:
        found = parents.get(name)
        if found is None or isinstance(found, GPSA) or not is_convolution(found):
            raise RecastError(f"the parent has no convolution at {name!r}: pass the network the student was made from")
