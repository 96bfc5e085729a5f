"""`export`: write a model as an ONNX file or a program of torch.export, run it and compare it with the module."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from recast.config import typed
from recast.errors import RecastError, first_line
from recast.files import check_place, free_space, replaced
from recast.modes import in_eval
from recast.surgery.compare import relative_error
from recast.surgery.rules import pads_same
from recast.surgery.wrappers import whole
from recast.tracing.examples import (
    Example,
    arguments_of,
    batch_of,
    check_values,
    copied,
    images_of,
    part_of,
    run_example,
)
from recast.tracing.outputs import tensors_of

Target = Literal["onnx", "torch"]
SUFFIX: dict[Target, str] = {"onnx": ".onnx", "torch": ".pt2"}
MARK, EDGE = "written-by-recast", 2**16
"""Mark of exported files, and the bytes at either end of a file that may hold it."""
SYMBOL = re.compile(r"\b[a-z_]+\d+\b")
"""A free axis in ONNX, as torch names it."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE, ROUNDINGS = 1e-4, 10
BATCHES = (1, 3)
MOST_SAME = 2
"""Strided SAME convolutions up to which sizes are free by default. Each writes rounded quotients into all sizes after
it, and torch takes three times as long to follow them (findings/export_same_padding.sh)."""
MOST_ONNX = 2**31 - 1
"""Bytes of an ONNX file: protobuf writes no larger message."""

Program = Callable[[Example], list[Tensor]]


@dataclass(frozen=True)
class ExportCheck:
    """Comparison of the file with the module on one batch of images of one size."""

    batch: int
    height: int
    width: int
    error: float
    """Largest relative error of an output, max|a−b| / max|b|."""


@dataclass(frozen=True)
class Exported:
    """The exported file and its error against the module."""

    path: Path
    to: Target
    any_size: bool
    """Height and width are free; else they are the example's. The batch is always free."""
    checks: tuple[ExportCheck, ...]
    note: str = ""
    """Why sizes are not free though the network takes others."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields."""
        return asdict(self) | {"path": str(self.path)}

    def __str__(self) -> str:
        why = f" ({self.note})" if self.note else ""
        sizes = "any height and width" if self.any_size else f"images of this size only{why}"
        lines = [f"{self.path}: any batch, {sizes}"]
        for c in self.checks:
            lines.append(f"  {c.batch} of {c.height}×{c.width}: relative error {c.error:.1e}")
        return "\n".join(lines)


@typed("model", "path", "tol", "any_size")
def export(
    model: nn.Module, example: Example, path: str | Path, *, tol: float | None = None, any_size: bool | None = None
) -> Exported:
    """Export `model` in eval mode to `path`, run the file and compare it with the module.

    Fold the model first (`fold_`): closed heads become plain convolutions. The file takes any batch, and any height and
    width if the model itself runs on images of another size. It is compared on 1 and 3 images at the example's size
    and, if sizes are free, at another one.

    Args:
        model: any network; recast layers keep their attention.
        example: images (B, C, H, W), or other arguments as `plan` takes them, but no list. Tensors with a row for each
            image follow the batch.
        path: the file to write, .onnx (run by ONNX Runtime) or .pt2 (a `torch.export` program).
        tol: largest relative error of an output. Default: 1e-4, or ten roundings of a coarser dtype.
        any_size: False writes the example's height and width only, True free ones even where that takes torch many
            minutes: with more than two strided convolutions of TensorFlow's SAME padding. Default: free except there.

    Returns:
        `Exported`: the errors on each batch.

    Raises:
        RecastError: for missing packages, a model that torch cannot export, weights over 2 GiB in ONNX, a dtype that
            ONNX Runtime does not run, and outputs that differ by more than `tol`. No file is left then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        >>> exported = recast.export(model, torch.randn(1, 3, 8, 8), "model.pt2")
        >>> len(exported.checks), exported.any_size
        (4, True)
    """
    path = Path(path)
    to = _target(path)
    _check_example(example, model)
    whole(model)
    check_place(path, "path", f"model{path.suffix}")
    same = sum(pads_same(m) and m.stride != (1, 1) for m in model.modules() if isinstance(m, nn.Conv2d))
    if to == "onnx":
        _check_bytes(sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())))
    with in_eval(model), torch.no_grad(), replaced(path) as temporary:
        _check_outputs(model, example)
        sizes = _sizes(model, example)
        is_slow = any_size is None and len(sizes) > 1 and same > MOST_SAME
        note = f"{same} strided convolutions pad by the size, SAME: free sizes take torch long" if is_slow else ""
        sizes = sizes[:1] if is_slow or any_size is False else sizes
        exported = Exported(path, to, *_write_compared(model, example, sizes, temporary, to, tol), note)
    return exported


