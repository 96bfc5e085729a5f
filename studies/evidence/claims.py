"""The papers' claims, each as a difference of two arms, and whether it holds here.

No study has the gate, layer, stride, optimizer and length of a paper's table together, so none confirms or refutes one:
a claim holds here, does not hold here, or is not decidable. Each row names its setting.

One rule for every page (rule.py, evidence_claims.csv):
- asleep: in some run of the arm fewer than AWAKE_SHARE of the heads were awake. A claim about attention: no verdict.
  Studies l, m and n had stated a tenth before their first run; the stricter rule takes back one verdict of theirs
  (n-converged-100, clean: -0.6).
- too short: an arm of a paper's claim classifies fewer than TRAINED percent of its training images correctly (mean of
  its runs). The papers compare networks that have converged; our claims are about the length that they name.
- else the 95 % interval decides: it lies on one side of the threshold, or the claim is not decidable.

    python studies/evidence/claims.py    # from the other tables in results/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from csv_files import RESULTS, read, write
from rule import ASLEEP, TOO_SHORT, TRAINED, UNDECIDED, is_awake
from studies import (
    FINE_TUNED,
    LATEST,
    LONGER,
    MORE_ATTENTION,
    OURS_REMOVED,
    PLAIN_VIT,
    SAME_COMPUTE,
    SIGMOID_AWAKE,
    SIGMOID_AWAKE_REMOVED,
    SIGMOID_REMOVED,
    Study,
    studies,
)

NUMBERS = ("runs", "difference", "low_95", "high_95", "detectable")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """The difference `arm` − `against` of a metric lies above `threshold`, or below it."""

    source: str
    """The paper's table or figure, or "ours" if no paper claims it."""
    statement: str
    study: str
    """Name or glob: a claim is judged in every study of that name."""
    arm: str
    against: str
    metrics: tuple[str, ...] = ("clean",)
    threshold: float = 0.0
    below: bool = False
    attends: bool = True
    """True for a claim about attention: runs with sleeping attention cannot decide it."""

    @property
    def is_paper(self) -> bool:
        """Return True for a claim of a paper, whose networks have converged."""
        return self.source != "ours"

    def verdict(self, row: Row, train_top1: float = TRAINED) -> str:
        """Return the verdict of a row of evidence_differences.csv, whose worse trained arm has `train_top1`."""
        if self.attends and row["attention"] == "asleep":
            return ASLEEP
        if self.is_paper and not train_top1 >= TRAINED:  # nan: not measured
            return TOO_SHORT
        if float(row["low_95"]) > self.threshold:
            return "does not hold here" if self.below else "holds here"
        if float(row["high_95"]) < self.threshold:
            return "holds here" if self.below else "does not hold here"
        return UNDECIDED


