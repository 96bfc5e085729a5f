"""Suites and metrics: what they are called, which are better when lower, and which command measures what is missing."""

from __future__ import annotations

import re

from recast.report.text.formats import NBSP

SUITES = {
    "clean": "Clean images",
    "fgsm": "FGSM, one gradient step",
    "pgd": "PGD, iterated in an L∞ ball",
    "autoattack": "AutoAttack",
    "basic": "Corruptions (basic)",
    "corruptions": "Corruptions, made on the fly (not the released ImageNet-C)",
    "imagenet-c": "ImageNet-C",
    "imagenet-a": "ImageNet-A",
    "imagenet-r": "ImageNet-R",
    "imagenet-v2": "ImageNet-V2",
    "imagenet-sketch": "ImageNet-Sketch",
    "imagenet-real": "ImageNet-ReaL",
    "sets": f"Other test sets: top-1,{NBSP}%",
    "resolution": "Test resolution",
    "frequency": "Low and high frequencies alone",
    "knn": "Nearest neighbours of the features",
    "cost": "Cost",
}
SHORT = SUITES | {"fgsm": "FGSM", "pgd": "PGD", "corruptions": "Corruptions (on the fly)"}
"""For the titles of figures."""
METRICS = {
    "top1": f"Top-1,{NBSP}%",
    "top5": f"Top-5,{NBSP}%",
    "mce": f"mCE,{NBSP}%",
    "loss": "Loss",
    "ece": f"Calibration error (ECE),{NBSP}%",
    "no_gradient": f"Images without a gradient,{NBSP}%",
    "parameters": "Parameters",
    "macs": "MACs per image",
    "images_per_second": "Images per second",
    "peak_memory": "Peak memory",
}
LOWER_IS_BETTER = {"no_gradient", "loss", "ece", "mce", "parameters", "macs", "peak_memory"}
SWEPT = {"resolution", "knn", "frequency"}
COSTS = ("parameters", "macs", "images_per_second", "peak_memory")
ACCURACIES = {"top1", "top5", "low", "high"}
CORRUPTIONS = ("imagenet-c", "corruptions", "basic")
CATEGORIES = ("noise", "blur", "weather", "digital")
PER_CORRUPTION = re.compile(r"^top1/(?P<kind>.+)/(?P<severity>\d+)$")

MISSING = {
    "clean": "accuracy, loss and calibration on clean images",
    "fgsm": "accuracy under FGSM",
    "pgd": "accuracy under PGD",
    "basic": "accuracy on corrupted images",
    "resolution": "accuracy by test resolution (T-CNN, Fig. 7)",
    "knn": "nearest neighbours of the features",
    "frequency": "accuracy on low and high frequencies alone",
    "cost": "images per second, memory, MACs and parameters",
    "fourier": "Fourier curves of the blocks (PRS, Fig. 2)",
    "heads": "attention distance, non-locality and entropy of the heads",
    "cka": "similarity of the layers before and after (CKA)",
    "agreement": "images won and lost against the parent",
}
"""Suites that every data set allows → what is not on the page without them."""


def base(metric: str) -> str:
    """`top1` of `top1@4` and `top1/blur/3`."""
    return metric.partition("@")[0].partition("/")[0]


def is_accuracy(metric: str) -> bool:
    return base(metric) in ACCURACIES
