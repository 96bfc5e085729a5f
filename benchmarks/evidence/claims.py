"""The papers' claims, each as a difference of two arms: confirmed, refuted, or not decidable here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Claim:
    """`arm` − `against` of a metric lies above `more_than` points."""

    source: str
    says: str
    study: str
    """Name or glob: a claim is judged in every study of that name."""
    arm: str
    against: str
    metrics: tuple[str, ...] = ("clean",)
    more_than: float = 0.0
    attends: bool = True
    """About attention: not decidable from runs whose attention slept."""


ROBUST = ("noise", "corruptions", "fgsm@1", "fgsm@2", "pgd@1")
T_CNN, PRS = "T-CNN (d'Ascoli et al. 2021)", "PRS (Lee et al. 2022)"
AWAKE = ("recast, images", "recast, images, rates as fine-tuned")
CLAIMS = (
    *(
        Claim("ours", says, "a-*", arm, against, metrics, more_than)
        for arm in AWAKE
        for says, against, metrics, more_than in (
            ("a recast network is not worse than a fine-tuned one", "fine-tuned", ("clean",), -0.3),
            ("a recast network is more robust than a fine-tuned one", "fine-tuned", ROBUST, 0.0),
            ("… and than one with the same compute", "fine-tuned, stride removed", ROBUST, 0.0),
        )
    ),
    Claim(
        f"{T_CNN}, Table 1", "fine-tuning with attention beats fine-tuning", "b-controls", "recast, sigmoid",
        "fine-tuned",
    ),
    Claim(
        f"{T_CNN}, Table 3", "the robustness is attention's, not fine-tuning's", "b-controls", "recast, sigmoid",
        "fine-tuned, stride removed", ROBUST,
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
    Claim(f"{PRS}, Table 3", "a convolutional start beats a plain ViT", "d-prs", "PRS", "plain ViT"),
    Claim(f"{PRS}, Sec. 5", "the last layer first beats the first layer first", "d-prs", "PRS", "reversed"),
    Claim(
        f"{PRS}, Fig. 1", "a convolutional start beats a plain ViT where images are few", "f-scale-*",
        "recast from the start", "plain ViT",
    ),
    Claim(
        "PatchConvNet (Touvron et al. 2021), Table 5", "attention pooling beats the average", "g-pooling", "one map",
        "average", attends=False,
    ),
    Claim(
        "PatchConvNet (Touvron et al. 2021), Table 5", "a map a class costs no accuracy", "g-pooling",
        "a map a class", "one map", more_than=-0.3, attends=False,
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
            elif found["low_95"] > claim.more_than:
                verdict = "confirmed"
            elif found["high_95"] < claim.more_than:
                verdict = "refuted"
            else:
                verdict = "not decidable"
            numbers = {name: found[name] for name in ("runs", "difference", "low_95", "high_95", "detectable")}
            rows.append(
                {
                    "source": claim.source, "claim": claim.says, "study": found["study"], "arm": claim.arm,
                    "against": claim.against, "metric": found["metric"], "more_than": claim.more_than, **numbers,
                    "verdict": verdict,
                }
            )  # fmt: skip
    return rows