LARGER = ("size 40", "size 48")
ROBUST = ("noise", "corruptions", "fgsm@1", "fgsm@2", "pgd@1")
T_CNN, PRS = "T-CNN (d'Ascoli et al. 2021)", "PRS (Lee et al. 2022)"
PATCHCONVNET = "PatchConvNet (Touvron et al. 2021), Table 5"
AWAKE = ("recast, images", "recast, images, rates as fine-tuned")
CONVERGED = "[bilmn]-con*"
"""b-controls, and the studies of a parent that has converged: i, l, m, n."""
CLAIMS = (
    *(
        Claim("ours", statement, "a-*", arm, against, metrics, threshold)
        for arm in AWAKE
        for statement, against, metrics, threshold in (
            ("a recast network is not worse than a fine-tuned one", FINE_TUNED, ("clean",), -0.3),
            ("a recast network is more robust than a fine-tuned one", FINE_TUNED, ROBUST, 0.0),
            ("… and than one with the same compute", SAME_COMPUTE, ROBUST, 0.0),
            ("… and than one trained as long", LONGER, ("clean", *ROBUST), 0.0),
        )
    ),
    *(
        Claim(source, statement, study, arm, against, metrics)
        for arm in (
            "recast, sigmoid", "recast, images", SIGMOID_REMOVED, OURS_REMOVED, SIGMOID_AWAKE, SIGMOID_AWAKE_REMOVED,
        )
        for source, study, against, metrics, statement in (
            (f"{T_CNN}, Table 1", CONVERGED, FINE_TUNED, ("clean",), "fine-tuning with attention beats fine-tuning"),
            (f"{T_CNN}, Table 3", CONVERGED, FINE_TUNED, ROBUST, "attention makes more robust (than fine-tuning)"),
            (f"{T_CNN}, Fig. 7", CONVERGED, FINE_TUNED, LARGER, "attention beats fine-tuning on larger test images"),
            ("ours", CONVERGED, SAME_COMPUTE, ("clean", *ROBUST), "attention beats the same network without it"),
            ("ours", CONVERGED, LONGER, ("clean", *ROBUST), "attention beats fine-tuning three times as long"),
        )
    ),
    *(
        Claim(f"{T_CNN}, Table 2", statement, "c-when", f"{kind}, after {share}", against.format(kind))
        for statement, against in (
            ("recasting in the middle beats recasting at the start", "{}, after 0%"),
            ("… and never recasting", "convolution"),
        )
        for kind in ("exact", "sigmoid") for share in ("25%", "50%")
    ),
    *(
        Claim(source, statement, "[dj]-prs*", f"PRS{layer}", against.format(layer))
        for source, statement, against in (
            (f"{PRS}, Table 3", "layer by layer beats all at once", "two-stage{}"),
            (f"{PRS}, Table 3", "layer by layer beats a plain ViT", PLAIN_VIT),
            ("ours", "the last layer first (PRS's choice, Sec. 6) beats the first first", "reversed{}"),
        )
        for layer in ("", ", C-MHSA")
    ),
    Claim("ours", "attention that starts as convolutions beats a plain ViT", "d-prs", "from the start", PLAIN_VIT),
    Claim("ours", "… and convolutions", "d-prs", "from the start", "convolution"),
    *(
        Claim(
            f"{PRS}, Fig. 3", f"more attention: Δ log amplitude {statement}", "[dj]-prs*", arm, against,
            (f"delta(pi), {block} block",), below=block == "last",
        )
        for arm, against in (*((arm, LATEST) for arm in MORE_ATTENTION), ("two-stage, C-MHSA", "convolution"))
        for block, statement in (("first", "rises in the first block"), ("last", "falls in the last"))
    ),
    *(
        Claim("ours", "a recast ResNet beats a plain ViT of few images", study, "exact, after 0%", PLAIN_VIT)
        for study in ("f-scale-*", "c-when")
    ),
    *(
        Claim(PATCHCONVNET, f"attention pooling beats the average{note}", study, arm, "average", attends=False)
        for note, study, arm in (
            ("", "g-pooling", "one map"),
            (" (LayerScale from 0.1)", "g-pooling-start", "one map, from 0.1"),
            (" (100 epochs)", "k-pooling-long", "one map, from 0.1"),
        )
    ),
    Claim(
        PATCHCONVNET, "a token for every class costs accuracy", "g-pooling", "a map a class", "one map", below=True,
        attends=False,
    ),
    Claim(
        "ours", "attention pooling that starts as the average beats the average", "[gk]-pooling*",
        "one map, as the average", "average", ("clean", *ROBUST), attends=False,
    ),
)  # fmt: skip


