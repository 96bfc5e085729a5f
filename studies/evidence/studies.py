"""The studies as plain data: networks, images, arms and rates.

Every arm's rates are chosen on the 10 % of the training images that are held out, from the same number of trials
(`Study.num_trials`). Each final run sees the test images once. Arms that differ only in when they leave the convolution
share the rates of the arm that `rates_of` names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from recast.layers.config import QueryKey
from recast.layers.pool_config import PoolKind, PoolStart

Arms = dict[str, dict[str, Any]]

C100 = "cifar100_resnet20_chenyaofo.safetensors"
C10 = "cifar10_resnet20_akamaster.safetensors"
TUNING_SEED = 100
LINEAR_GATES = ((1e-3, 1e-2), (1e-3, 1e-3), (3e-3, 1e-2), (3e-3, 1e-3))
SIGMOID_GATES = ((1e-3, 1e-2), (1e-3, 1e-1), (3e-3, 1e-2), (3e-3, 1e-1))
"""Trials of an arm with gates: rates of the weights and of γ and s, or of λ (0.1 in T-CNN)."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Trials of an arm without gates."""


@dataclass(frozen=True)
class Job:
    """A training run: network, images, arm and rates. Stored records have these fields."""

    study: str
    arm: str
    seed: int
    data: str
    """cifar10 or cifar100."""
    num_train: int
    updates: int
    network: str = "cifar_resnet20.cifar100"
    """A timm name, whose tag gives mean and standard deviation, or "plain_vit_tiny"."""
    parent: str | None = None
    """A file in $RECAST_DATA/weights, or STUDY/ARM: the weights of that run of the same seed. None: random weights."""
    parent_data: str | None = None
    """The parent's data set; if it is not `data`, the head is new."""
    size: int = 32
    """Side of the images in pixels; they are resized if theirs differs."""
    lr: float = 1e-3
    batch_size: int = 64
    gate_lr: float = 1e-2
    qk_lr: float | None = None
    weight_decay: float = 0.05
    where: str | None = None
    """Layers that are recast; None: none."""
    gate: str = "linear"
    query_key: QueryKey = "zero"
    logit_std: float = 1.5
    schedule: Literal["at_once", "last_first", "first_first"] = "at_once"
    """All layers at once after a share `convolution` of the updates, or layer by layer (PRS) from one end."""
    convolution: float = 0.0
    stride: Literal["keep", "remove"] = "keep"
    """remove: the last stage at stride 1. Without recast layers this is the compute of attention alone."""
    pool: PoolKind = "none"
    pool_start: PoolStart = "paper"
    pool_init: float | None = None
    """LayerScale's first value; None: that of `pool_start`, 1e-4 for "paper"."""
    augment: Literal["basic"] = "basic"
    """Crop and flip."""
    bf16: bool = False
    """True to train in bf16 on a CPU too, as on a GPU. Evaluation is in fp32."""
    longer: float = 1
    """Factor on `updates`: longer training instead of attention."""
    measured: Literal["all", "clean", "fourier"] = "all"
    """fourier: clean, and the spectra of the blocks' maps."""
    tuning: bool = False
    """True for a trial: evaluated on the held-out 10 %, not on the test images."""

    @property
    def folder(self) -> str:
        """Return STUDY/ARM-SEED, with the rates for a trial."""
        rates = f"-lr{self.lr:g}-gates{self.gate_lr:g}-qk{self.qk_lr}" if self.tuning else ""
        return f"{self.study}/{self.arm.replace(' ', '_').replace('/', 'of')}-{self.seed}{rates}"

    @property
    def num_updates(self) -> int:
        """Return the number of updates of this arm."""
        return round(self.longer * self.updates)


