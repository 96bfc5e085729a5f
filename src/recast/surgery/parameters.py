"""The parameters of a model in groups, for any torch or timm optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from timm.models import group_parameters
from timm.models.mlp_mixer import Affine
from torch import nn

from recast.config import NotNegative, Positive, typed
from recast.errors import RecastError
from recast.layers.attention_conv import AttentionConv2d
from recast.layers.attention_pool import attention_pools
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import RecastLayer, recast_layers
from recast.layers.gpsa import GPSA
from recast.surgery.plan import Plan
from recast.surgery.wake import warn_if_frozen
from recast.tracing.examples import check_not_lazy

LINEAR_GATE_LR_RATIO = 50.0
SIGMOID_GATE_LR = 0.1
QK_WIDTH = 64
"""Channels up to which W_qry and W_key of attention beside a convolution, or after a block, take the rate of others."""
KINDS = ("decay", "no_decay", "queries_keys", "gates", "sigmoid_gates", "pool_decay", "pool_no_decay")
"""Names of the groups, in their order."""
DECAYED = ("decay", "queries_keys", "pool_decay")
GATES_OF = {"beside": ("gates",), "linear": ("gates",), "sigmoid": ("sigmoid_gates",), "bias": ()}
"""The groups that the gates of a `RecastConfig.gate` are in."""


@typed("model", "lr", "gate_lr", "weight_decay", "layer_decay", "plan", "pool_lr", "qk_lr")
def param_groups(
    model: nn.Module,
    lr: NotNegative = 1e-4,
    gate_lr: NotNegative | None = None,
    weight_decay: NotNegative = 0.05,
    layer_decay: Positive | None = None,
    plan: Plan | None = None,
    pool_lr: NotNegative | None = None,
    qk_lr: NotNegative | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch or timm optimiser, named by `KINDS`.

    Weight decay applies to weights, but not to biases, norms, α, Δ, W_val, gates, C-MHSA's relative bias and parameters
    that `no_weight_decay()` of the network or a submodule names (timm: positions, class tokens). Frozen parameters are
    skipped.

    Args:
        model: any network, recast or not.
        lr: rate of all parameters without a rate of their own.
        gate_lr: rate of the gates. Default: 50 × `lr` for γ and s, 0.1 for the sigmoid's λ (d'Ascoli et al. 2021).
        weight_decay: decay of the weights.
        layer_decay: multiply every rate by layer_decay^d, d = the number of layers between a parameter and the head
            (BEiT, Bao et al. 2021, appendix). Layers are those of timm's `group_matcher`. Names then end in "/" and the
            number of the layer (0: the stem).
        plan: the plan of a later `recast_during_training_`. The groups of its layers exist from the start, empty at
            first, because torch's schedulers count groups when they are made.
        pool_lr: rate of attention pooling, in groups "pool_decay" and "pool_no_decay". Default: as other weights.
        qk_lr: rate of W_qry and W_key, in a group "queries_keys". Default: as other weights, but 64 / C of it where
            attention beside a convolution or after a block reads C > 64 channels (`queries_keys_ratio`).

    Returns:
        Dictionaries with "name", "params", "lr" and "weight_decay".

    Raises:
        RecastError: for layer decay in a network without `group_matcher`, and a negative or infinite rate.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> model = recast.recast_(model, recast.plan(model, torch.randn(1, 3, 8, 8)))
        >>> [(group["name"], group["lr"]) for group in recast.param_groups(model, lr=0.1)]
        [('decay', 0.1), ('no_decay', 0.1), ('gates', 5.0)]
    """
    warn_if_frozen(recast_layers(model).values())
    check_not_lazy(model)
    widths = [step.input[0] for step in plan.steps] if plan is not None and plan.config.gate == "beside" else []
    ratio = queries_keys_ratio(model, *widths)
    qk_lr = lr * ratio if qk_lr is None and ratio < 1 else qk_lr
    rates = _rates(lr, gate_lr, pool_lr, qk_lr)
    kinds = parameter_kinds(model, queries_apart=qk_lr is not None, pools_apart=pool_lr is not None)
    layers = {} if layer_decay is None else layer_numbers(model)
    head = max(layers.values(), default=0)

    groups: dict[tuple[str, int], list[nn.Parameter]] = {}
    if plan is not None:
        future = ("decay", "no_decay", *GATES_OF[plan.config.gate], *(() if qk_lr is None else ("queries_keys",)))
        groups |= {(kind, layer_of(step.name, layers, head)): [] for step in plan.steps for kind in future}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            groups.setdefault((kinds[id(parameter)], layers.get(name, head)), []).append(parameter)
    return [
        {
            "name": kind if layer_decay is None else f"{kind}/{layer}",
            "params": groups[kind, layer],
            "lr": rates[kind] if layer_decay is None else rates[kind] * layer_decay ** (head - layer),
            "weight_decay": weight_decay if kind in DECAYED else 0.0,
        }
        for kind, layer in sorted(groups, key=lambda group: (KINDS.index(group[0]), group[1]))
    ]


