"""Digest of what decides a model's outputs: tensors, settings and code, so that results are of this model alone."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast import __version__
from recast.models.checksum import checksum

BY_VERSION = frozenset({"torch", "torchvision", "timm", "numpy", "recast", *sys.stdlib_module_names})
"""Packages whose version stands for their code."""
IGNORED = {"training", "__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__qualname__"}
"""Attributes that change no output in eval mode."""
DEEPEST = 60
"""Levels of attributes that are read."""


def model_key(model: nn.Module) -> str:
    """Return a SHA-256 of everything that decides a model's outputs in eval mode.

    It covers structure, parameters, buffers (saved or not), other tensors and settings, hooks, and the code of the
    model's classes with the functions and constants they use. Code of packages in BY_VERSION counts by version.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = model_key(layer)
        >>> layer.scale = torch.ones(2)
        >>> model_key(layer) == before
        False
    """
    digest = _Digest()
    digest.add(__version__)
    digest.add(model.state_dict())
    digest.add(model)
    return digest.sha.hexdigest()


class _Digest:
    """SHA-256 of a graph of Python objects; an object that comes again counts by its number."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.objects: list[object] = []  # an id is given out again after its object is deleted

    def add(self, value: Any, depth: int = 0) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | range):
            return self._write(value)
        if (number := self.numbers.get(id(value))) is not None:
            return self._write("again", number)
        self.numbers[id(value)] = len(self.numbers)
        self.objects.append(value)
        kind = type(value)
        self._write(kind.__module__, kind.__qualname__, getattr(value, "__qualname__", ""))
        if depth > DEEPEST:
            return
        add: Callable[[Any], None] = lambda part: self.add(part, depth + 1)  # noqa: E731
        if isinstance(value, Tensor):
            self._write(checksum({"": _dense(value)}))
        elif isinstance(value, np.ndarray):
            self._write(value.dtype, value.shape, value.tobytes() if value.dtype.kind in "biufc" else value.tolist())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._write(key if isinstance(key, str | int) else type(key))
                add(item)
        elif isinstance(value, Set):
            self._write(*sorted(map(_name_or_type, value)))
        elif isinstance(value, Sequence):
            for item in value:
                add(item)
        elif isinstance(value, partial):
            add((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            add((value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            add(value.__func__)
        elif isinstance(value, property):
            add((value.fget, value.fset))
        elif isinstance(value, CodeType):
            self._write(value.co_code, value.co_names)
            add(value.co_consts)
        elif isinstance(value, FunctionType):
            self._add_function(value, add)
        elif isinstance(value, type):
            self._add_class(value, add)
        elif isinstance(value, nn.Module):
            self._add_module(getattr(value, "_orig_mod", value), add)  # the compiler's own state differs by process
        elif not _is_by_version(kind):
            add(kind)
            add(_attributes(value))
        elif " at 0x" not in (text := repr(value)):  # a torch.dtype, a path
            self._write(text)

    def _write(self, *parts: object) -> None:
        self.sha.update(repr(parts).encode("utf-8", "backslashreplace"))

    def _add_module(self, module: nn.Module, add: Callable[[Any], None]) -> None:
        add(type(module))
        self._write(module.extra_repr())
        if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
            self._write(str(getattr(module, "code", "")))
        held = _attributes(module)
        hooks = [list(held.pop(name, {}).values()) for name in sorted(held) if name.endswith("_hooks")]
        parts = dict(module.named_children())
        for name in ("_parameters", "_modules"):  # parameters are in the state
            held.pop(name, None)
        add([held, hooks, parts])

    def _add_class(self, kind: type, add: Callable[[Any], None]) -> None:
        self._write(kind.__module__, kind.__qualname__)
        if _is_by_version(kind):
            return self._write(getattr(sys.modules.get(kind.__module__.partition(".")[0]), "__version__", ""))
        add(_attributes(kind))
        add(kind.__bases__)

    def _add_function(self, function: FunctionType, add: Callable[[Any], None]) -> None:
        self._write(function.__name__)
        if _is_by_version(function):
            return
        add([function.__code__, function.__defaults__, function.__kwdefaults__])
        add([_content(cell) for cell in function.__closure__ or ()])
        if "site-packages" in function.__code__.co_filename:  # the rest of an installed package does not change
            return
        for name in _names_in(function.__code__):
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                if not _is_by_version(value):
                    add({inner: vars(value)[inner] for inner in _names_in(function.__code__) if inner in vars(value)})
            else:
                add(value)


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, by name, without those that change no output."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))
    return {name: held[name] for name in sorted(held) if name not in IGNORED and not name.startswith("__anno")}


def _is_by_version(value: Any) -> bool:
    """Return True for a class, function or module of the packages BY_VERSION, or of compiled code."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or "builtins"
    return name.partition(".")[0] in BY_VERSION


def _names_in(code: CodeType) -> list[str]:
    """Return the global names and attributes that code uses, with those of the functions inside it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names_in(const)]
    return sorted({*code.co_names, *inner})


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _name_or_type(value: object) -> str:
    return repr(value) if isinstance(value, bool | int | float | str | bytes | None) else str(type(value))


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose bytes can be read."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