def _target(path: Path) -> Target:
    """Return the kind of file to write. Raises `RecastError` for another suffix, and for missing packages."""
    to = next((kind for kind, suffix in SUFFIX.items() if path.suffix == suffix), None)
    if to is None:
        raise RecastError(f"export writes .onnx or .pt2, got {path.name}")
    if to == "onnx" and (missing := missing_packages()):
        raise RecastError(f"ONNX requires {', '.join(missing)}: pip install 'recast-vision[export]'")
    return to


def _check_bytes(count: int) -> None:
    """Raise `RecastError` for more bytes than an ONNX file can hold."""
    if count > MOST_ONNX:
        raise RecastError(
            f"the weights take {count / 2**30:.2f} GiB, one .onnx file holds 2: write a .pt2, or use model.half()"
        )


def _check_example(example: Example, model: nn.Module) -> None:
    """Raise `RecastError` unless the example is a batch of images."""
    check_values(example, model)
    if images_of(example).dim() != 4 or isinstance(example, list):
        if not isinstance(example, Tensor):
            with in_eval(model), torch.no_grad():
                _check_outputs(model, example)
        got = "a list" if isinstance(example, list) else tuple(images_of(example).shape)
        raise RecastError(f"example must be a batch of images (B, C, H, W), got {got}")


def _check_outputs(model: nn.Module, example: Example) -> None:
    """Raise `RecastError` for a detector, whose number of boxes depends on the image."""
    outputs = run_example(model, example)
    if isinstance(outputs, list) and any(isinstance(output, Mapping) for output in outputs):
        raise RecastError(
            f"{type(model).__name__} returns a varying number of boxes, which export does not write: export its "
            "backbone, recast.export(model.backbone, images, 'backbone.onnx'), or torch.onnx.export(…, dynamo=False)"
        )