def queries_keys_ratio(model: nn.Module, *widths: int) -> float:
    """Return the default rate of W_qry and W_key over that of other weights: 64 / C, at most 1.

    One update of Adam moves every weight by about the rate, so that a logit over C channels can move C times as far. On
    EfficientNet-Lite0's 320 channels attention learns better so (results/queries_keys.csv). μP has the same rule for
    hidden weights (Yang et al. 2022, arXiv:2203.03466, Table 3).

    Args:
        model: a network; the widest of its layers beside convolutions or after blocks decides for all.
        widths: channels of layers that will be added.
    """
    own = (layer.in_channels for layer in recast_layers(model).values() if isinstance(layer, AttentionBeside))
    return min(1.0, QK_WIDTH / max((*own, *widths), default=QK_WIDTH))


def _rates(lr: float, gate_lr: float | None, pool_lr: float | None, qk_lr: float | None) -> dict[str, float]:
    """Return the rate of every kind of parameter; a kind without a rate of its own takes `lr`."""
    own_rates = {
        "gates": lr * LINEAR_GATE_LR_RATIO if gate_lr is None else gate_lr,
        "sigmoid_gates": SIGMOID_GATE_LR if gate_lr is None else gate_lr,
        "queries_keys": qk_lr,
        "pool_decay": pool_lr,
        "pool_no_decay": pool_lr,
    }
    return dict.fromkeys(KINDS, lr) | {kind: rate for kind, rate in own_rates.items() if rate is not None}


def layer_of(module: str, layers: dict[str, int], default: int) -> int:
    """Return the number of the layer that the parameters of a module are in."""
    return next((number for name, number in layers.items() if name.startswith(f"{module}.")), default)


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of every parameter's layer, as timm groups them: 0 for the stem, the largest for the head."""
    matcher = getattr(model, "group_matcher", None)
    if not callable(matcher):
        raise RecastError(
            f"layer_decay requires timm's group_matcher, which {type(model).__name__} does not have: drop layer_decay"
        )
    return dict(group_parameters(model, matcher(coarse=False), reverse=True))


def parameter_kinds(model: nn.Module, *, queries_apart: bool, pools_apart: bool = False) -> dict[int, str]:
    """Return the kind (`KINDS`) of every parameter by id.

    W_qry and W_key are of the kind queries_keys if `queries_apart`, attention pooling of pool_decay and pool_no_decay
    if `pools_apart`; otherwise both count as other parameters.
    """
    kinds: dict[int, str] = {}
    undecayed: list[str] = []  # names and globs that a network, or one inside it, asks for
    beside: dict[str, str] = {}  # parameters of convolutions that attention is beside, by the names that they had
    for name, module in model.named_modules():
        kinds |= {id(p): kind for p, kind in _exceptions(module, queries_apart)}
        if isinstance(module, AttentionBeside):
            of_layer = f"{name}." if name else ""
            beside |= {f"{of_layer}conv.{key}": f"{of_layer}{key}" for key, _ in module.conv.named_parameters()}
        patterns = getattr(module, "no_weight_decay", None)
        if callable(patterns):
            undecayed += [f"{name}.{pattern}" if name else pattern for pattern in patterns()]
    for name, parameter in model.named_parameters():
        is_weight = parameter.dim() > 1 and name.rpartition(".")[2] != "bias"
        decays = is_weight and not any(fnmatchcase(beside.get(name, name), pattern) for pattern in undecayed)
        kinds.setdefault(id(parameter), "decay" if decays else "no_decay")
    if pools_apart:
        pooling = {id(p) for pool in attention_pools(model).values() for p in pool.parameters()}
        kinds |= {key: f"pool_{kinds[key]}" for key in pooling}
    return kinds


def _exceptions(module: nn.Module, queries_apart: bool) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the parameters of a module whose kind does not follow from their number of axes, with that kind."""
    if isinstance(module, AttentionConv2d):
        fixed = ("center", "raw_alpha", "value") if isinstance(module, GPSA) else ("relative_bias", "value")
        yield from ((p, "no_decay") for p in _named(module, *fixed))
    if isinstance(module, RecastLayer) and queries_apart:
        yield from ((p, "queries_keys") for p in _named(module, "query", "key"))
    if isinstance(module, AttentionBeside):
        yield from ((p, "gates") for p in _named(module, "gamma"))
    elif isinstance(module, GPSA):
        is_linear = module.config.gate == "linear"
        gates = ("gamma", "spread") if is_linear else ("lam",)
        yield from ((p, "gates" if is_linear else "sigmoid_gates") for p in _named(module, *gates))
    elif isinstance(module, Affine):  # ResMLP's norm: timm writes its vectors as (1, 1, C)
        yield from ((p, "no_decay") for p in module.parameters())


def _named(layer: nn.Module, *names: str) -> Iterator[nn.Parameter]:
    """Yield a layer's own parameters of these names, also those that a parametrisation computes them from."""
    for name, parameter in layer.named_parameters():
        if name.removeprefix("parametrizations.").partition(".")[0] in names:
            yield parameter