@dataclass(frozen=True)
class Study:
    """Runs that are compared with one another."""

    base: Job
    arms: Arms
    pairs: tuple[tuple[str, str], ...]
    """Each arm and its control."""
    tuned_on: str | None = None
    """The study that chooses the rates; None: this one."""
    rates_of: dict[str, str] = field(default_factory=dict)
    """Arm → the arm that chooses its rates; default: itself."""
    num_trials: int = 3
    """Trials per arm; four from random weights, where the best rates are higher."""
    rates_fixed: bool = False
    """True if the rates of every arm are given and none is tried."""
    needs: str | None = None
    """The study whose final runs are the parents."""

    @property
    def name(self) -> str:
        """Return the study's name, as its runs have it."""
        return self.base.study

    def job(self, arm: str, **fields: Any) -> Job:
        """Return a run of an arm."""
        return replace(self.base, arm=arm, **{**self.arms[arm], **fields})

    def trials(self, arm: str) -> list[Job]:
        """Return the runs that choose an arm's rates, [] if it takes those of another arm or study."""
        if self.rates_fixed or self.tuned_on is not None or arm in self.rates_of:
            return []
        job = self.job(arm, seed=TUNING_SEED, tuning=True)
        if job.where is None or job.gate == "bias":
            return [replace(job, lr=lr) for lr in RATES[: self.num_trials]]
        rates = SIGMOID_GATES if job.gate == "sigmoid" else LINEAR_GATES
        return [replace(job, lr=lr, gate_lr=gates) for lr, gates in rates[: self.num_trials]]


LAST: dict[str, Any] = {"where": "last_stage"}
IMAGES: dict[str, Any] = {"query_key": "images"}
SIGMOID: dict[str, Any] = {"gate": "sigmoid"}
FINE_TUNED = "fine-tuned"
SAME_COMPUTE = "fine-tuned, stride removed"
LONGER = "fine-tuned, three times as long"
CHOSEN = "recast, images, rates as fine-tuned"
TRANSFER: Arms = {
    FINE_TUNED: {},
    SAME_COMPUTE: {"stride": "remove"},
    LONGER: {"longer": 3},
    "recast, zero": {**LAST, "query_key": "zero"},
    "recast, images": {**LAST, **IMAGES},
    CHOSEN: {**LAST, **IMAGES},
}
STARTS: Arms = {
    "recast, random": {**LAST, "query_key": "random"},
    "recast, similar": {**LAST, "query_key": "similar"},
    "recast, images, keys 10 times as fast": {**LAST, **IMAGES, "qk_lr": 1e-2},
    "recast, images, keys 100 times as fast": {**LAST, **IMAGES, "qk_lr": 1e-1},
}
"""Other starts and rates of queries and keys; the rest is as in CHOSEN."""


def against(control: str, arms: Arms) -> tuple[tuple[str, str], ...]:
    """Pair every other arm with the control."""
    return tuple((arm, control) for arm in arms if arm != control)


def transfers() -> list[Study]:
    """a. A user's case: trained weights, new classes, few images."""
    result: list[Study] = []
    for network, parent, trained_on, data, num_train, updates in (
        ("cifar_resnet20.cifar100", C100, "cifar100", "cifar10", 4000, 930),
        ("cifar_resnet20.cifar100", C100, "cifar100", "cifar10", 1000, 470),
        ("cifar_resnet20.cifar100", C100, "cifar100", "cifar10", 14400, 1400),
        ("cifar_resnet20_a", C10, "cifar10", "cifar100", 18000, 1400),
    ):
        study = f"a-{trained_on}-{data}-{num_train}"
        base = Job(study, "", 0, data, num_train, updates, network, parent, trained_on)
        tuned_on = result[0].name if result else None
        rates_of = dict.fromkeys((CHOSEN, SAME_COMPUTE), FINE_TUNED)
        recast = [arm for arm in TRANSFER if arm.startswith("recast")]
        pairs = against(FINE_TUNED, TRANSFER) + tuple((arm, SAME_COMPUTE) for arm in recast)
        result.append(Study(base, TRANSFER, (*pairs, (CHOSEN, LONGER)), tuned_on, rates_of))
    tuned, few, *_ = result
    arms = {arm: TRANSFER[arm] for arm in (FINE_TUNED, CHOSEN)} | STARTS
    pairs = against(FINE_TUNED, arms) + tuple((arm, CHOSEN) for arm in STARTS)
    base = replace(few.base, study="a-starts")
    return [*result, Study(base, arms, pairs, tuned.name, dict.fromkeys(arms, FINE_TUNED))]


