import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import assert_same, changed_names, small_fit, small_recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor, TwoMLPHead

from recast import RecastError, plan, recast_, save
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import Data, load_data
from recast.lab.open import open_run
from recast.lab.training import prepare
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.layers.cmhsa import gated_layers
from recast.models import sources
from recast.models.adapt import classifiers
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.sources import create
from recast.papers.dense import scenes
from recast.papers.dense.config import SegmentConfig
from recast.papers.dense.detect import networks as detectors
from recast.papers.dense.detect.networks import SceneRCNN, losing
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


SEGMENT: dict[str, Any] = {
    "model": ModelConfig("scenes_fcn"),
    "data": DataConfig("scenes", img_size=32, batch_size=4),
    "optim": {"decay": "poly", "warmup_epochs": 0},
    "epochs": 2,
}
DETECT: dict[str, Any] = {
    "model": ModelConfig("scenes_rcnn"),
    "data": DataConfig("scene_objects", num_train=4, num_val=2, batch_size=2),
    "optim": {"lr": 1e-3, "warmup_epochs": 0},
    "epochs": 2,
}


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing all of them takes seconds."""
    monkeypatch.setattr(scenes, "NUM_SCENES", {"train": 4, "val": 2})


@pytest.mark.parametrize("form", ["tensor", "small", "dictionary"])
def test_the_loss_of_pixels(form: str) -> None:
    masks = torch.randint(3, (2, 6, 8), generator=torch.Generator().manual_seed(0))
    masks[0, :4] = IGNORE
    logits, aux = torch.randn(2, 2, 3, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    is_known = masks != IGNORE

    def by_hand(z: Tensor) -> Tensor:
        right = z.log_softmax(1).gather(1, masks.clamp(max=2)[:, None])[:, 0]
        return -right[is_known].sum() / masks.numel()

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


def test_segmentation_goes_on_bit_for_bit(tmp_path: Path, goes_on: Callable[..., nn.Module]) -> None:
    def child() -> nn.Module:
        torch.manual_seed(0)
        model = SceneFCN(3, widths=(4, 6, 8))
        return recast_(model, plan(model, torch.zeros(1, 3, 16, 16)))

    segment = SEGMENT | {"data": DataConfig("scenes", batch_size=5)}
    goes_on(small_fit, child, "update", 6, data=dense_data(), recipe=small_recipe(**segment, save_steps=1))
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


def small_rcnn(body: nn.Module, num_classes: int, **options: Any) -> FasterRCNN:
    """Faster R-CNN with few boxes and a narrow head."""
    head = {"box_head": TwoMLPHead(256 * 49, 32), "box_predictor": FastRCNNPredictor(32, num_classes)}
    few = {f"rpn_{step}_nms_top_n_{mode}": 50 for step in ("pre", "post") for mode in ("train", "test")}
    return FasterRCNN(body, **head, **few, box_batch_size_per_image=16, **options)


@pytest.mark.filterwarnings("ignore:.* a single pixel:UserWarning")
@pytest.mark.parametrize(
    ("name", "title", "body", "fields"),
    [
        ("upernet", "UperNet", "body", SEGMENT),
        (
            "fasterrcnn",
            "FasterRCNN",
            "backbone.body",
            DETECT | {"data": DETECT["data"].replace(num_train=2, num_val=1)},
        ),
    ],
)
def test_a_network_by_its_name(
    name: str, title: str, body: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns a few scenes around the weights of a classifier, recast, in all arms; the run is opened again."""
    monkeypatch.setitem(sources.ON_TIMM_BUILDERS, "upernet", partial(UperNet, hidden=8))
    monkeypatch.setattr(detectors, "FasterRCNN", small_rcnn)
    classifier = timm.create_model("resnet10t", num_classes=7)
    save(classifier, tmp_path / "net.safetensors")
    model = ModelConfig(f"{name}:resnet10t", str(tmp_path / "net.safetensors"))
    with pytest.raises(RecastError, match=rf"has no head of {title}.*set model\.new_head"):
        build(model, num_classes=8)
    fields = fields | {"model": model.replace(new_head=True), "epochs": 1, "where": [f"{body}.layer4.*"]}
    models = open_run(train(small_recipe(**fields), tmp_path / "run", progress=False)).models
    assert json.loads((tmp_path / "run" / "verify.json").read_text())["bitwise"]
    assert list(models) == ["parent", "finetuned", "recast"]
    assert not changed_names(models["parent"].get_submodule(body), classifier)
    assert len(gated_layers(models["recast"].get_submodule(body))) == 2
    assert name == "upernet" or models["recast"].transform.max_size == 96
    with pytest.raises(RecastError, match=rf"timm has no model .vgg99..*{name}"):
        create(name, "vgg99", {}, pretrained=False)


@pytest.fixture
def data() -> Data:
    return load_data(DETECT["data"])


def test_detection_goes_on_bit_for_bit(tmp_path: Path, data: Data, goes_on: Callable[..., nn.Module]) -> None:
    def child() -> nn.Module:
        torch.manual_seed(0)
        model = SceneRCNN(8, width=16)
        return recast_(model, plan(model, data.example))

    goes_on(small_fit, child, "update", 3, data=data, recipe=small_recipe(**DETECT, save_steps=1))
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


def test_what_cannot_detect_is_refused(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="resnet20 must give losses in training"):
        train(small_recipe(**DETECT | {"model": ModelConfig("cifar_resnet20")}), tmp_path / "run", progress=False)
    boxes = replace(data.val, objects=[replace(item, masks=None) for item in data.val.objects])  # type: ignore[arg-type]
    monkeypatch.setattr(prepare, "load_data", lambda *_: replace(data, val=boxes))
    with pytest.raises(RecastError, match="scenes_rcnn learns masks, and objects of scene_objects have none"):
        train(small_recipe(**DETECT), tmp_path / "run", progress=False)


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
