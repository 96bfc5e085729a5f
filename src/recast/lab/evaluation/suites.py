"""Names, options and metrics of the suites of `recast evaluate`, for command line, evaluation and report.

This table has the suites of classification and of every task; a task registers its own (`recast.lab.task`), and papers
add theirs. A suite names the module that measures it (`recast.lab.evaluation.evaluators`). Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["accuracy", "attack", "corruption", "test set", "cost", "table"]


@dataclass(frozen=True)
class Metric:
    """A measured number. `top1` also describes `top1@4` (a setting) and `top1/fog/3` (a part)."""

    label: str
    unit: str = "%"
    """"%", "" for a plain number, or a unit such as images."""
    lower_is_better: bool = False
    is_cost: bool = False
    """True if two values are compared by their ratio, not by their difference."""
    meaning: str = ""
    """Explanation for the glossary."""
    by_class: bool = False
    """True if `NAME/CLASS` is the value for a single class."""

    @property
    def in_text(self) -> str:
        """The label inside a sentence: `box AP`, `mIoU`."""
        return self.label[0].lower() + self.label[1:] if self.label[1:2].islower() else self.label

    @property
    def is_fraction(self) -> bool:
        """True for a plain number that is not a cost, such as a loss or a cosine: it needs more decimals."""
        return not self.unit and not self.is_cost

    @property
    def is_accuracy(self) -> bool:
        """True for a share of right answers in percent."""
        return self.unit == "%" and not self.lower_is_better


METRICS = {
    "top1": Metric("Top-1", meaning="share of images whose likeliest class is the right one"),
    "top5": Metric("Top-5", meaning="share of images whose right class is among the five likeliest"),
    "map": Metric(
        "mAP", meaning="mean average precision: how high images of the (query's) class are ranked among all images"
    ),
    "balanced": Metric("Balanced accuracy", meaning="share of a class’s images that are right, mean over classes"),
    "f1": Metric("F1", meaning="harmonic mean of precision and recall; macro: mean over classes", by_class=True),
    "auroc": Metric(
        "AUROC", meaning="how often an image of a class is ranked above one of another class; macro: mean over classes",
        by_class=True,
    ),
    "mce": Metric("mCE", lower_is_better=True, meaning="mean corruption error relative to AlexNet’s, which is 100"),
    "loss": Metric("Loss", "", lower_is_better=True, meaning="cross-entropy of the predictions with the labels"),
    "no_gradient": Metric(
        "Images without a gradient", lower_is_better=True,
        meaning="images on which the attack finds a gradient of 0: their accuracy says little about robustness",
    ),
    "parameters": Metric("Parameters", "", lower_is_better=True, is_cost=True, meaning="number of learned weights"),
    "macs": Metric("MACs per image", "", lower_is_better=True, is_cost=True, meaning="multiply-adds for one image"),
    "images_per_second": Metric(
        "Images per second", "", is_cost=True, meaning="measured on this machine, the networks taking turns"
    ),
    "peak_memory": Metric(
        "Peak memory", "bytes", lower_is_better=True, is_cost=True,
        meaning="largest memory during inference on a batch; training also keeps activations",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Description of a suite."""

    label: str
    help: str
    """One line for the command line."""
    kind: Kind
    metrics: tuple[str, ...] = ("top1",)
    setting: str = ""
    """Format of the setting in NAME@SETTING, such as "ε = {}/255"."""
    short: str = ""
    """Short label for a figure's title; empty: the label."""
    needs: str = ""
    """Required data set and where to get it; empty: the images of the run."""
    by_cost: tuple[str, ...] = ()
    """Metrics that a report draws against cost."""
    default: bool = False
    """True if `recast evaluate` measures it by default."""
    task: str = "classify"
    """Name of its task; empty: any task."""
    module: str = ""
    """The module that measures it: it has a function that `evaluates` the suite."""

    @property
    def needs_rgb(self) -> bool:
        """True if it requires RGB pixels in [0, 1]."""
        return self.kind in ("attack", "corruption", "test set")

    @property
    def title(self) -> str:
        """The label for figures."""
        return self.short or self.label


