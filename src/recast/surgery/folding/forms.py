"""Folded forms of one layer: a convolution, or a layer without closed maps; BatchNorm folding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from recast.layers.cmhsa import CMHSA, RecastLayer, recast_layers
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.records import Fold, Folded, Step
from recast.surgery.stride import replace_module_
from recast.tracing.examples import Example, run_example
from recast.tracing.hooks import computes_as, hooked, replaced_output
from recast.tracing.outputs import tensors_of


def last_of(layer: nn.Module) -> Any:
    """Return the last layer: the convolution behind its padding layer."""
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


def describe(layer: nn.Module, batch_norm: str | None = None) -> Fold:
    """Return the `Fold` of a layer, for a replay."""
    if isinstance(layer, GPSA):
        return Fold(False, layer.geometry.kernel, layer.gaussian_heads, layer.content_heads, layer.value is not None,
                    batch_norm)  # fmt: skip
    return Fold(True, tuple(last_of(layer).kernel_size), (), (), False, batch_norm)


WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What compiled, checkpointed and sharded parts of a network add to names, and not to those of the weights."""


def plain_name(name: str) -> str:
    """Return a module's name as in its state dict."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by `plain_name`."""
    return {plain_name(name): module for name, module in model.named_modules()}


def as_it_is(layer: nn.Module, step: Step, batch_norm: str | None = None) -> Step:
    """The step with what a replay must know of its `layer` as it is now, folded, pruned or of another size;
    `batch_norm` was multiplied into it, if not before."""
    if isinstance(layer, CMHSA):
        return step if layer.size is None else replace(step, input=(step.input[0], *layer.size))
    fold = describe(layer, batch_norm or (step.fold.batch_norm if step.fold else None))
    if step.fold is None and fold.batch_norm is None and isinstance(layer, GPSA) and _is_whole(layer):
        return step
    return replace(step, fold=fold, bias_added=step.bias_added or fold.batch_norm is not None)


def is_as_told(report: Folded, layer: nn.Module) -> bool:
    """Return True if a layer has the form in the report of `fold_`."""
    form = describe(layer)
    actual = form.convolution, form.kernel, len(form.gaussian_heads), len(form.content_heads)
    return actual == (report.convolution, report.kernel, report.gaussian, report.content)


def _is_whole(layer: GPSA) -> bool:
    """Return True if no map was removed and W_val was not multiplied out."""
    maps = tuple(map(layer.geometry.heads, (layer.config.gaussian_heads, layer.config.content_heads)))
    return maps == (layer.gaussian_heads, layer.content_heads) and (layer.value is not None) == layer._projects_values


def as_folded(layer: GPSA, fold: Fold) -> nn.Module:
    """`layer` in the form that `fold` describes, for weights to be loaded into."""
    if not fold.convolution:
        layer.prune_(fold.gaussian_heads, fold.content_heads)
        if not fold.value:
            layer.value = None
        return layer
    return layer.to_conv()


# --- blocks that merge their branches into one convolution -----------------------------------------------------------

MERGING = ("fuse", "reparameterize", "switch_to_deploy")
"""What `timm.utils.reparameterize_model` calls on a block (RepVGG, MobileOne, RepViT, FastViT, LeViT)."""


def guard_merging_(model: nn.Module) -> None:
    """Let timm's blocks around recast layers merge only what is a convolution again: they read W_out as a kernel.

    The methods are replaced on the instance, by functions that pickle and `copy.deepcopy` take along with it. A whole
    network's own (RepViT's) goes on to its blocks.
    """
    for name, block in model.named_modules():
        if type(block).__module__.partition(".")[0] != "timm" or (not name and hasattr(block, "get_classifier")):
            continue
        if any(isinstance(module, RecastLayer) for module in block.modules()):
            for method in MERGING:
                if callable(getattr(type(block), method, None)):
                    setattr(block, method, partial(_merge, block, method))


