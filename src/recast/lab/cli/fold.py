"""`recast fold RUN|FILE`: convolutions again, where attention does not pay."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from recast.config import CountOrZero, FilePath, NotNegative
from recast.errors import RecastError
from recast.files import check_place
from recast.lab.cli.command import Command, Compute, Line, print_json
from recast.lab.folder.records import FrontierLine
from recast.lab.folder.run import RunFolder, follow_up
from recast.lab.folder.tables import read_records
from recast.models.config import ModelConfig
from recast.models.trust import is_function, trusting

if TYPE_CHECKING:
    from recast.lab.open import OpenRun

EXAMPLES = """  recast fold runs/mine                  (exact: only closed heads; writes runs/mine/folded.safetensors)
  recast fold runs/mine --tol 0.02       (also heads whose gate is open by at most 0.02)
  recast fold runs/mine --frontier       (close one head after another: a table, and a curve in the report)
  recast fold runs/mine --heads 12       (the point of that curve with 12 open heads)
  recast fold child.safetensors --out small.safetensors
"""


def fold(
    subject: str,
    /,
    *,
    tol: NotNegative = 0.0,
    frontier: bool = False,
    heads: CountOrZero | None = None,
    out: FilePath | None = None,
    data_dir: FilePath | None = None,
    trust: bool = False,
    output: Compute,
    line: Line,
) -> int:
    """Remove the closed heads of a trained recast network and save it: layers whose heads are all closed become
    convolutions again. --frontier closes heads one by one, each time the head whose removal increases the loss on
    training images least, and measures accuracy, accuracy under noise and milliseconds after each.

    Args:
        subject: A run folder, or a file of recast.save.
        tol: Close maps whose gate is open by at most this much.
        frontier: Measure the curve of a run, RUN/analysis/frontier.csv.
        heads: Close heads of a run along the curve until this many are open.
        out: The file, .safetensors. None: folded.safetensors beside the subject.
        data_dir: Folder of the images of a run if they moved.
        trust: Allow code that the files name (pkg.module:function) to run.
    """
    if sum((tol > 0, frontier, heads is not None)) > 1:
        raise RecastError("--tol, --frontier and --heads are three ways to close heads: choose one")
    source = Path(subject)
    if (frontier or heads is not None) and not source.is_dir():
        raise RecastError(f"--frontier and --heads require a run folder, got {subject}")
    if frontier:
        with trusting(subject, trust=trust):
            return _measure(subject, line, output.as_json, data_dir)
    path = Path(out or (source if source.is_dir() else source.parent) / "folded.safetensors")
    if path.resolve() in (source.resolve(), RunFolder(source).weights.resolve()):
        raise RecastError(f"{path} is the input: choose another file with --out")
    check_place(path, "--out", "folded.safetensors")
    if path.exists() and not _is_folded(path):
        raise RecastError(f"{path} exists and was not written by recast fold: choose another file with --out")

    with trusting(subject, trust=trust):
        return _save(subject, path, tol, heads, output.as_json, data_dir)


COMMAND = Command(fold, "RUN|FILE [options]", EXAMPLES)


def _is_folded(path: Path) -> bool:
    from recast.models.weights import read_header
    from recast.surgery.plan import Plan

    try:
        plan = read_header(path)["plan"]
        return plan is not None and any(step.fold for step in Plan.from_json(plan).steps)
    except RecastError:
        return False


def _save(subject: str, path: Path, tol: float, heads: int | None, as_json: bool, data_dir: str | None) -> int:
    """Fold the network, write it and print the form of its layers."""
    from recast.io import write_model
    from recast.lab.evaluation.closing import heads_left
    from recast.lab.open import names_a_run, open_model, open_run
    from recast.layers.cmhsa import gated_layers
    from recast.models.build import Images
    from recast.models.weights import read_header
    from recast.surgery.folding.model import fold_
    from recast.surgery.plan import applied_plan

    run = open_run(subject, data_dir) if names_a_run(subject) else None
    model = open_model(ModelConfig(subject)) if run is None else run.models.get("recast")
    if model is None or not gated_layers(model):
        raise RecastError(f"{subject} has no layer with gates: there is nothing to fold")
    before = len(heads_left(model))
    if run is not None and heads is not None:
        _close_to(run, heads)
    layers = fold_(model, tol)
    after = len(heads_left(model))
    header = read_header(subject if run is None else run.folder.weights)
    write_model(model, path, header["constructor"], Images.of(model), tried=False)
    if as_json:
        print_json({"file": str(path), "heads": before, "open": after, "layers": [asdict(layer) for layer in layers]})
        return 0
    trusted = ", trust=True" * is_function((header["constructor"] or {}).get("name"))
    added = {step.name for step in applied_plan(model).steps if step.is_after_block}
    for layer in layers:
        closed = "nothing: the blocks alone" if layer.name in added else "a convolution"
        form = closed if layer.convolution else f"{layer.heads - layer.closed} of {layer.heads} heads open"
        print(f"  {layer.name}: {form}")
    print(f"{path} keeps {after} of {before} open heads; recast.load({str(path)!r}{trusted})")
    return 0


def _close_to(run: OpenRun, heads: int) -> None:
    """Close heads of a run's recast network in place until `heads` are open, in the order of its frontier.csv.

    Raises RecastError if RUN/analysis/frontier.csv is missing, belongs to another network, or has no such point.
    """
    from recast.lab.evaluation.closing import close_
    from recast.lab.evaluation.frontier import training_images
    from recast.layers.cmhsa import gated_layers

    path = run.folder.table("frontier")
    if not path.is_file():
        raise RecastError(f"no such file: {path}; measure it with recast fold {run.folder} --frontier")
    lines = [line for line in read_records(path, FrontierLine) if line.model == "recast"]
    if not lines:
        raise RecastError(f"{path} has no point of a recast network: run recast fold {run.folder} --frontier")
    counts = [line.heads for line in lines]
    if heads not in counts:
        raise RecastError(f"heads must be between {counts[-1]} and {counts[0]} (points of {path}), got {heads}")
    model = run.models["recast"].eval()
    closed = [(line.layer, line.head) for line in lines[1 : counts.index(heads) + 1] if line.head is not None]
    images, _ = training_images(run.data, lines[0].chosen_on, next(model.parameters()).device)
    for layer in gated_layers(model).values():
        layer.close_maps_(0.0)
    close_(model, closed, images)


def _measure(run: str, command: str, as_json: bool, data_dir: str | None) -> int:
    """Measure the curve and print it."""
    from recast.lab.evaluation.run_folder import evaluate_run
    from recast.lab.folder.files import read_json
    from recast.lab.pages.formats import head_labels, three_digits

    how = {"command": command, "progress": sys.stderr.isatty(), "data_dir": data_dir}
    for error in evaluate_run(run, ["frontier"], **how).not_measured:  # type: ignore[arg-type]
        raise error
    path = RunFolder(run).table("frontier")
    lines = read_records(path, FrontierLine)
    if as_json:
        print_json([asdict(line) for line in lines])
        return 0
    steps = read_json(RunFolder(run).plan_file)["steps"]
    labels = {step["name"]: head_labels(step["heads"], step["kernel"]) for step in steps}
    print(f"{'':<11}{'open heads':>10}{'top-1':>9}{'noise':>9}{'ms':>9}   closed")
    for line in lines:
        closed = "" if line.head is None else f"{line.layer} {labels[line.layer][line.head]}"
        numbers = f"{line.heads:>10}{line.top1:>9.1f}{line.noise:>9.1f}{three_digits(line.ms):>9}"
        print(f"{line.model:<11}{numbers}   {closed}".rstrip())
    functions = RunFolder(run).recipe().functions
    fold_on = follow_up("fold", run, "--heads", str(max(line.heads for line in lines) // 2), functions=functions)
    print(f"{path}; next: {fold_on}, or another number of heads; {follow_up('report', run)}")
    return 0
