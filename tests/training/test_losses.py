import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from small import assert_same, small_data, small_parent, small_recipe
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.mixup import mixup_target
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from recast import RecastError, save
from recast.lab.config import ClassifyConfig
from recast.lab.config.tasks import TeacherConfig
from recast.lab.task import Setting
from recast.lab.tasks.classify.training import label_loss
from recast.lab.training import distill
from recast.lab.training.distill import Distillation, Teacher, build_teacher, soft_loss, train_token_
from recast.lab.training.step import Objective
from recast.models.build import build
from recast.models.config import ModelConfig

Z_CLS = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 3.0, -2.0]])
Z_DIST = torch.tensor([[1.0, 0.5, -1.0, 0.0], [0.2, 0.1, 2.0, -1.0]])
TAUGHT = torch.tensor([[3.0, 1.0, 0.0, -1.0], [1.0, 2.5, 2.0, 0.0]])
LABELS = torch.tensor([0, 2])
MIXED = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]])
IMAGES = torch.zeros(2, 3, 2, 2)
PLAIN = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
CE = label_loss(ClassifyConfig(), 4)


class Constant(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, images: Tensor) -> Any:
        return self.logits


def distillation(labels: Any = CE, **fields: Any) -> Distillation:
    return Distillation(TeacherConfig("parent", **fields), Teacher(Constant(TAUGHT), student=PLAIN), labels)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(1), nn.Linear(6 * 36, 4)
    )


def loss_of(kind: str = "ce", label_smoothing: float = 0.0, **fields: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return label_loss(ClassifyConfig(label_smoothing=label_smoothing, loss={"kind": kind, **fields}), 4)


def by_hand(targets: list[list[float]], binary: bool) -> float:
    total = 0.0
    for z, t in zip(Z_CLS.tolist(), targets, strict=True):
        if binary:
            p = [1 / (1 + math.exp(-v)) for v in z]
            total -= sum(a * math.log(b) + (1 - a) * math.log(1 - b) for a, b in zip(t, p, strict=True)) / len(z)
        else:
            norm = math.log(sum(map(math.exp, z)))
            total -= sum(a * (v - norm) for a, v in zip(t, z, strict=True))
    return total / len(Z_CLS)


def smoothed(share: float) -> list[list[float]]:
    return [[1 - share + share / 4 if c == int(label) else share / 4 for c in range(4)] for label in LABELS]


def test_published_numbers_of_labels() -> None:
    assert loss_of()(Z_CLS, LABELS).item() == pytest.approx(0.2589324713, rel=1e-6)
    # DeiT III: every class of a mixed label counts fully, whatever its share
    assert loss_of("bce", bce_threshold=0.0)(Z_CLS, MIXED).item() == pytest.approx(0.7861672640, rel=1e-6)


@pytest.mark.parametrize("binary", [False, True])
def test_labels_follow_the_formula_and_mixed_targets_are_not_smoothed_again(binary: bool) -> None:
    for share in (0.0, 0.1):
        loss = loss_of("bce" if binary else "ce", label_smoothing=share)
        assert loss(Z_CLS, LABELS).item() == pytest.approx(by_hand(smoothed(share), binary), rel=1e-6)
        assert loss(Z_CLS, MIXED).item() == pytest.approx(by_hand(MIXED.tolist(), binary), rel=1e-6)
    # a label that timm's Mixup has smoothed, mixed with nothing, is the label that we smooth
    targets = mixup_target(LABELS, 4, lam=1.0, smoothing=0.1)
    torch.testing.assert_close(loss(Z_CLS, targets), loss(Z_CLS, LABELS))


def test_a_threshold_between_the_shares_keeps_the_larger_class_alone() -> None:
    loss = loss_of("bce", bce_threshold=0.5)
    assert loss(Z_CLS, MIXED) == loss(Z_CLS, torch.tensor([0, 3]))
    assert loss_of("bce", bce_threshold=0.5, label_smoothing=0.1)(Z_CLS, LABELS) == loss_of("bce")(Z_CLS, LABELS)


def test_published_numbers_of_a_teacher() -> None:
    """Made in float32, so they are good to 1e-6."""
    assert soft_loss(Z_DIST, TAUGHT, 3.0).item() == pytest.approx(0.5045899153, rel=1e-6)
    assert soft_loss(TAUGHT, Z_DIST, 3.0).item() == pytest.approx(0.5132530928, rel=1e-6)  # the other direction
    soft, hard = distillation(targets="soft", teacher_weight=0.1), distillation(targets="hard")
    assert soft((Z_CLS, Z_DIST), IMAGES, LABELS).item() == pytest.approx(0.2834981978, rel=1e-6)
    assert hard((Z_CLS, Z_DIST), IMAGES, LABELS).item() == pytest.approx(0.8688333631, rel=1e-6)
    smooth = label_loss(ClassifyConfig(label_smoothing=0.1), 4)
    total = distillation(smooth, targets="hard", teacher_weight=0.25)(Z_CLS, IMAGES, LABELS)
    of_teacher = nn.functional.cross_entropy(Z_CLS, TAUGHT.argmax(1))  # not smoothed
    torch.testing.assert_close(total, 0.75 * smooth(Z_CLS, LABELS) + 0.25 * of_teacher)


def test_a_teacher_never_moves(network: nn.Module) -> None:
    teacher = Teacher(network, student=PLAIN)
    before = copy.deepcopy(teacher.model.state_dict())
    network.train()
    student = nn.Sequential(nn.Flatten(1), nn.Linear(3 * 64, 4))
    student.teacher = teacher  # type: ignore[assignment]
    student.train()
    images = torch.randn(8, 3, 8, 8)
    loss = Distillation(TeacherConfig("parent"), teacher, CE)
    for _ in range(3):
        network(images)  # moves the statistics of the original
        loss(student(images), images, torch.arange(8) % 4).backward()
    assert set(student.state_dict()) == {"1.weight", "1.bias"}
    assert_same(teacher.model, before)
    assert not torch.equal(network.state_dict()["1.running_mean"], before["1.running_mean"])
    assert torch.equal(teacher(images), teacher(images))  # no dropout
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert all(p.requires_grad for p in network.parameters())
    assert network.training
    (student(images) * teacher(images)).sum().backward()  # a product keeps both for its backward pass


def test_a_teacher_sees_the_pixels_in_its_own_normalisation(network: nn.Module) -> None:
    pixels = torch.rand(4, 3, 8, 8)
    student, norm = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)), ((0.1, 0.2, 0.3), (1.0, 0.5, 0.3))
    images = normalize(pixels, *norm)
    expected = network.eval()(images)
    torch.testing.assert_close(Teacher(network, student=student, norm=norm)(normalize(pixels, *student)), expected)
    assert torch.equal(Teacher(network, student=norm, norm=norm)(images), expected)  # not even rounded


