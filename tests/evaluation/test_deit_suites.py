from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation import evaluate
from recast.lab.evaluation.context import NotMeasured

TINY = {"img_size": 16, "patch_size": 8, "depth": 2, "num_classes": 10}


class Corner(nn.Module):
    """Class 1 if the upper left pixel is red."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        red = x[:, 0, 0, 0] - x[:, 1, 0, 0]
        return torch.stack([red.new_full((len(x),), 0.5), red], 1)


def test_crop_shows_more_of_the_image(tmp_path: Path, digits: Data, score: Any) -> None:
    """Images of 80 pixels, of which the outer two are red: a crop of 0.95 shows 76 of them."""
    pixels = np.zeros((80, 80, 3), dtype=np.uint8)
    pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:] = ((255, 0, 0),) * 4
    for folder in ("train/inside", "train/red", "val/inside", "val/red"):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / folder / "0.png")
    options = {"img_size": 80, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = load_data(DataConfig("folder", tmp_path, **options))
    scores = score("crop", Corner(), data)
    right = {metric: values[:, 0].tolist() for metric, values in scores.items()}
    assert right == {f"top1@{share}": [1.0, 0.0] for share in ("0.875", "0.9", "0.95")} | {"top1@1": [0.0, 1.0]}
    assert right["top1@1"] == score("clean", Corner(), data)["top1"][:, 0].tolist()  # small images: not cropped
    with pytest.raises(NotMeasured, match="in memory"):
        score("crop", nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)), digits)


def test_heads_and_tokens_of_a_distilled_deit(digits: Data, spy: Any, score: Any) -> None:
    network = timm.create_model("deit_tiny_distilled_patch16_224", **TINY).eval()
    for parameter in network.parameters():  # what differs from image to image, and head to head
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    scores = score("tokens", network, digits)
    images, labels = digits.val.batch(range(len(digits.val)))
    with torch.no_grad():
        x = normalize(images, digits.mean, digits.std)
        states = network.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
        tokens = network.forward_features(x)
        logits = {"class": network.head(tokens[:, 0]), "distillation": network.head_dist(tokens[:, 1])}
        logits["both"] = network(x)
    cosines = [F.cosine_similarity(prefix[:, 0], prefix[:, 1]) for _, prefix in states]
    assert list(scores) == [*(f"top1/{head}" for head in logits), "cosine@0", "cosine@1", "cosine@2"]
    for head, values in logits.items():
        assert scores[f"top1/{head}"][:, 0].tolist() == (values.argmax(1) == labels).float().tolist()
    assert len({scores[f"top1/{head}"].tobytes() for head in logits}) == 3
    learned = F.cosine_similarity(network.cls_token[0], network.dist_token[0]).item()
    assert scores["cosine@0"] == pytest.approx(learned, abs=1e-6)
    for number, values in enumerate(cosines, 1):
        assert scores[f"cosine@{number}"][:, 0] == pytest.approx(values.numpy(), abs=1e-5)
    rows = evaluate({"distilled": network, "plain": spy().eval()}, "tokens", digits, progress=False)
    assert {row.model for row in rows} == {"distilled"}
    assert next(row.value for row in rows if row.metric == "cosine@0") == pytest.approx(learned, abs=1e-5)
    with pytest.raises(NotMeasured, match="of timm"):
        score("branches", spy().eval(), digits)
    with pytest.raises(NotMeasured, match="distilled DeiT"):
        score("tokens", spy().eval(), digits)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "cait_xxs24_224"])
def test_branches_are_compared_with_the_tokens_that_they_are_added_to(digits: Data, score: Any, name: str) -> None:
    network = timm.create_model(name, **TINY).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    scores = score("branches", network, digits)
    assert set(scores) == {f"branch/{part}@{number}" for part in ("attention", "mlp") for number in (1, 2)}
    images, _ = digits.val.batch(range(len(digits.val)))
    block = network.blocks[0]
    with torch.no_grad():
        x = network.patch_embed(normalize(images, digits.mean, digits.std))
        x = network.pos_drop(x + network.pos_embed) if name.startswith("cait") else network._pos_embed(x)
        scale = (block.gamma_1, block.gamma_2) if name.startswith("cait") else (1, 1)
        first = scale[0] * block.attn(block.norm1(x))
        second = scale[1] * block.mlp(block.norm2(x + first))
    for part, branch, main in (("attention", first, x), ("mlp", second, x + first)):
        ratio = branch.flatten(1).norm(dim=1) / main.flatten(1).norm(dim=1)
        assert scores[f"branch/{part}@1"][:, 0] == pytest.approx(ratio.numpy(), rel=1e-4)
