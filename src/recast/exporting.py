"""`export`: a model as an ONNX file or an exported program of torch, run again and compared with the module."""

from __future__ import annotations

import hashlib
import os
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from recast.errors import RecastError, first_line
from recast.fields import typed
from recast.files import check_place, free_space, replaced
from recast.surgery.apply import refresh_gates_
from recast.surgery.exactness import relative_error
from recast.surgery.plan import plan_of
from recast.surgery.proof import note_, proof_of
from recast.tracing.examples import (
    Example,
    arguments_of,
    batch_of,
    check_values,
    images_of,
    part_of,
    run_example,
)
from recast.tracing.hooks import in_eval
from recast.tracing.outputs import tensors_of
from recast.tracing.timing import time_models

Target = Literal["onnx", "torch"]
SUFFIX: dict[Target, str] = {"onnx": ".onnx", "torch": ".pt2"}
MARK, EDGE = "written-by-recast", 2**16
"""In the files that we write, within so many bytes of an end."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE, ROUNDINGS = 1e-4, 10
BATCHES = (1, 3)
SECONDS = 0.5
"""For timing each arm."""

Program = Callable[[Example], list[Tensor]]


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


@typed("model", "path", "to", "parent", "tol")
def export(
    model: nn.Module, example: Example, path: str | Path, to: Target | None = None, *, parent: nn.Module | None = None,
    tol: float | None = None,
) -> Exported:  # fmt: skip
    """Write `model` in eval mode to `path`, run the file and compare it with the module; returns what was found.

    `to`: "onnx" (.onnx, run by ONNX Runtime) or "torch" (.pt2, a `torch.export` program); by default what the suffix
    says. `example` is a batch of images, or other arguments as `plan` takes them, but no list: tensors with a row for
    each image follow the batch. The file takes any batch, and any height and width if the model itself runs on images
    of another size. It is compared on 1 and 3 images at the example's size and, where it is free, another one.
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
    check_values(example, model)
    if images_of(example).dim() != 4 or isinstance(example, list):
        got = "a list" if isinstance(example, list) else tuple(images_of(example).shape)
        raise RecastError(f"the example is a batch of images (batch, channels, height, width), got {got}")
    check_place(path, "path", f"model{path.suffix}")
    refresh_gates_(model)
    sizes = [tuple(images_of(example).shape[-2:])]
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
        arms: dict[str, Callable[[Tensor], object]] = {"file": lambda _: program(example)}
        for name, network in {"module": model, "parent": parent}.items():
            if network is not None:
                arms[name] = partial(_call, network, example)
        with nullcontext() if parent is None else in_eval(parent):
            times = time_models(arms, images_of(example), SECONDS)
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


def _call(network: nn.Module, example: Example, _images: Tensor) -> Any:
    args, kwargs = arguments_of(example)
    return network(*args, **kwargs)


def _images(example: Example, batch: int, size: tuple[int, ...]) -> Example:
    """`batch` images of the example, again and again, at another size."""
    before = images_of(example).shape[-2:]
    some = part_of(example, torch.arange(batch) % batch_of(example))
    if size == before:
        return some

    def resized(x: Tensor) -> Tensor:
        is_image = x.dim() == 4 and x.shape[-2:] == before
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False) if is_image else x

    found: Example = tree_map_only(Tensor, resized, some)
    return found


def _free(example: Example, any_size: bool) -> Any:
    """Which axes of the arguments are free, as `torch.export` takes it: by name, or in their order."""
    count, size = batch_of(example), images_of(example).shape[-2:]

    def axes(x: Any) -> dict[int, Any] | None:
        if not isinstance(x, Tensor):
            return None
        follows = [0] * (x.dim() > 0 and len(x) == count)
        follows += [2, 3] * (any_size and x.dim() == 4 and x.shape[-2:] == size)
        return dict.fromkeys(follows, torch.export.Dim.DYNAMIC)

    args, kwargs = arguments_of(example)
    return tree_map(axes, kwargs or args)


def _write(model: nn.Module, images: Example, path: Path, to: Target, any_size: bool) -> bool:
    """Write the program; returns whether height and width are free. Torch may know why they cannot be."""
    args, kwargs = arguments_of(images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for is_free in (True, False) if any_size else (False,):
            try:
                with redirect_stderr(StringIO()):  # of a failure torch writes the whole graph
                    program = torch.export.export(model, args, kwargs, dynamic_shapes=_free(images, is_free))
                break
            except Exception as error:  # whatever a model's code does with symbols
                if not is_free:
                    raise RecastError(f"torch cannot export {type(model).__name__}: {first_line(error)}") from error
        content = BytesIO()  # not the file itself: torch aborts the process where the disk is full
        if to == "torch":
            torch.export.save(program, content, extra_files={MARK: ""})
        else:
            with redirect_stdout(StringIO()):  # the exporter tells its steps
                exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
            exported.model.producer_name = MARK
            content.write(exported.model_proto.SerializeToString())
    try:
        path.write_bytes(content.getbuffer())
    except OSError as error:
        raise RecastError(f"cannot write {path.parent}: {error.strerror}; {free_space(path.parent)} are free") from None
    return is_free


def is_export(path: Path) -> bool:
    """True for a file that `export` wrote: ONNX names its producer at the head, a .pt2 lists its parts at the end."""
    with path.open("rb") as file:
        head = file.read(EDGE)
        file.seek(-min(EDGE, path.stat().st_size), os.SEEK_END)
        return MARK.encode() in head + file.read()


def open_program(path: Path, to: Target) -> Program:
    """The file as a function of an example."""
    if to == "torch":
        with path.open("rb") as file:
            module = torch.export.load(file).module()
        return lambda example: tensors_of(_call(module, example, images_of(example)))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its own kinds: a dtype of which it has no convolution
        raise RecastError(f"ONNX Runtime does not run it (export in float32?): {first_line(error)}") from error
    names = [entry.name for entry in session.get_inputs()]

    def run(example: Example) -> list[Tensor]:
        args, kwargs = arguments_of(example)
        given = kwargs if set(names) <= kwargs.keys() else dict(zip(names, tensors_of([args, kwargs]), strict=False))
        return [torch.from_numpy(y) for y in session.run(None, {name: given[name].cpu().numpy() for name in names})]

    return run


def compare(model: nn.Module, program: Program, example: Example, tol: float | None = None) -> ExportCheck:
    """Compare on one batch. Raises `RecastError` where the file is further than `tol` from the module."""
    images = images_of(example)
    batch, _, height, width = images.shape
    at = f"on {batch} images of {height}×{width}"
    expected = [t.cpu() for t in tensors_of(run_example(model, example))]
    try:
        found = program(example)
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
