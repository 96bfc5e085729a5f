"""The papers' claims, each as a difference of two arms: confirmed, refuted, or not decidable here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from studies import FINE_TUNED, LATEST, LONGER, MORE_ATTENTION, PLAIN_VIT, SAME_COMPUTE


@dataclass(frozen=True)
class Claim:
    """`arm` − `against` of a metric lies above `threshold`, or below it."""

    source: str
    says: str
    study: str
    """Name or glob: a claim is judged in every study of that name."""
    arm: str
    against: str
    metrics: tuple[str, ...] = ("clean",)
    threshold: float = 0.0
    below: bool = False
    attends: bool = True
    """About attention: not decidable from runs whose attention slept."""


ROBUST = ("noise", "corruptions", "fgsm@1", "fgsm@2", "pgd@1")
T_CNN, PRS = "T-CNN (d'Ascoli et al. 2021)", "PRS (Lee et al. 2022)"
AWAKE = ("recast, images", "recast, images, rates as fine-tuned")
CLAIMS = (
    *(
        Claim("ours", says, "a-*", arm, against, metrics, threshold)
        for arm in AWAKE
        for says, against, metrics, threshold in (
            ("a recast network is not worse than a fine-tuned one", FINE_TUNED, ("clean",), -0.3),
            ("a recast network is more robust than a fine-tuned one", FINE_TUNED, ROBUST, 0.0),
            ("… and than one with the same compute", SAME_COMPUTE, ROBUST, 0.0),
            ("… and than one trained as long", LONGER, ("clean", *ROBUST), 0.0),
        )
    ),
    *(
        claim
        for arm in ("recast, sigmoid", "recast, images")
        for claim in (
            Claim(
                f"{T_CNN}, Table 1", "fine-tuning with attention beats fine-tuning", "b-controls", arm, FINE_TUNED,
            ),
            Claim(
                f"{T_CNN}, Table 3", "attention makes more robust than fine-tuning", "b-controls", arm, FINE_TUNED,
                ROBUST,
            ),
            Claim(
                f"{T_CNN}, Table 3", "… and than the same compute without it", "b-controls", arm,
                SAME_COMPUTE, ROBUST,
            ),
        )
    ),
    *(
        Claim(
            f"{T_CNN}, Table 2", "recasting in the middle beats recasting at the start", "c-when",
            f"{kind}, after {share}", f"{kind}, after 0%",
        )
        for kind in ("exact", "sigmoid") for share in ("25%", "50%")
    ),
    *(
        Claim(f"{T_CNN}, Table 2", "… and never recasting", "c-when", f"{kind}, after {share}", "convolution")
        for kind in ("exact", "sigmoid") for share in ("25%", "50%")
    ),
    Claim(f"{PRS}, Table 3", "layer by layer beats all at once", "d-prs", "PRS", "two-stage"),
    Claim(
        f"{PRS}, Table 3", "layer by layer beats all at once, with C-MHSA", "d-prs", "PRS, C-MHSA",
        "two-stage, C-MHSA",
    ),
    Claim(f"{PRS}, Table 3", "layers that leave the convolution later beat a plain ViT", "d-prs", "PRS", PLAIN_VIT),
    Claim("ours", "attention that starts as convolutions beats a plain ViT", "d-prs", "from the start", PLAIN_VIT),
    Claim("ours", "… and convolutions", "d-prs", "from the start", "convolution"),
    Claim(f"{PRS}, Sec. 5", "the last layer first beats the first layer first", "d-prs", "PRS", "reversed"),
    *(
        Claim(
            f"{PRS}, Fig. 3", f"more attention: {says}", "d-prs", arm, LATEST, (f"delta(pi), {block} block",),
            below=block == "last",
        )
        for arm in MORE_ATTENTION
        for block, says in (("first", "less low-pass the first block"), ("last", "more low-pass the last"))
    ),
    *(
        Claim(
            f"{PRS}, Fig. 1", "a convolutional start beats a plain ViT where images are few", study,
            "exact, after 0%", PLAIN_VIT,
        )
        for study in ("f-scale-*", "c-when")
    ),
    Claim(
        "PatchConvNet (Touvron et al. 2021), Table 5", "attention pooling beats the average", "g-pooling", "one map",
        "average", attends=False,
    ),
    Claim(
        "ours", "attention pooling that starts as the average beats the average", "g-pooling",
        "one map, as the average", "average", ("clean", *ROBUST), attends=False,
    ),
    Claim(
        "PatchConvNet (Touvron et al. 2021), Table 5", "a map a class costs no accuracy", "g-pooling",
        "a map a class", "one map", threshold=-0.3, attends=False,
    ),
)  # fmt: skip


def judged(differences: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every claim, study and metric that was measured."""
    rows = []
    for found in differences:
        for claim in CLAIMS:
            same = (claim.arm, claim.against) == (found["arm"], found["against"])
            if not (same and fnmatchcase(found["study"], claim.study) and found["metric"] in claim.metrics):
                continue
            if claim.attends and found["attention"] == "asleep":
                verdict = "not decidable: attention slept"
            elif found["low_95"] > claim.threshold:
                verdict = "refuted" if claim.below else "confirmed"
            elif found["high_95"] < claim.threshold:
                verdict = "confirmed" if claim.below else "refuted"
            else:
                verdict = "not decidable"
            numbers = {name: found[name] for name in ("runs", "difference", "low_95", "high_95", "detectable")}
            rows.append(
                {
                    "source": claim.source, "claim": claim.says, "study": found["study"], "arm": claim.arm,
                    "against": claim.against, "metric": found["metric"], "is": "below" if claim.below else "above",
                    "threshold": claim.threshold, **numbers,
                    "verdict": verdict,
                }
            )  # fmt: skip
    return rows