TOP = ("top1", "top5")
EPS = "ε = {}/255"
HERE = "recast.lab.evaluation."
SUITES = {
    "clean": Suite(
        "Clean images", "top-1, top-5, loss", "accuracy", (*TOP, "loss"), default=True, module=HERE + "accuracy",
    ),
    "classes": Suite(
        "Classes of unequal size", "balanced accuracy, macro F1 and AUROC", "accuracy", ("balanced", "f1", "auroc"),
        module=HERE + "class_metrics",
    ),
    "fgsm": Suite(
        "FGSM, one gradient step", "white-box L∞ attack of one step, ε in 1/255 of a [0, 1] pixel", "attack",
        ("top1", "no_gradient"), EPS, short="FGSM", default=True, module=HERE + "attacks",
    ),
    "pgd": Suite(
        "PGD, iterated in an L∞ ball", "white-box L∞ attack of several steps, ε in 1/255 of a [0, 1] pixel", "attack",
        setting=EPS, short="PGD", default=True, module=HERE + "attacks",
    ),
    "basic": Suite(
        "Corrupted images, five kinds", "five built-in corruptions × 5 severities, at least 8×8 pixels", "corruption",
        short="Five corruptions", default=True, module=HERE + "basic_corruptions",
    ),
    "corruptions": Suite(
        "Corruptions, made on the fly (not the released ImageNet-C)",
        "ImageNet-C's 15 corruptions × 5 severities, made on the fly, at least 32×32 pixels", "corruption",
        short="Corruptions (on the fly)", module=HERE + "imagenet_corruptions",
    ),
    "imagenet-c": Suite(
        "ImageNet-C", "the released ImageNet-C: mean top-1 and mCE", "corruption", ("top1", "mce"),
        needs="noise.tar, blur.tar, weather.tar and digital.tar of ImageNet-C, linked at github.com/hendrycks/"
        "robustness, together in one folder imagenet-c", module=HERE + "imagenet_sets",
    ),
    "imagenet-a": Suite(
        "ImageNet-A", "natural adversarial examples of 200 classes", "test set", TOP,
        needs="imagenet-a.tar, linked at github.com/hendrycks/natural-adv-examples", module=HERE + "imagenet_sets",
    ),
    "imagenet-r": Suite(
        "ImageNet-R", "paintings, toys and other renditions of 200 classes", "test set", TOP,
        needs="imagenet-r.tar, linked at github.com/hendrycks/imagenet-r", module=HERE + "imagenet_sets",
    ),
    "imagenet-v2": Suite(
        "ImageNet-V2", "a second test set of all 1,000 classes (matched frequency)", "test set", TOP,
        needs="imagenetv2-matched-frequency.tar.gz, linked at github.com/modestyachts/ImageNetV2",
        module=HERE + "imagenet_sets",
    ),
    "imagenet-real": Suite(
        "ImageNet-ReaL", "ImageNet's validation images with ReaL's labels", "test set", TOP,
        needs="ImageNet's validation images under their own names; the labels come with timm",
        module=HERE + "imagenet_sets",
    ),
    "resolution": Suite(
        "Test resolution", "accuracy at other test sizes (--sizes)", "accuracy", setting="{}", module=HERE + "accuracy",
    ),
    "knn": Suite(
        "Nearest neighbours of the features", "nearest training images by features", "accuracy", setting="k = {}",
        module=HERE + "knn",
    ),
    "cost": Suite(
        "Cost", "parameters, MACs, images per second, peak memory", "cost",
        ("parameters", "macs", "images_per_second", "peak_memory"), default=True, task="", module=HERE + "cost",
    ),
    "fourier": Suite(
        "Fourier curves", "table: Δ log amplitude of the features by block and frequency", "table", (),
        default=True, task="", module=HERE + "analyses",
    ),
    "cka": Suite(
        "Similarity (CKA)", "table: similarity of the layers of parent and recast model", "table", (),
        task="", module=HERE + "analyses",
    ),
    "agreement": Suite(
        "Agreement", "table: every model's prediction for every image", "table", (), default=True,
        module=HERE + "analyses",
    ),
    "frontier": Suite(
        "Heads closed one by one", "table: top-1, clean and under noise, and milliseconds as heads close",
        "table", (), module=HERE + "frontier",
    ),
    "multilabel": Suite(
        "Labels", "mAP, F1 at 0.5 and AUROC, also per class (data with several labels)", "accuracy",
        ("map", "f1", "auroc"), default=True, task="multilabel", module="recast.lab.tasks.multilabel.evaluation",
    ),
}  # fmt: skip

CATEGORIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
"""The 15 corruptions of ImageNet-C."""
SEVERITIES = (1, 2, 3, 4, 5)
PER_CORRUPTION = re.compile(r"^top1/(?P<kind>.+)/(?P<severity>\d+)$")


def of_kind(*kinds: Kind) -> list[str]:
    """Return the names of the suites of these kinds, in the order of the table."""
    return [name for name, suite in SUITES.items() if suite.kind in kinds]


def base(metric: str) -> str:
    """Return the name of a metric without setting or part: `top1` for `top1@4` and `top1/blur/3`."""
    return metric.partition("@")[0].partition("/")[0]


def is_of_class(metric: str) -> bool:
    """Return True for the value of a single class: `iou/dog`."""
    name, slash, _ = metric.partition("/")
    return bool(slash) and name in METRICS and METRICS[name].by_class