def recipe() -> Study:
    """h. Our recipe `cifar10` with its gates' rate, a lower and a higher one: is attention awake, and does that help?

    Crop and flip stand for its augmentation.
    """
    base = Job("h-recipe", "", 0, "cifar10", 4000, 310, "cifar_resnet20.cifar100", C100, "cifar100")
    base = replace(base, lr=1e-4, batch_size=128, bf16=True)
    arms: Arms = {FINE_TUNED: {}}
    for rate in (1e-3, 1e-2, 3e-2):
        arms[f"recast, gates {rate:g}"] = {**LAST, **IMAGES, "gate_lr": rate}
    return Study(base, arms, against(FINE_TUNED, arms), rates_fixed=True)


def controls() -> list[Study]:
    """b. T-CNN's Tables 1 and 3 with two controls: the parent fine-tuned as long, and the compute without attention."""
    base = Job("b-parents", "", 0, "cifar10", 14400, 4500, "cifar_resnet20.cifar100", bf16=True)
    parents = Study(base, {"parent": {}}, ())
    arms: Arms = {
        FINE_TUNED: {},
        SAME_COMPUTE: {"stride": "remove"},
        "recast, sigmoid": {**LAST, **SIGMOID},
        "recast, images": {**LAST, **IMAGES},
        "recast, zero": {**LAST},
    }
    base = replace(base, study="b-controls", parent="b-parents/parent", parent_data=base.data, updates=1400)
    pairs = (*against(FINE_TUNED, arms), *((arm, SAME_COMPUTE) for arm in arms if arm.startswith("recast")))
    rates_of = dict.fromkeys(("recast, images", "recast, zero"), FINE_TUNED)  # as (a) found
    return [parents, Study(base, arms, pairs, rates_of=rates_of, needs="b-parents")]


SIGMOID_REMOVED = "recast, sigmoid, stride removed"
"""The paper's gate, at its α = λ = 1. W_key = 0 is ours: the text gives no start of queries and keys."""
SIGMOID_AWAKE = "recast, sigmoid, images"
SIGMOID_AWAKE_REMOVED = "recast, sigmoid, images, stride removed"
"""The same with queries and keys from images: awake at the start."""
OURS_REMOVED = "recast, images, stride removed"


def converged() -> Study:
    """i. T-CNN's Tables 1 and 3 from a parent that has converged on the images that it is fine-tuned on.

    The paper's rates (AdamW 1e-4, 0.1 for λ, cosine), warm-up for a twentieth (the paper: a tenth); crop and flip, with
    which the parent was trained, stand for its augmentation.

    Stated before the first run: each difference to FINE_TUNED is judged over seeds and images at 95 %; the paper's gaps
    of Table 1 are 0.3 to 0.6 points, those of interest on corruptions 1 point. LONGER and the sigmoid gate from images
    (three seeds, fp32 on a CPU) were added later and stated before their first run.
    """
    base = Job("i-converged", "", 0, "cifar10", 14400, 1400, "cifar_resnet20_a", C10, "cifar10", lr=1e-4)
    base = replace(base, gate_lr=0.1)
    arms: Arms = {
        FINE_TUNED: {},
        "recast, sigmoid": {**LAST, **SIGMOID},
        "recast, images": {**LAST, **IMAGES, "gate_lr": 1e-2},
        SAME_COMPUTE: {"stride": "remove"},
        SIGMOID_REMOVED: {**LAST, **SIGMOID, "stride": "remove"},
        OURS_REMOVED: {**LAST, **IMAGES, "gate_lr": 1e-2, "stride": "remove"},
        LONGER: {"longer": 3},
        SIGMOID_AWAKE: {**LAST, **SIGMOID, **IMAGES},
        SIGMOID_AWAKE_REMOVED: {**LAST, **SIGMOID, **IMAGES, "stride": "remove"},
    }
    removed = (SIGMOID_REMOVED, OURS_REMOVED, SIGMOID_AWAKE_REMOVED)
    pairs = (*against(FINE_TUNED, arms), *((arm, SAME_COMPUTE) for arm in removed))
    pairs += (("recast, images", LONGER),)
    return Study(base, arms, pairs, rates_fixed=True)


