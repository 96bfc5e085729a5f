"""`export`: a model as an ONNX file or an exported program of torch, run again and compared with the module."""

from __future__ import annotations

import hashlib
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recast.errors import RecastError, first_line
from recast.run.fields import typed
from recast.run.files import replaced
from recast.surgery.apply import refresh_gates_
from recast.surgery.exactness import relative_error
from recast.surgery.plan import plan_of
from recast.surgery.proof import note_, proof_of
from recast.tracing.hooks import in_eval
from recast.tracing.observe import run_example
from recast.tracing.timing import time_models

Target = Literal["onnx", "torch"]
SUFFIX: dict[Target, str] = {"onnx": ".onnx", "torch": ".pt2"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE, ROUNDINGS = 1e-4, 10
BATCHES = (1, 3)
SECONDS = 0.5
"""For timing each arm."""

Program = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class ExportCheck:
    """The file against the module, on one batch of images of one size."""

    batch: int
    height: int
    width: int
    error: float
    """Largest relative error of an output, max|a−b| / max|b|."""


@dataclass(frozen=True)
class Exported:
    """What was written, how far it is from the module, and how long a pass takes."""

    path: Path
    to: Target
    any_size: bool
    """Whether height and width are free; else they are the example's. The batch always is."""
    checks: tuple[ExportCheck, ...]
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Medians of passes on the example by turns: file, module and, where it was given, parent."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self) | {"path": str(self.path)}

    def __str__(self) -> str:
        lines = [f"{self.path}: any batch, {'any height and width' if self.any_size else 'images of this size only'}"]
        for c in self.checks:
            lines.append(f"  {c.batch} of {c.height}×{c.width}: relative error {c.error:.1e}")
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.milliseconds.items())
        return "\n".join([*lines, f"  a pass on the example: {times}"])