def _sizes(model: nn.Module, example: Example) -> list[tuple[int, ...]]:
    """Return the example's (height, width), and another size that the model takes, if there is one."""
    height, width = images_of(example).shape[-2:]
    for other in ((height + 32, width + 64), (height // 2, 3 * width // 4)):
        try:
            run_example(model, _images(example, 1, other))
        except RecastError:
            continue  # too large for a table of biases, or a network of one size
        return [(height, width), other]
    return [(height, width)]


def _write_compared(
    model: nn.Module, example: Example, sizes: list[tuple[int, ...]], path: Path, to: Target, tol: float | None
) -> tuple[bool, tuple[ExportCheck, ...]]:
    """Write the file with free sizes, if there are two and it then computes the same, else for the first.

    Returns whether sizes are free, and the comparisons.
    """
    while True:
        any_size = len(sizes) > 1
        try:
            _write(model, _images(example, 2, sizes[0]), path, to, any_size)
            program = open_program(path, to)
            cases = [(batch, size) for size in sizes for batch in BATCHES]
            checks = tuple(compare(model, program, _images(example, batch, size), tol) for batch, size in cases)
            return any_size, checks
        except RecastError:
            if not any_size:
                raise
            del sizes[1:]  # torch may refuse free sizes, or its program hold for some sizes only


def missing_packages() -> list[str]:
    """Return the packages that ONNX requires and that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def _call(network: nn.Module, example: Example, _images: Tensor) -> Any:
    args, kwargs = arguments_of(example)
    return network(*args, **kwargs)


def _images(example: Example, batch: int, size: tuple[int, ...]) -> Example:
    """Return `batch` images of the example, repeated and resized."""
    before = images_of(example).shape[-2:]
    repeated = part_of(example, torch.arange(batch) % batch_of(example))
    if size == before:
        return repeated

    def resized(x: Tensor) -> Tensor:
        is_image = x.dim() == 4 and x.shape[-2:] == before
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False) if is_image else x

    images: Example = tree_map_only(Tensor, resized, repeated)
    return images


def _free(example: Example, any_size: bool) -> Any:
    """Return the free axes of the arguments for `torch.export`, by name or in their order."""
    count, size = batch_of(example), images_of(example).shape[-2:]

    def axes(x: Any) -> dict[int, Any] | None:
        if not isinstance(x, Tensor):
            return None
        follows = [0] * (x.dim() > 0 and len(x) == count)
        follows += [2, 3] * (any_size and x.dim() == 4 and x.shape[-2:] == size)
        return dict.fromkeys(follows, torch.export.Dim.DYNAMIC)

    args, kwargs = arguments_of(example)
    return tree_map(axes, kwargs or args)


def _write(model: nn.Module, images: Example, path: Path, to: Target, any_size: bool) -> None:
    """Write the program, with free height and width if `any_size`."""
    args, kwargs = arguments_of(images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with redirect_stderr(StringIO()):  # torch prints the whole graph of a failure
                program = torch.export.export(model, args, kwargs, dynamic_shapes=_free(images, any_size))
        except Exception as error:  # whatever a model's code does with symbols
            raise RecastError(f"torch cannot export {type(model).__name__}: {first_line(error)}") from error
        content = BytesIO()  # not the file itself: torch aborts the process where the disk is full
        if to == "torch":
            try:
                torch.export.save(program, content, extra_files={MARK: ""})
            except Exception as error:  # some expressions of free sizes have no place in the file
                raise RecastError(f"torch cannot save {type(model).__name__}: {first_line(error)}") from error
        else:
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # the exporter prints its steps
                    exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
            except torch.onnx.OnnxExporterError as error:  # its text lists steps; the cause names the operation
                reason = first_line(_first_cause(error))
                raise RecastError(f"ONNX cannot hold {type(model).__name__}: {reason}; write a .pt2") from error
            exported.model.producer_name = MARK
            named = _with_named_axes(exported.model_proto)
            _check_bytes(named.ByteSize())
            content.write(named.SerializeToString())
    try:
        path.write_bytes(content.getbuffer())
    except OSError as error:
        raise RecastError(f"cannot write {path.parent}: {error.strerror}; {free_space(path.parent)} free") from None


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__:
        error = error.__cause__
    return error


def _with_named_axes(model: Any) -> Any:
    """Name the free axes of an ONNX model batch, height and width, which torch calls s77 and the like."""
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    names = dict[str, str]()
    for value in model.graph.input:
        axes = value.type.tensor_type.shape.dim
        for axis, name in {0: "batch", 2: "height", 3: "width"}.items() if len(axes) == 4 else ():
            if axes[axis].dim_param and name not in names.values():
                names.setdefault(axes[axis].dim_param, name)
    for value in values:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = SYMBOL.sub(lambda match: names.get(match[0], match[0]), axis.dim_param)
    return model


def is_export(path: Path) -> bool:
    """Return True for a file of `export`: ONNX names its producer at the head, a .pt2 lists its parts at the end."""
    with path.open("rb") as file:
        head = file.read(EDGE)
        file.seek(-min(EDGE, path.stat().st_size), os.SEEK_END)
        return MARK.encode() in head + file.read()


def open_program(path: Path, to: Target) -> Program:
    """Return the file as a function of an example."""
    if to == "torch":
        with path.open("rb") as file:
            module = torch.export.load(file).module()
        return lambda example: tensors_of(_call(module, copied(example), images_of(example)))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # a size that the file does not take is an exception, which is handled
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its own kinds: a dtype of which it has no convolution
        raise RecastError(f"ONNX Runtime cannot run the file: {first_line(error)}; export in float32") from error
    names = [entry.name for entry in session.get_inputs()]

    def run(example: Example) -> list[Tensor]:
        args, kwargs = arguments_of(example)
        given = kwargs if set(names) <= kwargs.keys() else dict(zip(names, tensors_of([args, kwargs]), strict=False))
        return [torch.from_numpy(y) for y in session.run(None, {name: given[name].cpu().numpy() for name in names})]

    return run


def compare(model: nn.Module, program: Program, example: Example, tol: float | None = None) -> ExportCheck:
    """Compare file and module on one batch. Raises `RecastError` if an output differs by more than `tol`."""
    images = images_of(example)
    batch, _, height, width = images.shape
    at = f"on {batch} images of {height}×{width}"
    expected = [t.cpu() for t in tensors_of(run_example(model, example))]
    try:
        outputs = program(example)
    except Exception as error:  # of another runtime
        raise RecastError(f"the exported file does not run {at}: {first_line(error)}") from error
    if len(outputs) != len(expected):
        raise RecastError(f"the exported file has {len(outputs)} outputs {at}, the module {len(expected)}")
    errors = [relative_error(a.cpu(), b) for a, b in zip(outputs, expected, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    tol = max(TOLERANCE, ROUNDINGS * torch.finfo(images.dtype).eps) if tol is None else tol
    if not errors[worst] <= tol:
        raise RecastError(
            f"the exported file differs from the module: output {worst} by {errors[worst]:.1e} {at}; the tolerance is "
            f"{tol:g}"
        )
    return ExportCheck(batch, height, width, errors[worst])
