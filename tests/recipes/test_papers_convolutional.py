"""The recipes for convolutional networks against the papers' tables, written down here once more."""

from __future__ import annotations

from typing import Any

import pytest

from recast.recipes import RECIPES, make_recipe
from recast.run.config import Recipe


def check(name: str, expected: dict[str, Any]) -> None:
    found = flat(make_recipe(name))
    assert {key: found[key] for key in expected} == expected, name


def flat(recipe: Recipe) -> dict[str, Any]:
    """`{"optim.lr": …}`."""
    values: dict[str, Any] = {}
    for name, group in vars(recipe).items():
        values |= {f"{name}.{k}": v for k, v in vars(group).items()} if hasattr(group, "__dict__") else {name: group}
    return values


# Transformed CNNs, Table 1: fine-tuning resolution and d_r; Table 5: resolution.
TCNN = {
    "resnetrs50": (224, 0.1),
    "resnetrs101": (224, 0.1),
    "resnetrs152": (320, 0.2),
    "resnetrs200": (320, 0.2),
    "resnetrs270": (320, 0.2),
    "resnetrs350": (320, 0.2),
    "resnet50d": (320, None),
    "resnet101d": (384, None),
    "resnet152d": (384, None),
    "resnet200d": (384, None),
}


@pytest.mark.parametrize("parent", TCNN)
def test_transformed_cnns(parent: str) -> None:
    """Section 3: 50 epochs of AdamW at 1e-4, 0.1 for λ, α = λ = 1, batches of 1024, DeiT's augmentation."""
    size, drop_path = TCNN[parent]
    expected = {"epochs": 50, "data.batch_size": 1024, "data.img_size": size, "control": True, "where": ["last_stage"]}
    expected |= {"optim.opt": "adamw", "optim.lr": 1e-4, "optim.base_batch": None, "optim.gate_lr": 0.1}
    expected |= {"optim.warmup_epochs": 5, "optim.weight_decay": 0.05, "model.pretrained": True, "calibrate": 0}
    expected |= {"recast.gate": "sigmoid", "recast.alpha": 1.0, "recast.lambda_init": 1.0, "recast.stride": "remove"}
    expected |= {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.erasing": 0.25, "augment.repeats": 3}
    expected |= {"augment.auto_augment": "rand-m9-mstd0.5-inc1", "regularization.label_smoothing": 0.1}
    expected |= {} if drop_path is None else {"regularization.drop_path": drop_path}
    check(f"tcnn_{parent}", expected)
    assert make_recipe(f"tcnn_{parent}").model.name.partition(".")[0] == parent


def test_the_main_case_has_a_short_name() -> None:
    assert make_recipe("tcnn") == make_recipe("tcnn_resnetrs50")


# ResNet strikes back, Table 2
RSB = """
                               A1    A2    A3
data.img_size                  224   224   160
epochs                         600   300   100
data.batch_size                2048  2048  2048
optim.lr                       5e-3  5e-3  8e-3
optim.weight_decay             0.01  0.02  0.02
optim.warmup_epochs            5     5     5
regularization.label_smoothing 0.1   0     0
regularization.drop_path       0.05  0.05  0
augment.repeats                3     3     1
augment.mixup                  0.2   0.1   0.1
augment.cutmix                 1.0   1.0   1.0
augment.erasing                0     0     0
augment.color_jitter           0     0     0
data.crop_pct                  0.95  0.95  0.95
"""


@pytest.mark.parametrize("procedure", ["A1", "A2", "A3"])
def test_resnet_strikes_back(procedure: str) -> None:
    head, *rows = (line.split() for line in RSB.strip().splitlines())
    expected: dict[str, Any] = {row[0]: float(row[1 + head.index(procedure)]) for row in rows}
    magnitude = {"A1": 7, "A2": 7, "A3": 6}[procedure]
    expected |= {"augment.auto_augment": f"rand-m{magnitude}-mstd0.5-inc1", "optim.opt": "lamb"}
    expected |= {"regularization.loss": "bce", "augment.crop": "random", "augment.flip": True}
    expected |= {"model.name": "resnet50", "where": ["none"], "distill.name": None}
    check(f"rsb_{procedure.lower()}", expected)
    data = make_recipe(f"rsb_{procedure.lower()}").data
    assert (data.test_size or data.img_size) == 224


# PatchConvNet, ablation 5.5 (stochastic depth), and the training settings by stage
DROP_PATH = {"s20": 0.0, "s36": 0.05, "s60": 0.15, "s120": 0.2, "b36": 0.2, "b60": 0.3, "b120": 0.4}
LESS = {"s60": 0.05, "b60": 0.2, "b120": 0.3, "l60": 0.2, "l120": 0.3}
PATCHCONVNET = {
    "optim.opt": "lamb",
    "optim.clip_grad": None,
    "optim.warmup_prefix": False,
    "regularization.loss": "ce",
    "regularization.label_smoothing": 0.1,
    "regularization.drop_path_mode": "uniform",
    "regularization.ema_decay": None,
    "augment.auto_augment": "rand-m7-mstd0.5-inc1",
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.erasing": 0.0,
    "augment.repeats": 1,
    "where": ["none"],
}


def stage(epochs: int, batch: int, rate: float, decay: float) -> dict[str, Any]:
    numbers = {"epochs": epochs, "data.batch_size": batch, "optim.lr": rate, "optim.weight_decay": decay}
    return PATCHCONVNET | numbers | {"data.name": "imagenet"}


def test_patchconvnet_on_imagenet_1k() -> None:
    for key, drop_path in DROP_PATH.items():
        decay = 0.01 if key[0] == "s" else 0.05
        own = {"regularization.drop_path": drop_path, "data.img_size": 224, "augment.repeats": 3}
        check(f"patchconvnet_{key}", stage(400, 2048, 3e-3, decay) | own)
    check(
        "patchconvnet_s60_multi",
        stage(400, 2048, 3e-3, 0.01) | {"regularization.drop_path": 0.15, "augment.repeats": 3},
    )


def test_patchconvnet_at_larger_sizes_and_after_imagenet_21k() -> None:
    for key in ("s60", "b120"):
        own = {"regularization.drop_path": LESS[key], "data.img_size": 384, "model.new_head": False}
        check(f"patchconvnet_{key}_384", stage(10, 1024, 1e-5, 0.01) | own)
    for key, drop_path in LESS.items():
        before = {"data.name": "folder", "regularization.drop_path": round(drop_path + 0.1, 2)}
        check(f"patchconvnet_{key}_21k", stage(90, 2048, 3e-3, 0.01) | before)
        for side in (224, 288, 384):
            own = {"regularization.drop_path": drop_path, "data.img_size": side, "model.new_head": True}
            suffix = "" if side == 224 else f"_{side}"
            check(f"patchconvnet_{key}_21k_1k{suffix}", stage(100, 1024, 5e-4, 0.01) | own)
    assert make_recipe("patchconvnet_s60_21k_1k_512").data.img_size == 512


# Published top-1, from the papers' result tables
TOP1 = """
tcnn 81.0  tcnn_resnetrs101 82.4  tcnn_resnetrs152 83.7  tcnn_resnetrs200 84.0  tcnn_resnetrs270 84.3
tcnn_resnetrs350 84.5  tcnn_resnet50d 81.6  tcnn_resnet101d 83.1  tcnn_resnet152d 83.8  tcnn_resnet200d 83.9
deit_tiny 72.2  deit_small 79.8  deit_base 81.8  deit_tiny_hard 74.3  deit_small_hard 80.9  deit_base_hard 83.0
deit_tiny_distilled 74.5  deit_small_distilled 81.2  deit_base_distilled 83.4  deit_base_384 83.1
deit_tiny_distilled_1000 76.6  deit_small_distilled_1000 82.6  deit_base_distilled_1000 84.2
deit_base_distilled_384 84.5  deit3_small 80.4  deit3_base 83.1  deit3_large 84.2  deit3_huge 84.8
deit3_small_800 81.4  deit3_medium_800 83.0  deit3_base_224 83.8  deit3_large_224 84.9  deit3_huge_224 85.2
deit3_small_384 83.4  deit3_base_384 85.0  deit3_large_384 85.8  deit3_small_21k_1k 83.1  deit3_base_21k_1k 85.7
deit3_medium_21k_1k 84.5  deit3_large_21k_1k 87.0  deit3_huge_21k_1k 87.2  deit3_small_21k_384 84.8
deit3_base_21k_384 86.7  deit3_large_21k_384 87.7  cait_xxs24 77.6  cait_xxs24_384 80.4  cait_xxs24_distilled 78.4
cait_xxs24_distilled_384 80.9  cait_xxs36 79.1  cait_xxs36_384 81.8  cait_xxs36_distilled 79.7
cait_xxs36_distilled_384 82.2  cait_xs24 81.8  cait_xs24_384 83.8  cait_xs24_distilled 82.0
cait_xs24_distilled_384 84.1  cait_s24 82.7  cait_s24_384 84.3  cait_s24_distilled 83.5  cait_s24_distilled_384 85.1
cait_s36 83.3  cait_s36_384 85.0  cait_s36_distilled 84.0  cait_s36_distilled_384 85.4  cait_m36 83.8
cait_m36_384 84.9  cait_m36_distilled 85.1  cait_m36_distilled_384 86.1  cait_m48_distilled_448 86.5
resmlp_12 76.6  resmlp_24 79.4  resmlp_big_24 81.0  resmlp_12_distilled 77.8  resmlp_24_distilled 80.8
resmlp_36_distilled 81.1  resmlp_big_24_distilled 83.6  rsb_a1 80.4  rsb_a2 79.8  rsb_a3 78.1
resnet50_attention_pool 80.1
patchconvnet_s20 78.7  patchconvnet_s36 80.7  patchconvnet_s60 82.1  patchconvnet_s120 83.2  patchconvnet_b36 82.8
patchconvnet_b60 83.5  patchconvnet_b120 84.1  patchconvnet_s60_384 83.7  patchconvnet_b120_384 85.2
patchconvnet_s60_multi 81.1  patchconvnet_s60_multi_finetune 82.0  patchconvnet_s60_21k_1k 82.9
patchconvnet_s60_21k_1k_288 84.0  patchconvnet_s60_21k_1k_384 84.6  patchconvnet_s60_21k_1k_512 85.0
patchconvnet_b60_21k_1k 85.0  patchconvnet_b60_21k_1k_288 85.7  patchconvnet_b60_21k_1k_384 86.1
patchconvnet_l60_21k_1k 85.6  patchconvnet_l60_21k_1k_288 86.1  patchconvnet_l60_21k_1k_384 86.4
patchconvnet_b120_21k_1k 86.0  patchconvnet_b120_21k_1k_288 86.6  patchconvnet_b120_21k_1k_384 86.9
patchconvnet_l120_21k_1k 86.1  patchconvnet_l120_21k_1k_288 86.6  patchconvnet_l120_21k_1k_384 87.1
"""


def test_the_docstrings_expect_the_published_numbers() -> None:
    words = TOP1.split()
    published = dict(zip(words[::2], words[1::2], strict=True))
    for name, top1 in published.items():
        assert f"\nExpected: {top1} % top-1" in (RECIPES[name].__doc__ or ""), name
