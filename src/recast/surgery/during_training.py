"""`recast_during_training_`: convolutions become attention during training, with the same optimiser.

A kernel and W_out are the same numbers, so the kernel's state in the optimiser (momentum, moments, number of steps)
becomes that of W_out. New parameters (queries, keys, positions, gates) start without a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from recast.config import typed
from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.names import modules_by_name
from recast.surgery.apply import check_recast, recast_
from recast.surgery.optimizer_groups import Group, add_parameter_, find_kernel_group
from recast.surgery.optimizer_state import carried_parameters, forget_, hand_over_
from recast.surgery.parameters import LINEAR_GATE_LR_RATIO, parameter_kinds, queries_keys_ratio
from recast.surgery.places import places, planned_places
from recast.surgery.plan import Plan
from recast.surgery.wrappers import changeable


@typed("model", "plan", "optimizer", "steps", "gate_lr", "qk_lr")
def recast_during_training_(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    steps: Sequence[str] | None = None,
    *,
    averages: Iterable[nn.Module] = (),
    gate_lr: float | None = None,
    qk_lr: float | None = None,
) -> nn.Module:
    """Recast steps of a plan in a network that `optimizer` is training, in place.

    The optimiser stays the same object. Beside attention a convolution keeps its parameters, and their state. With the
    papers' gates W_out and the bias replace the kernel and the bias in its groups, and their state is permuted in the
    same way: with the initial linear gate the next update is the convolution's. New parameters join the groups that
    `param_groups` would give them ("decay", "no_decay", "gates", by name) at these groups' current rate; in an
    optimiser with other groups, the kernel's group or a new one with its settings; if groups count their steps (LAMB),
    a group of their own. Nothing else changes.

    A model in torch.compile is recast inside it and compiled again at its next call. For DistributedDataParallel pass
    the `.module`, and wrap it again. If W_out has another layout, factored moments (Adafactor) are reset.

    Args:
        model: the network in training.
        optimizer: the optimiser that trains it.
        plan: a plan of this network (`plan`).
        steps: names of the steps to take. Default: all.
        averages: running averages of the weights (timm's `ModelEmaV3.module`, torch's AveragedModel). They are also
            recast, with their own kernels; new parameters start from the model's.
        gate_lr: peak rate of the gates. Default: 50 × the kernel's for γ and s; the kernel's for λ, as in T-CNN*, "the
            same optimizer and learning rate" (d'Ascoli et al. 2021, Sec. 5).
        qk_lr: peak rate of queries and keys. Default: the kernel's, or less in a wide layer, as in `param_groups`.

    Returns:
        The model.

    Raises:
        RecastError: before any change, as `recast_` does, and for a wrapped model or an optimiser that cannot take over
            the layer's parameters.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> plan = recast.plan(model, torch.randn(1, 3, 8, 8))
        >>> model = recast.recast_during_training_(model, optimizer, plan)
        >>> [group["name"] for group in optimizer.param_groups if "name" in group]
        ['gates']
    """
    network, copies = changeable(model), [changeable(average) for average in averages]
    optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead keeps its state in there
    chosen = plan if steps is None else plan.only(steps)
    names = [step.name for step in chosen.steps]
    if not names:
        return model
    _check_network(network, plan, names)
    with places(planned_places(chosen.steps), network, *copies):
        for average in copies:  # `recast_` checks the network itself before its first change
            check_recast(average, plan, chosen)
        convolutions = {name: module for name, module in modules_by_name(network).items() if name in names}
        groups = {name: find_kernel_group(optimizer, network, name, conv) for name, conv in convolutions.items()}

        recast_(network, plan, steps=names)
        rates = {"gates": gate_lr, "sigmoid_gates": gate_lr, "queries_keys": qk_lr}
        added: dict[str, nn.Parameter] = {}
        layers = modules_by_name(network)
        for name in names:
            added |= _train_on_(optimizer, name, convolutions[name], layers[name], groups[name], rates)
        for average in copies:
            recast_(average, plan, steps=names)
            for name, parameter in added.items():
                average.get_parameter(name).detach().copy_(parameter.detach())
    return model


def _train_on_(
    optimizer: Optimizer,
    name: str,
    convolution: nn.Module,
    layer: nn.Module,
    kernel_group: Group,
    rates: dict[str, float | None],
) -> dict[str, nn.Parameter]:
    """Give a layer its convolution's place and state in the optimiser; group and return its new parameters by name."""
    carried = carried_parameters(convolution, layer)
    hand_over_(optimizer, carried)
    forget_(optimizer, name, convolution, carried)
    inherited = {id(pair.new) for pair in carried}
    added = {key: parameter for key, parameter in layer.named_parameters(name) if id(parameter) not in inherited}
    ratios = {"gates": LINEAR_GATE_LR_RATIO, "queries_keys": queries_keys_ratio(layer)}
    kinds = parameter_kinds(layer, queries_apart=rates["queries_keys"] is not None or ratios["queries_keys"] < 1)
    for key, parameter in added.items():
        if parameter.requires_grad:
            kind = kinds[id(parameter)]
            add_parameter_(optimizer, key, parameter, kind, kernel_group, rates.get(kind), ratios.get(kind, 1.0))
    return added


def _check_network(network: nn.Module, plan: Plan, names: Sequence[str]) -> None:
    """Raise `RecastError` for a plan with pooling that the network does not have, and for a single convolution."""
    if plan.pool is not None and not attention_pools(network):
        raise RecastError(
            "the network lacks the plan's attention pooling: call attention_pool_(model, config=plan.pool) before the "
            "optimiser is made"
        )
    if "" in names:
        raise RecastError("the model itself is the convolution: put it into a module to recast it during training")
