"""The papers' claims, each as a difference of two arms, and whether it holds here.

No study has the gate, layer, stride, optimizer and length of a paper's table together, so none confirms or refutes one:
a claim holds here, does not hold here, or is not decidable. Each row names its setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from studies import FINE_TUNED, LATEST, LONGER, MORE_ATTENTION, PAPERS_OWN, PLAIN_VIT, SAME_COMPUTE, Study


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
    unfit: str = ""
    """The reason why these runs cannot decide the claim, whatever they measured."""

    def verdict(self, row: Mapping[str, Any]) -> str:
        """Return the verdict of a row of evidence_differences.csv on the claim."""
        if self.unfit:
            return f"not decidable: {self.unfit}"
        if self.attends and row["attention"] == "asleep":
            return "not decidable: attention slept"
        if float(row["low_95"]) > self.threshold:
            return "does not hold here" if self.below else "holds here"
        if float(row["high_95"]) < self.threshold:
            return "holds here" if self.below else "does not hold here"
        return "not decidable"


ROBUST = ("noise", "corruptions", "fgsm@1", "fgsm@2", "pgd@1")
T_CNN, PRS = "T-CNN (d'Ascoli et al. 2021)", "PRS (Lee et al. 2022)"
PATCHCONVNET = "PatchConvNet (Touvron et al. 2021), Table 5"
POOL_BEATS = "attention pooling beats the average"
AWAKE = ("recast, images", "recast, images, rates as fine-tuned")
TOO_SHORT = "8 epochs of a three-stage ResNet, a LayerScale start for 60 blocks"
BOTH = "[bi]-con*"
"""b-controls and i-converged."""
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
        for arm in ("recast, sigmoid", "recast, images", PAPERS_OWN)
        for source, study, against, metrics, statement in (
            (f"{T_CNN}, Table 1", BOTH, FINE_TUNED, ("clean",), "fine-tuning with attention beats fine-tuning"),
            (f"{T_CNN}, Table 3", BOTH, FINE_TUNED, ROBUST, "attention makes more robust (here: than fine-tuning)"),
            ("ours", "b-*", SAME_COMPUTE, ROBUST, "attention makes more robust than the same compute without it"),
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
        Claim(PATCHCONVNET, f"{POOL_BEATS}{note}", study, arm, "average", attends=False, unfit=unfit)
        for note, study, arm, unfit in (
            ("", "g-pooling", "one map", TOO_SHORT),
            (" (LayerScale from 0.1)", "g-pooling-start", "one map, from 0.1", "8 epochs of a three-stage ResNet"),
            (" (100 epochs)", "k-pooling-long", "one map, from 0.1", ""),
        )
    ),
    Claim(
        PATCHCONVNET, "a token for every class costs accuracy", "g-pooling", "a map a class", "one map", below=True,
        attends=False, unfit=TOO_SHORT,
    ),
    Claim(
        "ours", "attention pooling that starts as the average beats the average", "g-pooling",
        "one map, as the average", "average", ("clean", *ROBUST), attends=False,
    ),
)  # fmt: skip


def setting(arm: str, members: Iterable[Study], scores: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return gate, stride and epochs of an arm in its studies, and the mean of its runs' top-1 on training images."""
    jobs = [study.job(arm) for study in members]
    gates = {("none: C-MHSA" if job.gate == "bias" else job.gate) if job.where else "" for job in jobs}
    epochs = [round(job.num_updates * job.batch_size / job.num_train, 1) for job in jobs]
    names = {job.study for job in jobs}
    trained = [
        float(row["train_top1"])
        for row in scores
        if row["study"] in names and (row["arm"], row["metric"]) == (arm, "clean")
    ]
    return {
        "gate": ", ".join(sorted(gates)), "stride": ", ".join(sorted({job.stride for job in jobs})),
        "epochs": " to ".join(f"{value:g}" for value in sorted({min(epochs), max(epochs)})),
        "train_top1": round(sum(trained) / len(trained), 1),
    }  # fmt: skip


def judged(
    scores: list[dict[str, Any]], differences: Iterable[Mapping[str, Any]], studies: Mapping[str, Study]
) -> list[dict[str, Any]]:
    """Return a row per claim, study and metric that was measured, from the rows of the other two tables."""
    rows = []
    for row in differences:
        for claim in CLAIMS:
            is_same = (claim.arm, claim.against) == (row["arm"], row["against"])
            if not (is_same and fnmatchcase(row["study"], claim.study) and row["metric"] in claim.metrics):
                continue
            # a name that ends in * stands for the studies whose runs were compared together
            members = [s for s in studies.values() if fnmatchcase(s.name, row["study"]) and claim.arm in s.arms]
            numbers = {name: row[name] for name in ("runs", "difference", "low_95", "high_95", "detectable")}
            rows.append(
                {
                    "source": claim.source, "claim": claim.statement, "study": row["study"], "arm": claim.arm,
                    "against": claim.against, "metric": row["metric"], "is": "below" if claim.below else "above",
                    "threshold": claim.threshold, **setting(claim.arm, members, scores), **numbers,
                    "verdict": claim.verdict(row),
                }
            )  # fmt: skip
    return sorted(rows, key=lambda row: str(row["study"]))
