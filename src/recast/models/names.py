"""The names of models, told without importing torch: which are ours, what a name means, whether a registry has it.

`timm.create_model` knows our names as soon as timm and recast are imported, in either order (`watch_timm`).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from recast.errors import RecastError, shown, suggest

FORMS = "timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or pkg.module:function"
DETECTORS = ("maskrcnn", "fasterrcnn", "retinanet")
"""`maskrcnn:NAME` is torchvision's Mask R-CNN on the network NAME of timm."""
ON_TIMM = ("upernet", *DETECTORS)
REGISTRIES = ("timm", "torchvision", *ON_TIMM)
"""Whose names are known."""
OWN = (
    *(f"cifar_resnet{depth}{shortcut}" for depth in (20, 56) for shortcut in ("", "_a")),
    "digits_resnet",
    "scenes_fcn",
    "scenes_rcnn",
    *(f"cmhsa_vit_{kind}" for kind in ("3", "3_cifar", "3_pixel", "3_tiny", "5", "5_tiny")),
    *(
        f"patchconvnet_{size}{kind}"
        for size in ("s20", "s36", "s60", "s120", "b36", "b60", "b120", "l60", "l120")
        for kind in ("", "_bn", "_multi", "_average", "_linear_stem")
    ),
    *("cait_xs36", "cait_s48", "cait_m24", "resmlp_big_24_p16"),
    *(
        f"resmlp_12_{kind}"
        for kind in ("p14", "p8", "layer_norm", "class", "none", "mlp", "conv", "depthwise", "separable")
    ),
)
"""What `recast.models` registers with timm."""
IN_TIMM = "recast_hub"
"""timm's name for whatever `recast.push_to_hub` wrote."""


def split_name(name: str) -> tuple[str, str]:
    """`timm:resnet18` → ("timm", "resnet18"); `pkg.module:function` → ("function", the same name)."""
    prefix, colon, rest = name.partition(":")
    if not colon:
        return "timm", name
    if prefix in REGISTRIES:
        return prefix, rest
    if all(part.isidentifier() for part in prefix.split(".")) and rest.isidentifier():
        return "function", name
    raise RecastError(f"a model is named {FORMS}, got {shown(name)}")


def unknown_model(source: str, name: str, known: Iterable[str], torchvision: Iterable[str] = ()) -> RecastError:
    """What is told of a name that `source` does not know: the nearest that it knows, or that torchvision has it."""
    close = f" Did you mean torchvision:{name}?" if name in torchvision else suggest(name[:100], known)
    return RecastError(f"{source} has no model {shown(name)}.{close} A model is named {FORMS}")


def check_name(name: str, whose: str = "") -> None:
    """Raise RecastError, in the words of `recast.models.sources`, for a name that timm or torchvision has not; `whose`
    begins the message.

    Their sources are read, which takes a moment; importing them takes seconds.
    """
    source, bare = split_name(name)
    source = "timm" if source in ON_TIMM else source
    architecture = bare.partition(".")[0] if source == "timm" else bare
    if source == "function" or source in sys.modules or architecture in OWN:
        return
    texts = _sources(source)
    ways = f"def {architecture}(", f"'{architecture}'", f'"{architecture}"', f"'{architecture}."  # also older names
    if not texts or any(way in text for text in texts for way in ways):
        return
    own = OWN if source == "timm" else ()
    error = unknown_model(
        source, architecture, (*_registered(texts), *own), _registered(_sources("torchvision")) if own else ()
    )
    raise RecastError(f"{whose}{error}")


def no_subject(name: str, error: RecastError) -> RecastError:
    """What `explain` tells of a word that is no path and, by `error`, no model."""
    if ":" in name:
        return error
    return RecastError(f"{name} is no run folder (there is no such folder), and no model: {error}")


def _sources(package: str) -> list[str]:
    spec = find_spec(package)
    folder = Path(spec.origin).parent / "models" if spec is not None and spec.origin else Path()
    return [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))] if folder.name else []


def _registered(texts: Iterable[str]) -> list[str]:
    pattern = r"^@register_model(?:\(\))?\n(?:@.*\n)*?def (\w+)\("
    return sorted(name for text in texts for name in re.findall(pattern, text, re.MULTILINE))


def watch_timm() -> None:
    """Give timm our names: now if it is imported, else as soon as it is."""
    if "timm" in sys.modules:
        _give_names()
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


class _TimmFinder:
    """Finds timm where the other finders do, and gives it our names once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "timm":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if module.__name__ == name:
                    _give_names()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _give_names() -> None:
    """Register functions that import `recast.models`, which puts the real ones in their place, and that of the Hub."""
    models = importlib.import_module("timm.models")
    models.register_model(recast_hub)
    if "recast.models" in sys.modules:
        return
    for name in OWN:
        models.register_model(_entrypoint(name, models))


def recast_hub(pretrained: bool = False, **kwargs: Any) -> Any:
    """A network that `recast.push_to_hub` wrote: timm.create_model("hf-hub:user/name", pretrained=True)."""
    return importlib.import_module("recast.hub").from_timm(pretrained, **kwargs)


def _entrypoint(name: str, models: Any) -> Callable[..., Any]:
    def entrypoint(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("recast.models")
        return models.model_entrypoint(name)(*args, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    return entrypoint