GRAFIT = "Grafit (Touvron et al. 2021)"
THESIS = "Touvron 2022"
STATED = (
    (f"{T_CNN}, Fig. 3", "the relative improvement grows with severity", "l-converged-long", UNDECIDED),
    (f"{T_CNN}, Table 4", "more epochs of fine-tuning with attention bring more", "epochs_sigmoid.csv", ASLEEP),
    (
        f"{T_CNN}, Fig. 4",
        "the first layer stays convolutional, later ones do not",
        "gates_sigmoid.csv",
        ASLEEP,
    ),
    (f"{T_CNN}, Fig. 5", "every layer has a content head", "gates_sigmoid.csv", ASLEEP),
    (f"{T_CNN}, Fig. 6", "at a higher rate accuracy dips deeper and climbs faster", "rates_sigmoid.csv", ASLEEP),
    (f"{THESIS}, Table 3.3", "hard labels teach more than soft ones", "distillation.csv", TOO_SHORT),
    (f"{THESIS}, Table 3.3", "the distillation token adds to hard labels", "distillation.csv", TOO_SHORT),
    (f"{THESIS}, Table 3.11", "LayerScale helps at depth 12", "layer_scale.csv", TOO_SHORT),
    (f"{THESIS}, Table 3.11", "LayerScale helps at depth 24", "layer_scale.csv", TOO_SHORT),
    (f"{THESIS}, Table 6.3", "3-Augment beats RandAugment", "three_augment.csv", TOO_SHORT),
)
"""Claims that were tried outside these studies, with table and verdict. Training accuracy was not measured there: after
ten epochs from random weights the training loss is 1.7 and more."""
TABLE_2, TABLE_3, DEPTH = f"{T_CNN}, Table 2", f"{PRS}, Table 3", f"{THESIS}, Table 3.11"
OF_SMALL_RECIPES = (
    (TABLE_2, "recasting at 100 of 400 epochs beats the plain network", "tcnn_star_100_small", "tcnn_cnn_small"),
    (TABLE_2, "… beats the hybrid from scratch", "tcnn_star_100_small", "tcnn_hybrid_small"),
    (TABLE_2, "… beats recasting at 300", "tcnn_star_100_small", "tcnn_star_300_small"),
    (TABLE_2, "recasting at 200 beats the plain network", "tcnn_star_200_small", "tcnn_cnn_small"),
    (TABLE_3, "layer by layer beats two stages", "prs_cmhsa3_small", "cmhsa3_small"),
    (TABLE_3, "two stages are better with a kernel of 5×5 than of 3×3", "cmhsa5_small", "cmhsa3_small"),
    (f"{THESIS}, Table 4.3", "mixing by a matrix beats no mixing", "resmlp mixed by matrix", "resmlp mixed by none"),
    (f"{THESIS}, Table 4.3", "… beats mixing by an MLP", "resmlp mixed by matrix", "resmlp mixed by mlp"),
    (f"{THESIS}, Table 4.3", "… beats mixing by convolutions", "resmlp mixed by matrix", "resmlp mixed by conv"),
    (PATCHCONVNET, "a convolutional stem beats a linear one", "patchconvnet_s60", "patchconvnet_s60_linear_stem"),
    (PATCHCONVNET, "one token beats one for every class", "patchconvnet_s60", "patchconvnet_s60_multi"),
    (f"{THESIS}, Table 3.8", "repeated augmentation helps", "deit repeats 3", "deit repeats 1"),
    (DEPTH, "LayerScale helps at depth 36", "deit depth 36 LayerScale", "deit depth 36"),
    (DEPTH, "LayerScale helps at depth 48", "deit depth 48 LayerScale", "deit depth 48"),
)
"""Source, claim and the two arms of small_recipes.csv."""


def of_grafit(row: Row) -> str:
    """Return the verdict on a row of grafit_claims.csv: 10 epochs, and one network in two rankings if conditioned."""
    if "conditioning" not in row["claim"]:
        return TOO_SHORT
    return Claim(GRAFIT, row["claim"], "", "", "", threshold=float(row["more_than"])).verdict({**row, "attention": ""})