def _merge(block: nn.Module, method: str) -> nn.Module | None:
    """The block's own merging, or the block as it is where attention is left in it; closed layers are folded first."""
    for layer in gpsa_layers(block).values():
        replace_module_(block, layer, layer.fold())
    if recast_layers(block):
        return block
    merged: nn.Module | None = getattr(type(block), method)(block)
    return merged


# --- BatchNorm in eval mode is a scale and a shift per channel: both go into the layer before it ----------------------


NORM_HOLDS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def is_batch_norm(norm: nn.Module | None) -> bool:
    """True for a BatchNorm2d with statistics, or timm's with an activation, that computes and holds what its class
    does."""
    if not isinstance(norm, nn.BatchNorm2d) or not norm.track_running_stats:
        return False
    parts = {"drop", "act"} if isinstance(norm, BatchNormAct2d) else set()
    held = {*norm._parameters, *norm._buffers, *norm._modules}
    return computes_as(norm, nn.BatchNorm2d, BatchNormAct2d) and held <= NORM_HOLDS | parts


def norms_after(model: nn.Module, layers: Mapping[str, nn.Module], batch: Example) -> dict[str, str]:
    """Return layer → BatchNorm, by name, where the norm alone reads the layer's output in a forward pass."""
    made: dict[int, tuple[str, Any]] = {}  # with the tensor: an address is given out again once its tensor is gone
    takes: dict[str, list[str | None]] = {}

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        made[id(output)] = name, output

    def meet(name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        takes.setdefault(name, []).append(made.get(id(inputs[0]), (None,))[0])

    layers = {name: layer for name, layer in layers.items() if computes_as(layer, GPSA)}
    norms = {name: module for name, module in model.named_modules() if is_batch_norm(module)}
    with hooked(layers.items(), after=note), hooked(norms.items(), before=meet):
        outputs = tensors_of(run_example(model, batch))
    once = [(name, makers[0]) for name, makers in takes.items() if len(makers) == 1]
    return {
        layer: norm
        for norm, layer in once
        if layer is not None and _is_only_reader(model, layers[layer], norms[norm], batch, outputs)
    }


def _is_only_reader(model: nn.Module, layer: nn.Module, norm: nn.Module, batch: Example, outputs: list[Tensor]) -> bool:
    """Return True if only `norm` reads the output of `layer`.

    With another output of the layer and the original output of the norm, the model's outputs must keep their bits.
    """
    original: list[Tensor] = []
    with hooked([("", norm)], after=lambda _name, _norm, _inputs, y: original.append(y.clone())):
        run_example(model, batch)
    with replaced_output(layer, lambda y: 2 * y + 1), replaced_output(norm, lambda _: original[0].clone()):
        changed = tensors_of(run_example(model, batch))
    return all(torch.equal(a, b) for a, b in zip(changed, outputs, strict=True))


@torch.no_grad()
def multiply_in_(layer: nn.Module, norm: nn.Module) -> bool:
    """Scale W_out and the bias of a GPSA layer or a convolution as `norm` would its output; False where it cannot be.

    y ↦ (y − μ) · g / √(v + ε) + β, with the running statistics.
    """
    target = last_of(layer)
    assert isinstance(norm, nn.BatchNorm2d)
    if parametrize.is_parametrized(target, "weight") or norm.running_mean is None or norm.running_var is None:
        return False
    transposed = isinstance(target, nn.ConvTranspose2d)
    if transposed and target.groups > 1:
        return False
    weight, bias = fuse_conv_bn_weights(
        target.weight, target.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, transposed
    )
    target.weight.copy_(weight)
    if target.bias is None:  # it is trained as the norm's own was
        learns = target.weight if norm.bias is None else norm.bias
        target.bias = nn.Parameter(bias.detach(), learns.requires_grad)
    else:
        target.bias.copy_(bias)
    return True


def what_remains(norm: nn.Module) -> nn.Module:
    """Return the replacement of a folded BatchNorm: an identity, or timm's activation after it."""
    parts = [getattr(norm, name, None) for name in ("drop", "act")]
    rest = [part for part in parts if isinstance(part, nn.Module) and not computes_as(part, nn.Identity)]
    return nn.Sequential(*rest).train(norm.training) if rest else nn.Identity()