def named(parent: nn.Module | None = None, num_classes: int = 4, img_size: int = 8, **fields: Any) -> Teacher:
    options = {f"teacher_{name}": value for name, value in fields.items()}
    config = TeacherConfig("model", **options) if fields else TeacherConfig("parent")
    return build_teacher(config, parent, num_classes, student=PLAIN, img_size=img_size)


def test_a_teacher_from_a_file_knows_its_normalisation(tmp_path: Path) -> None:
    model = build(ModelConfig("digits_resnet"), num_classes=4).eval()
    save(model, tmp_path / "teacher.safetensors")
    file = str(tmp_path / "teacher.safetensors")
    pixels = torch.rand(2, 3, 8, 8)
    teacher = named(model="digits_resnet", checkpoint=file)
    torch.testing.assert_close(teacher(pixels), model((pixels - 0.5) / 0.5))
    for fields, message in (
        ({"checkpoint": file, "num_classes": 7}, "has 4 classes, the data has 7: train the teacher"),
        ({"checkpoint": "missing.safetensors"}, r"the teacher digits_resnet: .*missing\.safetensors"),
        ({}, "random weights: set --teacher-checkpoint or --teacher-pretrained"),
    ):
        with pytest.raises(RecastError, match=message):
            named(model="digits_resnet", **fields)


def test_a_teacher_with_the_classes_in_another_order_answers_in_the_datas(tmp_path: Path) -> None:
    model = build(ModelConfig("digits_resnet"), num_classes=3).eval()
    data, file = small_data(), str(tmp_path / "teacher.safetensors")
    task = {"teacher": {"kind": "model", "teacher_model": "digits_resnet", "teacher_checkpoint": file}}

    def objective() -> Objective:
        return Objective(small_recipe(task=task).task, data, small_parent(), None, Setting(1, torch.device("cpu")))

    save(model, file, classes=["blue", "red", "green"])
    with pytest.warns(UserWarning, match="another order"):
        distillation = objective().distillation
    assert distillation is not None
    images = data.normalised(torch.rand(2, 3, 8, 8), torch.device("cpu"))
    expected = model((images * 0.2 + 0.3 - 0.5) / 0.5)[:, [1, 2, 0]]
    torch.testing.assert_close(distillation.teacher(images), expected)
    save(model, file, classes=["cat", "dog", "horse"])
    with pytest.raises(RecastError, match="the teacher has the classes cat, dog, horse"):
        objective()


@pytest.mark.parametrize(
    ("name", "norm"), [("torchvision:resnet18", (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)), ("own:function", PLAIN)]
)
def test_fetched_weights_keep_their_own_head(
    name: str, norm: Any, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm would put a random head in its place if asked for the data's classes."""
    monkeypatch.setattr(distill, "build", build := mock.Mock(return_value=network))
    fetched = name.startswith("torchvision")
    teacher = named(model=name, pretrained=fetched)
    build.assert_called_once_with(ModelConfig(name, pretrained=fetched), num_classes=None, advice=distill.TEACH)
    pixels = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(teacher(pixels), network.eval()(normalize(pixels, *norm)))
    with pytest.raises(RecastError, match=f"the teacher {name} has 4 classes, the data have 7"):
        named(model=name, pretrained=fetched, num_classes=7)


def test_the_token_is_trained_by_the_teacher() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224", img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2, num_classes=4
    )
    with pytest.raises(RecastError, match=r"images of side 8 "):
        named(model)
    nn.init.normal_(model.head.weight)
    nn.init.normal_(model.head_dist.weight)
    train_token_(model.train())
    outputs = model(torch.randn(2, 3, 16, 16))
    assert isinstance(outputs, tuple)
    distillation(teacher_weight=1.0)(outputs, torch.randn(2, 3, 16, 16), LABELS).backward()
    assert bool(model.head_dist.weight.grad.any())
    assert not bool(model.head.weight.grad.any())
