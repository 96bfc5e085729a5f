"""From finished runs to tidy tables: scores, paired differences with their intervals, and what could have been seen.

A difference of two arms is d_si for seed s and test image i, paired: both arms of a seed start from the same weights,
see the same images in the same order and are judged on the same test images. Its mean d has two sources of chance,

    SE² = s²_seeds / S + s²_images / N          s²_seeds: variance over seeds of the means over images
                                                s²_images: variance over images of the means over seeds

(the second holds part of the first: the interval errs on the wide side). The interval is d ± t·SE, t of Student's
distribution with the degrees of freedom of Welch and Satterthwaite. `detectable` is the smallest true difference that
this study would have told from 0 with a probability of 80 %: (t_0.975 + t_0.8)·SE.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from job import Job
from scipy.stats import t as student
from studies import Study

from recast.lab.records import Wakefulness

FOLDED = ", folded"
"""The same run without its attention (`networks.fold_all`)."""
FILES = ("right.npz", "folded.npz")
RESULTS = Path(__file__).parents[2] / "results"


def difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Mean difference of values (S, N), its 95 % interval and the smallest detectable one; N = 1: one value a run."""
    paired = ours - theirs
    seeds, images = paired.shape
    if seeds < 2:
        raise ValueError("an interval over seeds needs at least two of them")
    from_images = paired.mean(0).var(ddof=1) / images if images > 1 else 0.0
    from_seeds = paired.mean(1).var(ddof=1) / seeds
    error = from_images + from_seeds
    if error == 0:  # the same answers everywhere
        return (
            {"difference": float(paired.mean())}
            | dict.fromkeys(("low_95", "high_95"), float(paired.mean()))
            | {"detectable": 0.0}
        )
    freedom = error**2 / (from_images**2 / max(1, images - 1) + from_seeds**2 / (seeds - 1))
    reach = float(student.ppf(0.975, freedom)) * error**0.5
    mean = float(paired.mean())
    return {
        "difference": mean, "low_95": mean - reach, "high_95": mean + reach,
        "detectable": reach + float(student.ppf(0.8, freedom)) * error**0.5,
    }  # fmt: skip


def finished(out: Path, study: str) -> dict[str, dict[int, Path]]:
    """Arm → seed → folder of the final runs of a study."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for file in sorted((out / study).glob("*/result.json")):
        job = json.loads(file.read_text())["job"]
        if not job["tuning"]:
            found[job["arm"]][job["seed"]] = file.parent
            if (file.parent / "folded.npz").is_file():
                found[job["arm"] + FOLDED][job["seed"]] = file.parent
    return found


Right = dict[str, dict[tuple[str, int], dict[str, np.ndarray]]]
"""Arm → study and seed → metric → 100 for each image that was right, or the one value of a run."""
Awake = dict[str, list[Wakefulness]]


def of_blocks(curves: Iterable[tuple[str, float, float]]) -> dict[str, np.ndarray]:
    """Δ log amplitude at π of the first and of the last block, from a run's rows (name, depth, Δ).

    The patch embedding (`stem`) and the maps within a block (`blocks.0.mixer`, `blocks.0.attn`) have rows too.
    """
    of = {int(name.removeprefix("blocks.")): delta for name, _, delta in curves if re.fullmatch(r"blocks\.\d+", name)}
    return (
        {f"delta(pi), {at} block": np.array([of[n]]) for at, n in (("first", min(of)), ("last", max(of)))} if of else {}
    )


def collect(out: Path, study: Study) -> tuple[list[dict[str, Any]], Right, Awake]:
    """Rows of evidence.csv, and what `compare` takes."""
    rows: list[dict[str, Any]] = []
    right: Right = defaultdict(dict)
    awake: Awake = defaultdict(list)
    for arm, seeds in finished(out, study.name).items():
        is_folded = arm.endswith(FOLDED)
        for seed, folder in sorted(seeds.items()):
            result = json.loads((folder / "result.json").read_text())
            found = {name: 100.0 * values for name, values in np.load(folder / FILES[is_folded]).items()}
            if not is_folded:
                found |= of_blocks(result.get("fourier", ()))
            right[arm][study.name, seed] = found
            attention = None if is_folded else Wakefulness.of(result["wakefulness"])
            job = Job(**result["job"])
            common = {
                "study": study.name, "arm": arm, "seed": seed, "updates": job.num_updates, "lr": job.lr,
                "gate_lr": job.gate_lr, "qk_lr": job.qk_lr, "seconds": round(result["seconds"]),
                "heads_awake": attention.awake if attention else "", "heads": attention.heads if attention else "",
                "train_loss": round(result["train_loss"], 4), "train_top1": result["train_top1"],
            }  # fmt: skip
            awake[arm] += [attention] if attention else []
            means = {name: float(values.mean()) for name, values in found.items()} | result.get("pool", {})
            rows += [{**common, "metric": name, "value": round(value, 3)} for name, value in means.items()]
    return rows, right, awake


def compare(name: str, pairs: Iterable[tuple[str, str]], right: Right, awake: Awake) -> list[dict[str, Any]]:
    """Rows of evidence_differences.csv, of a study or of several whose runs stand together in `right`."""
    rows = []
    for arm, control in pairs:
        shared = sorted(right[arm].keys() & right[control].keys())
        if len(shared) < 2:
            continue
        state = "awake" if all(2 * found.awake >= found.heads for found in awake[arm]) else "asleep"
        for metric in right[arm][shared[0]]:
            ours, theirs = (np.stack([right[name][run][metric] for run in shared]) for name in (arm, control))
            found = {name: round(value, 3) for name, value in difference(ours, theirs).items()}
            verdict = "higher" if found["low_95"] > 0 else "lower" if found["high_95"] < 0 else "not shown"
            row = {"study": name, "arm": arm, "against": control, "metric": metric, "runs": len(shared), **found}
            rows.append({**row, "verdict": verdict, "attention": state if awake[arm] else ""})
    return rows


def differences(out: Path, chosen: Sequence[Study]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of evidence.csv and evidence_differences.csv; studies of the same test images are also compared together,
    under the beginning of their names: chance is then that of seeds and settings."""
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    together: dict[str, list[tuple[Study, Right, Awake]]] = defaultdict(list)
    for study in chosen:
        own, right, awake = collect(out, study)
        rows += own
        found += compare(study.name, pairs(study, right), right, awake)
        together[study.name.rpartition("-")[0]].append((study, right, awake))
    for name, members in together.items():
        if len(members) > 1 and name.startswith("a-"):
            right, awake = defaultdict(dict), defaultdict(list)
            for _, runs, attention in members:
                for arm in runs:
                    right[arm] |= runs[arm]
                    awake[arm] += attention[arm]
            found += compare(f"{name}-*", pairs(members[0][0], right), right, awake)
    return rows, found


def pairs(study: Study, right: Right) -> Iterable[tuple[str, str]]:
    """What is compared, the folded networks with the study's first control too."""
    return study.pairs + tuple((name, study.pairs[0][1]) for name in right if name.endswith(FOLDED) and study.pairs)
