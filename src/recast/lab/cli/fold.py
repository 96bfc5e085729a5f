"""`recast fold RUN|FILE`: convolutions again, where the heads are closed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from recast.config import FilePath, NotNegative
from recast.errors import RecastError
from recast.files import check_place
from recast.lab.cli.command import Command, Compute, print_json
from recast.models.config import ModelConfig
from recast.models.trust import trusting

EXAMPLES = """  recast fold runs/mine                  (exact: heads that stayed closed; runs/mine/folded.safetensors)
  recast fold runs/mine --tol 0.02       (and those that opened by no more than this)
  recast fold child.safetensors --out small.safetensors
"""


def fold(
    subject: str,
    /,
    *,
    tol: NotNegative = 0.0,
    out: FilePath | None = None,
    trust: bool = False,
    output: Compute,
) -> int:
    """Give every layer of a trained recast network its smallest form, and save it: layers whose heads are all
    closed become convolutions again.

    Args:
        subject: A run folder, or a file of recast.save.
        tol: Close maps whose gate is at most this far open.
        out: The file, .safetensors. None: folded.safetensors beside the subject.
        trust: Run the code (pkg.module:function) that the files name.
    """
    source = Path(subject)
    path = Path(out or (source if source.is_dir() else source.parent) / "folded.safetensors")
    if path.resolve() in (source.resolve(), (source / "weights.safetensors").resolve()):
        raise RecastError(f"{path} is what is folded: choose another file with --out")
    check_place(path, "--out", "folded.safetensors")
    if path.exists() and not _is_folded(path):
        raise RecastError(f"{path} exists and is no file of recast fold: choose another file with --out")

    from recast.io import write_model
    from recast.lab.evaluation.run_folder import open_run
    from recast.lab.explain.open import names_a_run, open_model
    from recast.layers.gpsa import gpsa_layers
    from recast.models.build import Images
    from recast.models.weights import read_header
    from recast.surgery.folding.model import fold_

    with trusting(subject, trust=trust):
        is_run = names_a_run(subject)
        model = open_run(subject).models.get("recast") if is_run else open_model(ModelConfig(subject))
    if model is None or not gpsa_layers(model):
        raise RecastError(f"{subject} has no GPSA layer: there is nothing to fold")
    layers = fold_(model, tol)
    header = read_header(source / "weights.safetensors" if is_run else source)
    write_model(model, path, header["constructor"], Images.of(model), tried=False)
    heads = sum(layer.heads for layer in layers)
    left = heads - sum(layer.closed for layer in layers)
    if output.as_json:
        print_json({"file": str(path), "heads": heads, "open": left, "layers": [asdict(layer) for layer in layers]})
        return 0
    for layer in layers:
        form = "a convolution" if layer.convolution else f"{layer.heads - layer.closed} of {layer.heads} heads open"
        print(f"  {layer.name}: {form}")
    print(f"{path}: {left} of {heads} heads open; recast.load({str(path)!r})")
    return 0


COMMAND = Command(fold, "RUN|FILE [options]", EXAMPLES)


def _is_folded(path: Path) -> bool:
    from recast.models.weights import read_header

    try:
        return bool((read_header(path)["proof"] or {}).get("folded"))
    except RecastError:
        return False