def converged_long() -> Study:
    """l. The same for 50 epochs with the stride removed, as the paper trains, 128 images at a time.

    Stated before the first run: attention is awake where a head in ten is; each difference is judged over seeds and
    images at 95 %; the paper's gaps to the network without attention are 0.3 to 0.6 points.
    """
    short = converged()
    base = replace(short.base, study="l-converged-long", updates=50 * 14400 // 128, batch_size=128)
    arms = {arm: short.arms[arm] for arm in (FINE_TUNED, SAME_COMPUTE, SIGMOID_REMOVED, OURS_REMOVED)}
    pairs = tuple(pair for pair in short.pairs if set(pair) <= arms.keys())
    return Study(base, arms, pairs, rates_fixed=True)


def converged_deep() -> Study:
    """m. The same on the published CIFAR-10 ResNet-56, stride kept, in bf16: nine blocks recast, 18 layers.

    Stated before the first run: three seeds; attention is awake where a head in ten is; each difference is judged over
    seeds and images at 95 %; of interest are 0.5 points clean and 1 point on corruptions.
    """
    short = converged()
    base = replace(
        short.base,
        study="m-converged-56",
        network="cifar_resnet56_a",
        parent="cifar10_resnet56_akamaster.safetensors",
        bf16=True,
    )
    arms = {arm: short.arms[arm] for arm in (FINE_TUNED, "recast, sigmoid", "recast, images")}
    return Study(base, arms, against(FINE_TUNED, arms), rates_fixed=True)


def converged_100() -> Study:
    """n. The study i from the published CIFAR-100 ResNet-20.

    Stated before the first run: five seeds; attention is awake where a head in ten is; each difference is judged over
    seeds and images at 95 %; of interest are 0.5 points clean and 1 point on corruptions.
    """
    short = converged()
    base = replace(short.base, study="n-converged-100", data="cifar100", num_train=18000)
    base = replace(base, network="cifar_resnet20.cifar100", parent=C100, parent_data="cifar100")
    return replace(short, base=base)


PLAIN_VIT = "plain ViT"


def when() -> Study:
    """c. When to recast (T-CNN's Table 2): after t₁ of the updates, from random weights; and a plain ViT, for f."""
    base = Job("c-when", "", 0, "cifar10", 14400, 2250, "digits_resnet", measured="clean", bf16=True)
    arms: Arms = {"convolution": {}}
    rates_of = {}
    for name, kind in (("exact", IMAGES), ("sigmoid", SIGMOID)):
        for share in (0.0, 0.25, 0.5, 0.75):
            arm = f"{name}, after {share:.0%}"
            arms[arm] = {**LAST, **kind, "convolution": share}
            if share:
                rates_of[arm] = f"{name}, after 0%"
    arms[PLAIN_VIT] = {"network": "plain_vit_tiny"}
    pairs = against("convolution", arms) + tuple((arm, first) for arm, first in rates_of.items())
    pairs += (("exact, after 0%", PLAIN_VIT),)
    return Study(base, arms, pairs, rates_of=rates_of, num_trials=4)


def scales() -> list[Study]:
    """f. Data scale (PRS's Fig. 1): a share of the images of c, with its updates and rates. c has all of them."""
    full = when()
    arms = {arm: full.arms[arm] for arm in ("convolution", "exact, after 0%", PLAIN_VIT)}
    pairs = tuple((arm, control) for arm, control in full.pairs if {arm, control} <= arms.keys())
    shares = (0.05, 0.1, 0.25, 0.5)
    bases = [replace(full.base, study=f"f-scale-{share:.0%}", num_train=round(14400 * share)) for share in shares]
    return [Study(base, arms, pairs, full.name) for base in bases]


MIXERS: dict[str, Any] = {"where": "blocks.*.mixer"}
LATEST = "two-stage, after 5/6"
MORE_ATTENTION = ("two-stage", "two-stage, after 1/6", "from the start")
"""e. Compared with LATEST, whose attention starts near the end."""


def progressive() -> Study:
    """d. PRS's Table 3, and e. its Fig. 3: shares of the updates as convolutions."""
    base = Job("d-prs", "", 0, "cifar10", 14400, 2800, "cmhsa_vit_3_tiny", measured="fourier", bf16=True)
    biased: dict[str, Any] = {**MIXERS, "gate": "bias"}
    exact: dict[str, Any] = {**MIXERS, **IMAGES}
    arms: Arms = {
        "convolution": {},
        LATEST: {**exact, "convolution": 5 / 6},
        "two-stage": {**exact, "convolution": 0.5},
        "two-stage, after 1/6": {**exact, "convolution": 1 / 6},
        "PRS": {**exact, "schedule": "last_first"},
        "reversed": {**exact, "schedule": "first_first"},
        "from the start": exact,
        "two-stage, C-MHSA": {**biased, "convolution": 0.5},
        "PRS, C-MHSA": {**biased, "schedule": "last_first"},
        PLAIN_VIT: {"network": "plain_vit_tiny"},
    }
    rates_of = {arm: "PRS" for arm in arms if arms[arm].get("query_key") == "images" and arm != "PRS"}
    rates_of["two-stage, C-MHSA"] = "PRS, C-MHSA"
    pairs = (*against("convolution", arms), *(("PRS", other) for other in ("two-stage", "reversed", "from the start")))
    pairs += (("PRS, C-MHSA", "two-stage, C-MHSA"), ("PRS", PLAIN_VIT), ("PRS, C-MHSA", PLAIN_VIT))
    pairs += (("from the start", PLAIN_VIT), *((arm, LATEST) for arm in MORE_ATTENTION))
    return Study(base, arms, pairs, rates_of=rates_of, num_trials=4)


def progressive_long() -> Study:
    """j. PRS's Table 3 for 100 epochs, with its own layer in every arm, on as many updates of an eighth of d's images.

    Rates are those that the arms chose in d. Stated before the first run: each difference is judged over seeds and
    images at 95 %; the paper's are 2.4 points to all at once and 7 to 18 to a plain ViT.
    """
    short = progressive()
    base = replace(short.base, study="j-prs-long", num_train=1800, lr=1e-2)
    arms = {arm: short.arms[arm] for arm in ("convolution", "two-stage, C-MHSA", "PRS, C-MHSA")}
    arms["reversed, C-MHSA"] = {**arms["PRS, C-MHSA"], "schedule": "first_first"}
    arms[PLAIN_VIT] = {**short.arms[PLAIN_VIT], "lr": 1e-3}
    pairs = (
        *against("convolution", arms),
        ("PRS, C-MHSA", "two-stage, C-MHSA"),
        ("PRS, C-MHSA", "reversed, C-MHSA"),
        ("PRS, C-MHSA", PLAIN_VIT),
        ("two-stage, C-MHSA", PLAIN_VIT),
    )
    return Study(base, arms, pairs, rates_fixed=True)


def pooling() -> Study:
    """g. Attention pooling from random weights (PatchConvNet's Table 5)."""
    base = Job("g-pooling", "", 0, "cifar100", 18000, 2250, "digits_resnet", bf16=True)
    arms: Arms = {
        "average": {},
        "one map": {"pool": "single"},
        "a map a class": {"pool": "per_class"},
        "one map, as the average": {"pool": "single", "pool_start": "average"},
    }
    pairs = (*against("average", arms), ("a map a class", "one map"), ("one map, as the average", "one map"))
    return Study(base, arms, pairs)


def pooling_start() -> Study:
    """g. The same with LayerScale from 0.1, as the thesis (3.5.1) starts networks of up to 18 blocks.

    Every arm has the rate that the average and the average's start chose above. Stated before the first run: the
    difference to the average is judged over seeds and images at 95 %; of interest is 1 point, as the paper's 0.2 cannot
    be seen with three seeds.
    """
    base = replace(pooling().base, study="g-pooling-start", lr=3e-3)
    arms: Arms = {
        "average": {},
        "one map, from 0.1": {"pool": "single", "pool_init": 0.1},
        "one map, as the average": {"pool": "single", "pool_start": "average"},
    }
    pairs = (*against("average", arms), ("one map, as the average", "one map, from 0.1"))
    return Study(base, arms, pairs, rates_fixed=True)


def pooling_long() -> Study:
    """k. Attention pooling for 100 epochs, LayerScale from 0.1, on as many images and updates as j.

    Every arm at the rate that the average and the average's start chose in g. Stated before the first run: the
    difference to the average is judged over seeds and images at 95 %; of interest is 1 point.
    """
    short = pooling_start()
    base = replace(short.base, study="k-pooling-long", data="cifar10", num_train=1800, updates=2800, measured="clean")
    return replace(short, base=base)


def studies() -> dict[str, Study]:
    """Return all studies by name, in the order in which they run."""
    result = [*transfers(), recipe(), *controls(), converged(), converged_long(), converged_deep(), converged_100()]
    result += [progressive(), progressive_long(), when(), *scales(), pooling(), pooling_start(), pooling_long()]
    return {study.name: study for study in result}
