"""`recast fold RUN|FILE`: back from attention, where it does not pay."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from recast.config import CountOrZero, NotNegative
from recast.errors import RecastError
from recast.files import check_place
from recast.lab.cli.help import Command
from recast.lab.cli.options import ComputeOptions, TrustOption, Words, parse, print_json
from recast.lab.records import FrontierLine
from recast.models.config import ModelConfig
from recast.models.trust import trusting

EXAMPLES = """  recast fold runs/mine                  (exact: heads that stayed closed; runs/mine/folded.safetensors)
  recast fold runs/mine --tol 0.02       (and those that opened by no more than this)
  recast fold runs/mine --frontier       (close one head after another: a table, and a curve in the report)
  recast fold runs/mine --heads 12       (the point of that curve with 12 open heads)
  recast fold child.safetensors --out small.safetensors
"""
ABOUT = """Give every layer of a trained recast network its smallest form, and save it: layers whose heads are all
closed become convolutions again. --frontier closes heads one by one, each time the one that the loss on training
images misses least, and measures accuracy, accuracy under noise and milliseconds on the way."""


@dataclass
class Options(TrustOption, ComputeOptions):
    """Options of the command."""

    WORDS: ClassVar[Words] = {"subject": "1"}
    subject: str = ""
    """a run folder, or a file of recast.save"""
    tol: NotNegative = 0.0
    """close maps whose gate is at most this far open"""
    frontier: bool = False
    """of a run: measure the curve, RUN/analysis/frontier.csv"""
    heads: CountOrZero | None = None
    """of a run: close heads along the curve until this many are open"""
    out: str | None = None
    """the file, .safetensors; None: folded.safetensors beside the subject"""


def run(argv: Sequence[str]) -> int:
    """Fold and save, or measure the curve."""
    options = parse(Command("fold", "RUN|FILE [options]", ABOUT, EXAMPLES), Options(), argv)
    if sum((options.tol > 0, options.frontier, options.heads is not None)) > 1:
        raise RecastError("--tol, --frontier and --heads are three ways to close heads: choose one")
    if options.frontier and options.out:
        raise RecastError("--frontier writes a table into the run's folder: leave --out away, and add it to --heads N")
    subject = Path(options.subject)
    out = Path(options.out or (subject if subject.is_dir() else subject.parent) / "folded.safetensors")
    if out.resolve() in (subject.resolve(), (subject / "weights.safetensors").resolve()):
        raise RecastError(f"{out} is what is folded: choose another file with --out")
    check_place(out, "--out", "folded.safetensors")
    if out.exists() and not _is_folded(out):
        raise RecastError(f"{out} exists and is no file of recast fold: choose another file with --out")
    if options.frontier and not Path(options.subject).is_dir():
        raise RecastError(f"--frontier measures the networks of a run, and {options.subject} is no run folder")
    with trusting(options.subject, trust=options.trust):
        if options.frontier:
            return _measure(options, shlex.join(["recast", "fold", *argv]))
        return _save(options, out)


def _is_folded(out: Path) -> bool:
    from recast.models.weights import read_header

    try:
        return bool((read_header(out)["proof"] or {}).get("folded"))
    except RecastError:
        return False


def _save(options: Options, out: Path) -> int:
    from recast.io import write_model
    from recast.lab.evaluation.frontier import close_to
    from recast.lab.evaluation.run_folder import open_run
    from recast.lab.evaluation.suites import check_task
    from recast.lab.explain.open import names_a_run, open_model
    from recast.layers.gpsa import gpsa_layers
    from recast.models.build import Images
    from recast.models.weights import read_header
    from recast.surgery.folding.closing import heads_left
    from recast.surgery.folding.model import fold_

    run = open_run(options.subject) if names_a_run(options.subject) else None
    if run is None and options.heads is not None:
        raise RecastError(f"--heads follows the curve of a run, and {options.subject} is no run folder")
    source = Path(options.subject) if run is None else run.folder / "weights.safetensors"
    model = open_model(ModelConfig(options.subject)) if run is None else run.models.get("recast")
    if model is None or not gpsa_layers(model):
        raise RecastError(f"{options.subject} has no GPSA layer: there is nothing to fold")
    before = len(heads_left(model))
    if run is not None and options.heads is not None:
        check_task(["frontier"], run.data.task, run.data.name)
        close_to(run, options.heads)
    layers = fold_(model, options.tol)
    write_model(model, out, read_header(source)["constructor"], Images.of(model), tried=False)
    left = len(heads_left(model))
    if options.json:
        print_json({"file": str(out), "heads": before, "open": left, "layers": [asdict(layer) for layer in layers]})
        return 0
    for layer in layers:
        form = "a convolution" if layer.convolution else f"{layer.heads - layer.closed} of {layer.heads} heads open"
        print(f"  {layer.name}: {form}")
    print(f"{out}: {left} of {before} heads open; recast.load({str(out)!r})")
    return 0


def _measure(options: Options, command: str) -> int:
    from recast.files import read_json
    from recast.lab.evaluation.run_folder import evaluate_run
    from recast.lab.report.maps import head_labels
    from recast.tables import read_records

    found = evaluate_run(options.subject, ["frontier"], command=command, progress=sys.stderr.isatty())
    for error in found.not_measured:
        raise error
    path = Path(options.subject) / "analysis" / "frontier.csv"
    lines = read_records(path, FrontierLine)
    if options.json:
        print_json([asdict(line) for line in lines])
        return 0
    steps = read_json(Path(options.subject) / "plan.json")["steps"]
    labels = {step["name"]: head_labels(math.prod(step["kernel"]), step["kernel"]) for step in steps}
    print(f"{'':<11}{'open heads':>10}{'top-1':>9}{'noise':>9}{'ms':>9}   closed")
    for line in lines:
        closed = "" if line.head is None else f"{line.layer} {labels[line.layer][line.head]}"
        numbers = f"{line.heads:>10}{line.top1:>9.1f}{line.noise:>9.1f}{line.ms:>9.3g}"
        print(f"{line.model:<11}{numbers}   {closed}".rstrip())
    print(f"{path}; next: recast fold {shlex.quote(options.subject)} --heads N, recast report …")
    return 0
