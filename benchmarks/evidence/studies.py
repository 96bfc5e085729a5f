"""The studies: which parents, images, arms and rates, as plain data.

Every arm's rates are chosen on the 10 % of the training images that are held out, each from as many trials as the
others' (`trials`), and the test images are looked at once for each final run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from job import Job

C100 = "cifar100_resnet20_chenyaofo.safetensors"
C10 = "cifar10_resnet20_akamaster.safetensors"
RATES = (3e-4, 1e-3, 3e-3)
"""Trials of an arm without gates; a recast arm has the first two, each with both rates of its gates, less one."""
TUNING_SEED = 100


@dataclass(frozen=True)
class Study:
    """Runs that are compared with each other."""

    name: str
    claim: str
    base: Job
    arms: dict[str, dict[str, object]]
    control: str = "fine-tuned"
    tuned_on: str | None = None
    """Another study, whose choice of rates is taken over; None: its own."""

    def trials(self, arm: str) -> list[Job]:
        """The runs that choose an arm's rates: three for each."""
        job = replace(self.base, arm=arm, seed=TUNING_SEED, tuning=True, **self.arms[arm])  # type: ignore[arg-type]
        if job.where is None:
            return [replace(job, lr=lr) for lr in RATES]
        return [replace(job, lr=lr, gate_lr=gates) for lr, gates in ((1e-3, 1e-2), (1e-3, 1e-3), (3e-3, 1e-2))]

    def finals(self, arm: str, seeds: range, chosen: Job) -> list[Job]:
        """The runs that are compared, with the rates that were chosen."""
        rates = {"lr": chosen.lr, "gate_lr": chosen.gate_lr}
        job = replace(self.base, arm=arm, **{**self.arms[arm], **rates})  # type: ignore[arg-type]
        return [replace(job, seed=seed) for seed in seeds]


LAST = {"where": "last_stage"}
STARTS: dict[str, dict[str, object]] = {
    "fine-tuned": {},
    "fine-tuned, stride removed": {"stride": "remove"},
    "fine-tuned, three times as long": {"longer": 3},
    "recast, zero": {**LAST, "query_key": "zero"},
    "recast, random": {**LAST, "query_key": "random", "qk_lr": 1e-2},
    "recast, similar": {**LAST, "query_key": "similar"},
    "recast, images": {**LAST, "query_key": "images"},
}


TUNED_ON = "a-cifar100-cifar10-4000"


def transfer(parent: str, trained_on: str, data: str, num_train: int, updates: int) -> Study:
    """What a user does: trained weights, new classes, few images."""
    base = Job("", "", 0, parent, trained_on, data, num_train, updates)
    name = f"a-{trained_on}-{data}-{num_train}"
    claim = "recast ≥ fine-tuned on clean images, better under noise, corruptions, FGSM and PGD"
    return Study(name, claim, replace(base, study=name), STARTS, tuned_on=None if name == TUNED_ON else TUNED_ON)


STUDIES = {
    study.name: study
    for study in (
        transfer(C100, "cifar100", "cifar10", 4000, 930),
        transfer(C100, "cifar100", "cifar10", 1000, 470),
        transfer(C100, "cifar100", "cifar10", 14400, 1400),
        transfer(C10, "cifar10", "cifar100", 18000, 1400),
    )
}
