import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import assert_same, small_fit, small_recipe
from torch import nn

from recast import RecastError, plan, recast_, save
from recast.lab.config import DataConfig, OptimConfig, Recipe
from recast.lab.data import Data, load_data
from recast.lab.evaluation.run_folder import open_run
from recast.lab.training import prepare
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.layers.gpsa import gpsa_layers
from recast.models.adapt import classifiers
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.sources import create
from recast.papers.dense import scenes
from recast.papers.dense.detect.networks import SceneRCNN, losing

SMALL = DataConfig("scene_objects", num_train=4, num_val=2, batch_size=2)


def recipe(**fields: Any) -> Recipe:
    optim = OptimConfig(lr=1e-3, warmup_epochs=0)
    return small_recipe(**{"model": ModelConfig("scenes_rcnn"), "data": SMALL, "epochs": 2, **fields}).replace(
        optim=optim
    )


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing all of them takes seconds."""
    monkeypatch.setattr(scenes, "NUM_SCENES", {"train": 4, "val": 2})


@pytest.fixture
def data() -> Data:
    return load_data(SMALL)


def test_it_goes_on_bit_for_bit(tmp_path: Path, data: Data, goes_on: Callable[..., nn.Module]) -> None:
    def child() -> nn.Module:
        torch.manual_seed(0)
        model = SceneRCNN(8, width=16)
        return recast_(model, plan(model, data.example))

    goes_on(small_fit, child, "update", 3, data=data, recipe=recipe(save_steps=1))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["val_ap"] is not None
    assert rows[-1]["val_loss"] < rows[0]["val_loss"], "it learns"


def test_losses_in_eval_mode_move_no_statistics(data: Data) -> None:
    model, (images, objects) = SceneRCNN(8, width=16).eval(), data.val.batch([0, 1])
    before = copy.deepcopy(model)
    with losing(model):
        assert model(images, objects.taught()).keys() >= {"loss_classifier", "loss_mask", "loss_objectness"}
    assert_same(model, before)
    assert not any(module.training for module in model.modules())


def test_what_is_refused(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="resnet20 must give losses in training"):
        train(recipe(model=ModelConfig("cifar_resnet20")), tmp_path / "run", progress=False)
    boxes = replace(data.val, objects=[replace(item, masks=None) for item in data.val.objects])  # type: ignore[arg-type]
    monkeypatch.setattr(prepare, "load_data", lambda *_: replace(data, val=boxes))
    with pytest.raises(RecastError, match="scenes_rcnn learns masks, and objects of scene_objects have none"):
        train(recipe(), tmp_path / "run", progress=False)


def test_torchvisions_detectors() -> None:
    """Their class 0 is the background; images come as large as they shall be; a new head is everything of a class."""
    with torch.device("meta"):
        mask = create("torchvision", "maskrcnn_resnet50_fpn", {"num_classes": 3, "img_size": 96}, pretrained=False)
        retina = create("torchvision", "retinanet_resnet50_fpn", {"num_classes": 3}, pretrained=False)
    heads = [f"roi_heads.{name}" for name in ("box_predictor.cls_score", "box_predictor.bbox_pred")]
    assert classifiers(mask) == (*heads, "roi_heads.mask_predictor.mask_fcn_logits")
    assert len(mask.get_submodule(heads[0]).weight) == 4
    assert (mask.transform.min_size, mask.transform.max_size) == ((96,), 96)
    assert classifiers(retina) == ("head.classification_head.cls_logits",)
    assert build(ModelConfig("scenes_rcnn"), num_classes=5).num_classes == 5
    with pytest.raises(RecastError, match=r"model.input_size requires a network of timm"):
        create("torchvision", "resnet18", {"img_size": 96}, pretrained=False)


def test_published_mask_rcnns() -> None:
    """PatchConvNet's have 44.9 M and 67.4 M parameters; with torchvision's heads 0.53 M more, in both."""
    for size, published in (("s60", 44.9e6), ("s120", 67.4e6)):
        with torch.device("meta"):
            model = create("maskrcnn", f"patchconvnet_{size}", {"num_classes": 80}, pretrained=False)
        assert sum(p.numel() for p in model.parameters()) - 0.53e6 == pytest.approx(published, rel=1e-3)


def test_retinanet_begins_at_stride_8_and_sees_images_as_the_body_did() -> None:
    model = create("retinanet", "vit_tiny_patch16_224", {"num_classes": 3, "img_size": 64}, pretrained=False).eval()
    with torch.no_grad():
        maps = model.backbone(torch.randn(1, 3, 64, 64))
    assert [features.shape[-1] for features in maps.values()] == [8, 4, 2, 1, 1]
    assert (model.transform.min_size, model.transform.image_mean) == ((64,), [0.5] * 3)
    assert len(model.get_submodule(classifiers(model)[0]).weight) == 4 * 9


def test_a_detector_by_its_name(tmp_path: Path) -> None:
    classifier = timm.create_model("resnet10t", num_classes=7)
    save(classifier, tmp_path / "net.safetensors")
    model = ModelConfig("fasterrcnn:resnet10t", str(tmp_path / "net.safetensors"))
    with pytest.raises(RecastError, match=r"has no head of FasterRCNN, only its body: set model.new_head"):
        build(model, num_classes=8)
    few = SMALL.replace(num_train=2, num_val=1)
    config = recipe(model=model.replace(new_head=True), data=few, epochs=1, where=["backbone.body.layer4.*"])
    run = open_run(train(config, tmp_path / "run", progress=False))
    assert json.loads((tmp_path / "run" / "verify.json").read_text())["bitwise"]
    assert list(run.models) == ["parent", "finetuned", "recast"]
    body, weights = run.models["parent"].backbone.body.state_dict(), classifier.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in body.items())
    assert len(gpsa_layers(run.models["recast"].backbone.body)) == 2
    assert run.models["recast"].transform.max_size == 96
    with pytest.raises(RecastError, match=r"timm has no model .vgg99..*fasterrcnn"):
        create("fasterrcnn", "vgg99", {}, pretrained=False)