@typed("model", "example", "path", "to", "parent", "tol")
def export(
    model: nn.Module, example: Tensor, path: str | Path, to: Target | None = None, *, parent: nn.Module | None = None,
    tol: float | None = None,
) -> Exported:  # fmt: skip
    """Write `model` in eval mode to `path`, run the file and compare it with the module; returns what was found.

    `to`: "onnx" (.onnx, run by ONNX Runtime) or "torch" (.pt2, a `torch.export` program); by default what the suffix
    says. `example` is a batch of images. The file takes any batch, and any height and width if the model itself runs on
    images of another size. It is compared on 1 and 3 images at the example's size and, where it is free, another one.
    `parent` is timed beside them. What was found is noted on the model, for `save`.
    Fold the model first (`fold_`): closed heads are a plain convolution then.

    Raises `RecastError` for packages that are not installed, a model that torch cannot export, a dtype that
    ONNX Runtime does not run, and outputs further than `tol` (1e-4, or ten roundings of a coarser dtype) from the
    module's: the file is not left there then.
    """
    path = Path(path)
    if to is None:
        to = next((kind for kind, suffix in SUFFIX.items() if path.suffix == suffix), None)
    if to is None or path.suffix != SUFFIX.get(to):
        wanted = " or ".join(f"{kind} ({suffix})" for kind, suffix in SUFFIX.items())
        raise RecastError(f"export writes {wanted}, got {path.name}" + ("" if to is None else f" and to={to!r}"))
    if to == "onnx" and (missing := missing_packages()):
        raise RecastError(f"ONNX needs {', '.join(missing)}: pip install 'recast-vision[export]', or to='torch'")
    if example.dim() != 4:
        raise RecastError(f"the example is a batch of images (batch, channels, height, width), got {example.dim()}-d")
    refresh_gates_(model)
    sizes = [tuple(example.shape[-2:])]
    with in_eval(model), torch.no_grad(), replaced(path) as temporary:
        found = run_example(model, example)
        if isinstance(found, list) and any(isinstance(one, Mapping) for one in found):
            remedy = "export what it sees with, recast.export(model.backbone, images, 'backbone.onnx')"
            raise RecastError(f"{type(model).__name__} gives as many boxes as it finds, no exported file can: {remedy}")
        height, width = sizes[0]
        for other in ((height + 32, width + 64), (height // 2, 3 * width // 4)):
            try:
                run_example(model, _images(example, 1, other))
            except RecastError:
                continue  # too large for a table of biases, or a network of one size
            sizes.append(other)
            break
        for any_size in (True, False) if len(sizes) > 1 else (False,):
            any_size = _write(model, _images(example, 2, sizes[0]), temporary, to, any_size)
            program, asked = open_program(temporary, to), [(b, size) for size in sizes[: 1 + any_size] for b in BATCHES]
            try:
                checks = tuple(compare(model, program, _images(example, batch, size), tol) for batch, size in asked)
                break
            except RecastError:
                if not any_size:
                    raise  # else torch's program holds for some sizes only: of one size it may be right
        arms: dict[str, Callable[[Tensor], object]] = {"file": program, "module": model}
        arms |= {} if parent is None else {"parent": parent}
        with nullcontext() if parent is None else in_eval(parent):
            times = time_models(arms, example, SECONDS)
        ms = {name: round(1e3 * statistics.median(found), 3) for name, found in times.items()}
        exported = Exported(path, to, any_size, checks, ms)
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
    if plan_of(model) is not None:
        proof = proof_of(model)
        told = exported.to_dict() | {"path": path.name, "sha256": digest}
        note_(model, replace(proof, exported=(proof.exported or {}) | {path.name: told}))
    return exported


def missing_packages() -> list[str]:
    """What ONNX needs and is not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def _images(example: Tensor, batch: int, size: tuple[int, ...]) -> Tensor:
    """`batch` images of the example, again and again, at another size."""
    some = example[torch.arange(batch) % len(example)]
    if size == example.shape[-2:]:
        return some
    return F.interpolate(some, size=size, mode="bilinear", align_corners=False)


def _write(model: nn.Module, images: Tensor, path: Path, to: Target, any_size: bool) -> bool:
    """Write the program; returns whether height and width are free. Torch may know why they cannot be."""
    free = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for axes in ([0, 2, 3], [0]) if any_size else ([0],):
            try:
                with redirect_stderr(StringIO()):  # of a failure torch writes the whole graph
                    program = torch.export.export(model, (images,), dynamic_shapes=({axis: free for axis in axes},))
                break
            except Exception as error:  # whatever a model's code does with symbols
                if axes == [0]:
                    raise RecastError(f"torch cannot export {type(model).__name__}: {first_line(error)}") from error
        if to == "torch":
            with path.open("wb") as file:  # a name that does not end in .pt2 would be warned of
                torch.export.save(program, file)
        else:
            with redirect_stdout(StringIO()):  # the exporter tells its steps
                torch.onnx.export(program, (), path, dynamo=True, verbose=False, external_data=False)
    return len(axes) > 1


def open_program(path: Path, to: Target) -> Program:
    """The file as a function of images."""
    if to == "torch":
        with path.open("rb") as file:
            module = torch.export.load(file).module()
        return lambda x: [t for t in tree_leaves(module(x)) if isinstance(t, Tensor)]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its own kinds: a dtype of which it has no convolution
        raise RecastError(f"ONNX Runtime does not run it (export in float32?): {first_line(error)}") from error
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(found) for found in session.run(None, {name: x.cpu().numpy()})]


def compare(model: nn.Module, program: Program, images: Tensor, tol: float | None = None) -> ExportCheck:
    """Compare on one batch. Raises `RecastError` where the file is further than `tol` from the module."""
    batch, _, height, width = images.shape
    at = f"on {batch} images of {height}×{width}"
    expected = [t.cpu() for t in tree_leaves(model(images)) if isinstance(t, Tensor)]
    try:
        found = program(images)
    except Exception as error:  # of another runtime
        raise RecastError(f"the exported file does not run {at}: {first_line(error)}") from error
    if len(found) != len(expected):
        raise RecastError(f"the exported file has {len(found)} outputs {at}, the module {len(expected)}")
    errors = [relative_error(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    tol = max(TOLERANCE, ROUNDINGS * torch.finfo(images.dtype).eps) if tol is None else tol
    if not errors[worst] <= tol:
        raise RecastError(
            f"the exported file is not the module: output {worst} parts by {errors[worst]:.1e} {at}, allowed is {tol:g}"
        )
    return ExportCheck(batch, height, width, errors[worst])