def of_small_recipes(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of `OF_SMALL_RECIPES`: means over the seeds that both arms have, without an interval.

    No network there has converged, so that no interval could decide.
    """
    of, claims = {(row["recipe"], row["seed"]): row for row in rows}, []
    for source, statement, arm, against in OF_SMALL_RECIPES:
        pairs = [(row, of[against, seed]) for (name, seed), row in of.items() if name == arm and (against, seed) in of]
        if not pairs:
            continue
        every = [row for pair in pairs for row in pair]
        awake = [is_awake(int(row["awake"]), int(row["heads"])) for row in every if row["heads"]]
        attention = "" if not awake else "awake" if all(awake) else "asleep"
        trained = [fmean(float(pair[of_arm]["train"]) for pair in pairs) for of_arm in (0, 1)]
        line: dict[str, Any] = {"source": source, "claim": statement, "study": "small_recipes.csv", "arm": arm}
        line |= {"against": against, "metric": "clean", "is": "above", "threshold": 0.0, "runs": len(pairs)}
        line |= {"train_top1": round(trained[0], 1), "train_top1_against": round(trained[1], 1)}
        line |= {"difference": round(fmean(float(a["top1"]) - float(b["top1"]) for a, b in pairs), 2)}
        any_value = {"attention": attention, "low_95": -math.inf, "high_95": math.inf}
        verdict = Claim(source, statement, "", arm, against).verdict(any_value, min(trained))
        claims.append(line | {"attention": attention, "verdict": verdict})
    return claims


def train_top1(arm: str, names: Iterable[str], scores: Iterable[Row]) -> float:
    """Return the mean over the runs of an arm of top-1 on training images, nan where it was not measured."""
    values = [
        float(row["train_top1"])
        for row in scores
        if row["study"] in names and (row["arm"], row["metric"]) == (arm, "clean")
    ]
    return round(sum(values) / len(values), 1)


def setting(arm: str, members: Iterable[Study]) -> dict[str, str]:
    """Return gate, stride and epochs of an arm in its studies."""
    jobs = [study.job(arm) for study in members]
    gates = {("none: C-MHSA" if job.gate == "bias" else job.gate) if job.where else "" for job in jobs}
    epochs = [round(job.num_updates * job.batch_size / job.num_train, 1) for job in jobs]
    row: dict[str, Any] = {"gate": ", ".join(sorted(gates)), "stride": ", ".join(sorted({job.stride for job in jobs}))}
    row |= {"epochs": " to ".join(f"{value:g}" for value in sorted({min(epochs), max(epochs)}))}
    return row


def judged(scores: Sequence[Row], differences: Iterable[Row], studies: Mapping[str, Study]) -> list[dict[str, Any]]:
    """Return a row per claim, study and metric that was measured, from the rows of the other two tables."""
    rows = []
    for row in differences:
        for claim in CLAIMS:
            is_same = (claim.arm, claim.against) == (row["arm"], row["against"])
            if not (is_same and fnmatchcase(row["study"], claim.study) and row["metric"] in claim.metrics):
                continue
            # a name that ends in * stands for the studies whose runs were compared together
            members = [s for s in studies.values() if fnmatchcase(s.name, row["study"]) and claim.arm in s.arms]
            trained = [train_top1(arm, [s.name for s in members], scores) for arm in (claim.arm, claim.against)]
            numbers = {name: row[name] for name in NUMBERS}
            line: dict[str, Any] = {"source": claim.source, "claim": claim.statement, "study": row["study"]}
            line |= {"arm": claim.arm, "against": claim.against, "metric": row["metric"]}
            line |= {"is": "below" if claim.below else "above", "threshold": claim.threshold}
            line |= {**setting(claim.arm, members), "train_top1": trained[0], "train_top1_against": trained[1]}
            line |= {**numbers, "attention": row["attention"]}
            line |= {"verdict": claim.verdict(row, min(trained, key=lambda value: (value == value, value)))}
            rows.append(line)
    return sorted(rows, key=lambda row: str(row["study"]))


def all_claims(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows of evidence_claims.csv, from the tables in a folder."""
    every, rows = studies(), []
    for part in ("evidence", "evidence_gpu"):
        rows += judged(read(results / f"{part}.csv"), read(results / f"{part}_differences.csv"), every)
    if not rows:
        return []
    names = ("source", "claim", "study", "verdict")
    stated: list[dict[str, Any]] = [dict(zip(names, claim, strict=True)) for claim in STATED]
    for row in read(results / "grafit_claims.csv"):
        table, _, claim = row["claim"].partition(": ")
        numbers = {"runs": row["seeds"], **{name: row[name] for name in NUMBERS if name in row}}
        line: dict[str, Any] = {"source": f"{GRAFIT}, {table}", "claim": claim, "study": "grafit_claims.csv"}
        line |= {"is": "above", "threshold": row["more_than"], **numbers, "verdict": of_grafit(row)}
        stated.append(line)
    stated += of_small_recipes(read(results / "small_recipes.csv"))
    return rows + [dict.fromkeys(rows[0], "") | row for row in stated]


if __name__ == "__main__":
    write(RESULTS / "evidence_claims.csv", all_claims())
