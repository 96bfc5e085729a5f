from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import small_fit, small_recipe
from torch import Tensor, nn
from torch.nn import functional as F

from recast import RecastError, plan, recast_, save
from recast.lab.config import Augmentation, DataConfig, Recipe
from recast.lab.data import Data
from recast.lab.evaluation.run_folder import open_run
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.models import sources
from recast.models.adapt import classifiers
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.sources import create
from recast.papers.dense import scenes
from recast.papers.dense.config import SegmentConfig
from recast.papers.dense.segment.networks import SceneFCN, UperNet
from recast.papers.dense.segment.pairs import IGNORE, ImagePairs
from recast.papers.dense.segment.training import AUXILIARY_WEIGHT, pixel_loss


def dense_data(count: int = 20) -> Data:
    """The class of a pixel is its brightest channel; some are ignored."""
    random = torch.Generator().manual_seed(0)
    masks = torch.randint(3, (count, 4, 4), generator=random).repeat_interleave(4, 1).repeat_interleave(4, 2)
    pixels = (F.one_hot(masks, 3) * 90).permute(0, 3, 1, 2) + torch.randint(60, (count, 3, 16, 16), generator=random)
    masks[:, :2] = IGNORE
    pairs = ImagePairs(pixels.to(torch.uint8), masks.to(torch.uint8), 16)
    augment = Augmentation(crop="random", flip=True)
    return Data("blocks", pairs.augmented(augment), pairs, ["r", "g", "b"], (0.3,) * 3, (0.2,) * 3, 16)


def recipe(**fields: Any) -> Recipe:
    defaults = {"model": ModelConfig("scenes_fcn"), "data": DataConfig("scenes", batch_size=5), "epochs": 2}
    return small_recipe({"decay": "poly", "warmup_epochs": 0, "gate_lr": None}, **{**defaults, **fields})


@pytest.mark.parametrize("form", ["tensor", "small", "dictionary"])
def test_the_loss_of_pixels(form: str) -> None:
    masks = torch.randint(3, (2, 6, 8), generator=torch.Generator().manual_seed(0))
    masks[0, :4] = IGNORE
    logits, aux = torch.randn(2, 2, 3, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    known = masks != IGNORE

    def by_hand(z: Tensor) -> Tensor:
        right = z.log_softmax(1).gather(1, masks.clamp(max=2)[:, None])[:, 0]
        return -right[known].sum() / masks.numel()

    loss = pixel_loss(SegmentConfig(), 3)
    if form == "dictionary":
        expected, outputs = by_hand(logits) + AUXILIARY_WEIGHT * by_hand(aux), {"out": logits, "aux": aux}
    elif form == "small":
        outputs = logits[:, :, ::2, ::2]
        expected = by_hand(F.interpolate(outputs, (6, 8), mode="bilinear"))
    else:
        expected, outputs = by_hand(logits), logits
    torch.testing.assert_close(loss(outputs, masks), expected, check_dtype=False)
    assert loss(logits, torch.full_like(masks, IGNORE)) == 0, "no pixel is known"


def test_it_goes_on_bit_for_bit(tmp_path: Path, goes_on: Callable[..., nn.Module]) -> None:
    def child() -> nn.Module:
        torch.manual_seed(0)
        model = SceneFCN(3, widths=(4, 6, 8))
        return recast_(model, plan(model, torch.zeros(1, 3, 16, 16)))

    goes_on(small_fit, child, "update", 6, data=dense_data(), recipe=recipe(save_steps=1))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["val_miou"] > rows[0]["val_miou"] + 10, "it learns"


@pytest.mark.parametrize("trunk", ["resnet10t", "patchconvnet_s60"])
def test_upernet(trunk: str) -> None:
    torch.manual_seed(0)
    small = {"embed_dim": 16, "depth": 3} if trunk.startswith("patch") else {}
    model, image = UperNet(trunk, 3, hidden=16, **small).eval(), torch.rand(1, 3, 64, 48)
    with torch.no_grad():
        before = model(image)["out"]
        if not small:
            recast_(model, plan(model, image, where="body.layer4.*"))
        assert torch.equal(model(image)["out"], before)
    assert before.shape == (1, 3, 16, 12)
    assert classifiers(model) == ("head.classify", "auxiliary.2")
    assert ("aux" in model.train()(image.expand(2, -1, -1, -1)), "aux" in model.eval()(image)) == (True, False)


@pytest.mark.filterwarnings("ignore:.* a single pixel:UserWarning")
def test_upernet_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "NUM_SCENES", {"train": 4, "val": 2})
    monkeypatch.setitem(sources.ON_TIMM_BUILDERS, "upernet", partial(UperNet, hidden=8))
    classifier = timm.create_model("test_resnet", num_classes=7)
    save(classifier, tmp_path / "net.safetensors")
    model = ModelConfig("upernet:test_resnet", str(tmp_path / "net.safetensors"))
    with pytest.raises(RecastError, match=r"has no head of UperNet.*set model\.new_head"):
        build(model, num_classes=9)
    model, data = model.replace(new_head=True), DataConfig("scenes", img_size=32, batch_size=4)
    config = recipe(model=model, data=data, epochs=1, where=["body.layer4.*"], control=False)
    run = open_run(train(config, tmp_path / "run", progress=False))
    body, weights = run.models["parent"].body.state_dict(), classifier.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in body.items())
    assert not torch.equal(run.models["recast"].head.classify.weight, run.models["parent"].head.classify.weight)
    with pytest.raises(RecastError, match=r"timm has no model 'test_resne'.*upernet"):
        create("upernet", "test_resne", {}, pretrained=False)
