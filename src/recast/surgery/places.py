"""Attention after a block: beside a module that changes nothing, at the end of an `nn.Sequential`.

    y = Z + γ ⊙ (C Z W_con)      Z: the output of the sequence, which queries, keys and values are read from

It is a non-local block (Wang et al. 2018, arXiv:1711.07971) that starts closed: the same layer as beside a convolution,
which has a `PassThrough` in the convolution's place. Names and weights of the parent stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product

import torch
from timm.models.regnet import RegStage
from torch import Tensor, nn

from recast.errors import RecastError
from recast.names import modules_by_name
from recast.surgery.plan import plan_of
from recast.surgery.records import Step
from recast.tracing.examples import Example
from recast.tracing.observe import Observation, observe

NAME = "attention"
"""Name of the new layer in its sequence."""
SEQUENCES = (nn.Sequential, RegStage)  # they run their parts one after the other, also one that is added
NO_SEQUENCE = "in no nn.Sequential that holds its stage and gives a map of its size, which attention could follow"


class PassThrough(nn.Module):
    """y = x, as a 1×1 convolution would state it: what attention after a block is beside.

    Args:
        channels: C of x (B, C, H, W).
        like: a tensor of the block, for the dtype and device of attention.
    """

    kernel_size, stride, dilation = (1, 1), (1, 1), (1, 1)
    weight = None

    def __init__(self, channels: int, like: Tensor | None = None) -> None:
        super().__init__()
        self.in_channels = self.out_channels = channels
        self.register_buffer("like", torch.empty(0) if like is None else like.new_empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return f"{self.in_channels}"


def new_layers(
    model: nn.Module, example: Example, observed: Observation, names: Iterable[str]
) -> dict[str, tuple[str, int]]:
    """Return the new layer, and its channels, that follows each of the convolutions `names`, where there is a place.

    For the convolutions with outputs of one size, the place is the end of the innermost `nn.Sequential` around all of
    them whose output has that size; of those that end there, in the innermost: networks count the parts of a sequence.
    """
    modules = modules_by_name(model)
    sequences = {name for name, module in modules.items() if isinstance(module, SEQUENCES) and name}
    plain = {name: module for name, module in modules.items() if type(module).forward is nn.Sequential.forward}
    lasts = {name: f"{name}.{next(reversed(module._modules), '')}" for name, module in plain.items()}
    calls = observe(model, example, sequences, lambda _model: None).calls  # no edit: they keep their class
    outputs = {name: [call.output for call in calls.get(name, ())] for name in modules}
    sizes = {name: observed.calls[name][0].output[2:] for name in names}
    ends: dict[str, tuple[str, int]] = {}
    for size in dict.fromkeys(sizes.values()):
        stage = [name for name in sizes if sizes[name] == size]
        holding = (each for each in sequences if all(name.startswith(f"{each}.") for name in stage))
        for around in sorted(holding, key=len, reverse=True):
            while (last := lasts.get(around, "")) in lasts and outputs[last] == outputs[around]:
                around = last
            is_free = isinstance(modules.get(f"{around}.{NAME}"), PassThrough | None)
            if is_free and (shapes := outputs[around]) and all(len(s) == 4 and s[2:] == size for s in shapes):
                ends |= dict.fromkeys(stage, (f"{around}.{NAME}", shapes[0][1]))
                break
    return ends


def planned_places(steps: Iterable[Step]) -> dict[str, int]:
    """Return the new layers of a plan that follow a block, and the channels of their inputs."""
    return {step.name: step.input[0] for step in steps if step.is_after_block}


@contextmanager
def places(channels: Mapping[str, int], *models: nn.Module) -> Iterator[None]:
    """Put a `PassThrough` at the end of each sequence without attention; at the end, take out what was not recast.

    `channels`: name of the new layer → channels of its input. Models are networks, or modules around them. Raises
    `RecastError` if a model has no such sequence.
    """
    added: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for model, (name, count) in product(models, channels.items()):
            modules, around = modules_by_name(model), name.rpartition(".")[0]
            inside = [around] if around in modules else [n for n in modules if n.endswith(f".{around}")]
            if not inside or not all(isinstance(modules[n], SEQUENCES) for n in inside):
                raise RecastError(f"the plan is for another model: {type(model).__name__} has no sequence {around!r}")
            for sequence in (modules[n] for n in inside if NAME not in modules[n]._modules):
                like = next((p for p in sequence.parameters() if p.is_floating_point()), None)
                sequence.add_module(NAME, PassThrough(count, like).train(sequence.training))
                added.append((model, name, sequence))
        yield
    finally:
        for model, name, sequence in added:
            applied = plan_of(model)  # folded, attention is a `PassThrough` again, and stays
            is_step = applied is not None and any(step.name == name for step in applied.steps)
            if not is_step and isinstance(sequence._modules[NAME], PassThrough):
                del sequence._modules[NAME]
