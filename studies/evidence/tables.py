"""Tidy tables of finished runs: scores, and paired differences with intervals and the smallest detectable effect.

A difference of two arms is paired by seed and test image: both arms of a seed start from the same weights,
see the same images in the same order and are evaluated on the same test images. `evaluation.intervals.interval` gives
its mean, the 95 % interval over seeds and images, and `detectable`, the smallest true difference that this study would
have shown with a probability of 80 %.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import SEVERITIES
from rule import is_awake
from studies import Job, Study

from recast.lab.evaluation.intervals import POINTS, interval
from recast.lab.folder.records import Wakefulness

FOLDED = ", folded"
"""Suffix of the same run without its attention (`networks.fold_all`)."""
LABELS = ("study", "arm", "seed", "against", "metric")
"""Columns that identify a row."""


def difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the mean difference of values (S, N), its 95 % interval and the smallest detectable one.

    Values are percentages of images, or for N = 1 one value per run.
    """
    if len(ours) < 2:
        raise ValueError("an interval over seeds needs at least two of them")
    line = interval(ours - theirs, POINTS if ours.shape[1] > 1 else None)
    return {"difference": line.mean, "low_95": line.low, "high_95": line.high, "detectable": line.detectable}


def finished(out: Path, study: str) -> dict[str, dict[int, Path]]:
    """Return arm → seed → file of the final runs of a study: which images were right, also of the folded networks."""
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    for file in sorted((out / study).glob("*/result.json")):
        job = json.loads(file.read_text())["job"]
        if not job["tuning"]:
            files[job["arm"]][job["seed"]] = file.with_name("right.npz")
            if (folded := file.with_name("folded.npz")).is_file():
                files[job["arm"] + FOLDED][job["seed"]] = folded
    return files


Scores = dict[str, dict[tuple[str, int], dict[str, np.ndarray]]]
"""Arm → study and seed → metric → 100 or 0 for each image, or the one value of a run."""
Attention = dict[str, list[Wakefulness]]
"""Arm → wakefulness of its runs."""


def block_deltas(curves: Iterable[tuple[str, float, float]]) -> dict[str, np.ndarray]:
    """Return Δ log amplitude at π of the first and of the last block, from a run's rows (name, depth, Δ).

    The patch embedding (`stem`) and the maps within a block (`blocks.0.mixer`, `blocks.0.attn`) have rows too.
    """
    blocks = {int(name[7:]): delta for name, _, delta in curves if re.fullmatch(r"blocks\.\d+", name)}
    ends = (("first", min(blocks)), ("last", max(blocks))) if blocks else ()
    return {f"delta(pi), {end} block": np.array([blocks[number]]) for end, number in ends}


def by_severity(values: np.ndarray) -> dict[str, np.ndarray]:
    """Part the accuracy under corruptions by severity, each of which `corrupted` gave to other images."""
    step = len(SEVERITIES)
    return {f"corruptions, severity {value}": values[at::step] for at, value in enumerate(SEVERITIES) if len(values)}


def collect(out: Path, study: Study) -> tuple[list[dict[str, Any]], Scores, Attention]:
    """Return the rows of evidence.csv, and the arguments of `compare`."""
    rows: list[dict[str, Any]] = []
    scores: Scores = defaultdict(dict)
    attention: Attention = defaultdict(list)
    for arm, files in finished(out, study.name).items():
        for seed, file in sorted(files.items()):
            result = json.loads(file.with_name("result.json").read_text())
            run = {name: 100.0 * values for name, values in np.load(file).items()}
            run |= by_severity(run.get("corruptions", np.empty(0)))
            wakefulness = None
            if not arm.endswith(FOLDED):
                run |= block_deltas(result.get("fourier", ()))
                wakefulness = Wakefulness.of(result["wakefulness"])
            scores[arm][study.name, seed] = run
            attention[arm] += [wakefulness] if wakefulness else []
            job = Job(**result["job"])
            common = {"study": study.name, "arm": arm, "seed": seed, "updates": job.num_updates, "lr": job.lr}
            common |= {"gate_lr": job.gate_lr, "qk_lr": job.qk_lr, "seconds": round(result["seconds"])}
            common |= {"heads_awake": wakefulness.awake if wakefulness else ""}
            common |= {"heads": wakefulness.heads if wakefulness else "", "train_loss": round(result["train_loss"], 4)}
            common |= {"train_top1": result["train_top1"]}
            means = {name: float(values.mean()) for name, values in run.items()} | result.get("pool", {})
            rows += [{**common, "metric": name, "value": round(value, 3)} for name, value in means.items()]
    return rows, scores, attention


def compare(name: str, pairs: Iterable[tuple[str, str]], scores: Scores, attention: Attention) -> list[dict[str, Any]]:
    """Return the rows of evidence_differences.csv, of one study or of several whose runs are together in `scores`."""
    rows = []
    for arm, control in pairs:
        awake = all(is_awake(run.awake, run.heads) for run in attention[arm])
        common = sorted(scores[arm].keys() & scores[control].keys())
        for metric in scores[arm][common[0]] if common else ():
            shared = [run for run in common if metric in scores[arm][run] and metric in scores[control][run]]
            if len(shared) < 2:  # of a measurement that is not finished
                continue
            ours, theirs = (np.stack([scores[name][run][metric] for run in shared]) for name in (arm, control))
            values = {name: round(value, 3) for name, value in difference(ours, theirs).items()}
            row: dict[str, Any] = {"study": name, "arm": arm, "against": control, "metric": metric, "runs": len(shared)}
            row |= values
            row |= {"verdict": "higher" if values["low_95"] > 0 else "lower" if values["high_95"] < 0 else "not shown"}
            row |= {"attention": ("awake" if awake else "asleep") if attention[arm] else ""}
            rows.append(row)
    return rows


def differences(out: Path, chosen: Sequence[Study]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of evidence.csv and evidence_differences.csv.

    The studies a-DATA-DATA-COUNT of the same test images are also compared together, as a-DATA-DATA-*: chance is then
    that of seeds and settings.
    """
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    groups: dict[str, list[tuple[Study, Scores, Attention]]] = defaultdict(list)
    for study in chosen:
        study_rows, scores, attention = collect(out, study)
        rows += study_rows
        compared += compare(study.name, pairs(study, scores), scores, attention)
        groups[study.name.rpartition("-")[0]].append((study, scores, attention))
    for name, members in groups.items():
        if len(members) > 1 and name.startswith("a-"):
            scores, attention = defaultdict(dict), defaultdict(list)
            for _, study_scores, study_attention in members:
                for arm in study_scores:
                    scores[arm] |= study_scores[arm]
                    attention[arm] += study_attention[arm]
            compared += compare(f"{name}-*", pairs(members[0][0], scores), scores, attention)
    return rows, compared


def pairs(study: Study, scores: Scores) -> Iterable[tuple[str, str]]:
    """Return the study's pairs, and each folded network with the study's first control."""
    return study.pairs + tuple((arm, study.pairs[0][1]) for arm in scores if arm.endswith(FOLDED) and study.pairs)


def updated(old: Iterable[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return old rows with new ones in the place of those with the same labels, ordered by study."""

    def labels(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(label, "")) for label in LABELS)

    replaced = {labels(row) for row in new}
    return sorted([row for row in old if labels(row) not in replaced] + new, key=lambda row: str(row["study"]))
