"""Passes through a network that leave nothing behind: hooks, buffers, random state and precision as they were.

Every hook of the package goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recast.names import modules_by_name

Before = Callable[[str, nn.Module, tuple[Any, ...]], object]
"""(name, module, inputs): called before a forward pass of the module; inputs passed by name come last."""
After = Callable[[str, nn.Module, tuple[Any, ...], Any], Any]
"""(name, module, inputs, output): called after it; what it returns, unless None, takes the output's place."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore buffers that follow the data in eval mode too, and torch's random state: two passes draw the same."""
    buffers = [(held, dict(held)) for module in model.modules() if isinstance(held := module._buffers, dict)]
    values = [(b, b.clone()) for b in model.buffers() if b.layout is torch.strided and not b.is_nested]  # comparable
    cuda = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(cuda)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                if not value.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for held, original in buffers:
            held.update(original)


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch TF32 off: with it, equal functions differ by 1e-3 on recent GPUs."""
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
def hooked(
    modules: Iterable[tuple[str, nn.Module]], before: Before | None = None, after: After | None = None
) -> Iterator[None]:
    """Call `before` and `after` around every forward pass of the modules, (name, module) each, inside the block."""

    def hook(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(module: nn.Module, inputs: Any, named: dict[str, Any], *output: Any) -> Any:
            result = call(name, module, (*inputs, *named.values()), *output)
            return result if output else None  # what `before` returns takes no input's place

        return called

    with ExitStack() as stack:
        for name, module in modules:
            if before is not None:
                stack.enter_context(module.register_forward_pre_hook(hook(before, name), with_kwargs=True))
            if after is not None:
                stack.enter_context(module.register_forward_hook(hook(after, name), with_kwargs=True))
        yield


def named(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules of these names, each once, in the network's order."""
    wanted = set(names)
    return [(name, module) for name, module in modules_by_name(model).items() if name in wanted]


@contextmanager
def captured_inputs(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the first input of every call, cloned: `with captured_inputs(named(model, names)) as seen: model(x)`."""
    inputs_of: dict[str, list[Tensor]] = {}
    with hooked(modules, before=lambda name, _module, inputs: inputs_of.setdefault(name, []).append(inputs[0].clone())):
        yield inputs_of


@contextmanager
def captured_outputs(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the output of every call, cloned: what follows may change it in place."""
    outputs_of: dict[str, list[Tensor]] = {}

    with hooked(
        modules, after=lambda name, _m, _inputs, output: outputs_of.setdefault(name, []).append(output.clone())
    ):
        yield outputs_of


@contextmanager
def replaced_output(module: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a module give `change(output)` instead of its output."""
    with hooked([("", module)], after=lambda _name, _module, _inputs, output: change(output)):
        yield


@contextmanager
def replaced_inputs(
    module: nn.Module, change: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
) -> Iterator[None]:
    """Call a module with `change(inputs, named inputs)` instead of its inputs; other hooks get the changed ones too."""
    with module.register_forward_pre_hook(lambda _module, *given: change(*given), with_kwargs=True, prepend=True):
        yield
