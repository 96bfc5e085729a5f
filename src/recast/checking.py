"""`check`: verify the claims of a saved file again, as far as possible."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from recast.config import read, typed
from recast.errors import RecastError
from recast.io import load
from recast.layers.gpsa import gpsa_layers
from recast.models.build import check_constructor, input_defaults
from recast.models.trust import check_trusted, trusting
from recast.models.weights import CHECKSUM, read_header, read_safetensors
from recast.surgery.apply import recast_
from recast.surgery.folding.forms import matches_report
from recast.surgery.plan import Plan, applied_plan
from recast.surgery.pooling.swap import noise
from recast.surgery.proof import Proof, fingerprint
from recast.surgery.verify import verify

LARGEST = 1024
"""Pixels of a side of the images that are tried."""
VERDICTS = {True: "holds", False: "FAILS", None: "not checked"}


@dataclass(frozen=True)
class Finding:
    """One claim of a file."""

    claim: str
    holds: bool | None
    """None: it cannot be verified, for the reason in `told`."""
    told: str


@dataclass(frozen=True)
class Checked:
    """Result of `check`: the findings for a file."""

    path: Path
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no claim is false."""
        return all(finding.holds is not False for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields."""
        return {"path": str(self.path), "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        lines = [f"  {VERDICTS[finding.holds]:<12} {finding.claim}: {finding.told}" for finding in self.findings]
        return "\n".join([f"{self.path}: {'nothing was found wrong' if self.ok else 'NOT as it says'}", *lines])


@typed("path", "parent", "trust")
def check(path: str | Path, parent: nn.Module | None = None, *, trust: bool = False) -> Checked:
    """Open a file of `save`, rebuild its network, and verify its claims again.

    Args:
        path: a file of `save`.
        parent: the network that was recast, to verify its fingerprint, that the plan applied to it computes the same
            function, and the distance of the saved weights, on two images of noise.
        trust: call a `pkg.module:function` that the file names.

    Returns:
        `Checked`, with one `Finding` per claim; claims that cannot be verified are listed too.

    Raises:
        RecastError: if `path` is not a file of `save`, or names a function without `trust`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> child = recast.recast_(copy.deepcopy(model), recast.plan(model, torch.randn(1, 3, 8, 8)))
        >>> recast.check(recast.save(child, "child.safetensors"), parent=model).ok
        True
    """
    path = Path(path)
    header = read_header(path)
    if header["constructor"] is not None:
        _, name, _ = check_constructor(header["constructor"])
        with trusting(trust=trust):
            check_trusted(name)
    proof = read(Proof, header["proof"], f"{path}'s proof")
    return Checked(path, tuple(_findings(path, header, proof, parent, trust)))


def _findings(
    path: Path, header: dict[str, Any], proof: Proof, parent: nn.Module | None, trust: bool
) -> Iterator[Finding]:
    try:
        tensors = read_safetensors(path)
    except RecastError as error:
        yield Finding("weights", False, str(error))
        return
    with safe_open(path, framework="pt") as file:
        sealed = CHECKSUM in (file.metadata() or {})
    how = "as its checksum says" if sealed else "it carries no checksum, so a change would not show"
    yield Finding("weights", sealed or None, f"{len(tensors)} tensors, {how}")
    if header["constructor"] is None and parent is None:
        yield Finding("network", None, "the file does not say how to build it: give the parent")
        return
    try:
        model = load(path, parent if header["constructor"] is None else None, trust=trust)
    except RecastError as error:
        yield Finding("network", False, str(error))
        return
    name = (header["constructor"] or {}).get("name", type(model).__name__)
    if header["plan"] is None:
        yield Finding("network", True, f"{name}, which was not recast: all tensors fit")
        return
    plan = applied_plan(model)
    pool = "" if plan.pool is None else " and attention pooling"
    yield Finding("network", True, f"{name}: the plan's {len(plan.steps)} layers{pool} are put in, all tensors fit")
    yield from _gates(model)
    try:
        yield from _against_parent(plan, proof, model, parent)
    except RecastError as error:  # a parent of another shape
        yield Finding("same function", False, str(error))
    if proof.folded is not None:
        yield _folds(proof, model)
    for file_name, record in (proof.exported or {}).items():
        yield _export(path.parent / Path(file_name).name, record)


def _gates(model: nn.Module) -> Iterator[Finding]:
    """Yield how many heads are open, if the network has any."""
    if layers := gpsa_layers(model):
        heads = sum(layer.num_heads for layer in layers.values())
        open_heads = [(layer.num_heads, layer.open_heads) for layer in layers.values()]
        opened = sum(count if numbers is None else len(numbers) for count, numbers in open_heads)
        yield Finding("gates", True, f"{opened} of {heads} heads in {len(layers)} layers have left the convolution")


def _against_parent(plan: Plan, proof: Proof, model: nn.Module, parent: nn.Module | None) -> Iterator[Finding]:
    """Yield findings on the parent: its fingerprint, the plan's function, and the saved weights."""
    recorded = "nothing is recorded" if proof.verified is None else f"recorded: {proof.verified}"
    if parent is None:
        message = (
            "not known to the file" if proof.parent is None else f"{proof.parent[:12]}…, give the parent to compare"
        )
        yield Finding("parent", None, message)
        yield Finding("same function", None, f"{recorded}; give the parent to verify it again")
        return
    if proof.parent is None:
        yield Finding("parent", None, "the file does not hold its fingerprint")
    else:
        same = fingerprint(parent) == proof.parent
        message = "is the network that was recast" if same else "is another network, or its weights were changed"
        yield Finding("parent", same, f"{message} ({proof.parent[:12]}…)")
    stated = input_defaults(model)
    usual = stated is not None and max(stated.size) <= LARGEST
    images = noise(parent, (len(stated.mean), *stated.size) if stated and usual else None)
    unfolded = replace(plan, steps=tuple(replace(step, fold=None, bias_added=False) for step in plan.steps))
    with torch.random.fork_rng(devices=[]):
        start = recast_(copy.deepcopy(parent), unfolded)
    replayed, now = verify(parent, start, images), verify(parent, model, images)
    promised = all(step.exact for step in plan.steps)
    if plan.pool is not None and plan.place is not None:
        promised = promised and plan.pool.start == "average" and plan.place.averages
    message = f"the plan on this parent: {replayed}; {recorded}"
    if not promised:
        message += "; this plan does not promise it (gate, stride, bias or pooling of another start)"
    yield Finding("same function", replayed.ok() if promised else None, message)
    if now.ok():
        yield Finding("saved weights", True, f"compute what the parent computes: {now}")
        return
    begun, held = start.state_dict(), model.state_dict()
    both = [name for name, value in held.items() if name in begun and value.shape == begun[name].shape]
    moved = [name for name in both if not torch.equal(held[name], begun[name])]
    why = f"training has moved {len(moved)} of {len(held)} tensors" if moved else "folding has changed layers"
    if moved or proof.folded or any(step.fold for step in plan.steps) or not promised:
        yield Finding("saved weights", None, f"{why}: {now}")
    else:
        yield Finding("saved weights", False, f"nothing has moved, and yet they differ: {now}")


def _folds(proof: Proof, model: nn.Module) -> Finding:
    """Compare the forms of the layers with the report of `fold_`."""
    modules, folded = dict(model.named_modules()), proof.folded or []
    for report in folded:
        if report.name not in modules:
            return Finding("folds", False, f"the network has no layer {report.name!r}, which fold_ reports")
        if not matches_report(report, modules[report.name]):
            return Finding("folds", False, f"{report.name} has another form than fold_ reports")
    worst = max((report.output_error or 0.0 for report in folded), default=0.0)
    measured = f"; recorded: outputs moved by {worst:.1e} on images that the file does not hold" if worst else ""
    return Finding("folds", True, f"{len(folded)} layers have the forms that fold_ reports{measured}")


def _export(path: Path, record: dict[str, Any]) -> Finding:
    """Compare an exported file beside the saved one with the digest in its record. It is not opened."""
    claim = f"export {path.name}"
    if not path.is_file():
        return Finding(claim, None, "it does not lie beside the file")
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.get("sha256"):
        return Finding(claim, False, f"{path} is another file than the one that was compared with the module")
    return Finding(claim, True, "it is the file that was compared with the module")
