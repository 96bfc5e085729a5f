"""Several labels for an image, from a table to the report, and metrics compared with scikit-learn's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.cli import main
from recast.lab.config import ClassifyConfig
from recast.lab.evaluation.class_metrics import pool_classes, ranked
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.tasks.classify.training import balanced_weights, label_loss
from recast.lab.tasks.multilabel import training
from recast.lab.tasks.multilabel.evaluation import label_metrics
from recast.lab.tasks.multilabel.images import rarest
from recast.lab.tasks.multilabel.training import LabelMeter, multi_hot_loss
from recast.lab.training.metrics import read_metrics

metrics, class_weight = pytest.importorskip("sklearn.metrics"), pytest.importorskip("sklearn.utils.class_weight")

pytestmark = pytest.mark.filterwarnings("ignore:.*csv: ")
NAMES = ("Mass", "Edema", "Nodule")
TRAIN = (
    "train folder --model digits_resnet --no-pretrained --data csv --data-dir photos --img-size 16 --batch-size 8 "
    "--workers 0 --epochs 1 --where layer3.1.conv1 --device cpu --out"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images whose channels are bright where they have a label, and tables of them in three layouts."""
    folder, random = tmp_path_factory.mktemp("labels"), np.random.default_rng(0)
    (folder / "photos/images_001").mkdir(parents=True)
    bits = random.random((40, 3)) < [0.5, 0.4, 0.3]
    chest, kaggle, plain = ["Image Index,Finding Labels,Follow-up #,"], [f"image_id,{','.join(NAMES)}"], ["file,label"]
    for i, row in enumerate(bits):
        pixels = random.integers(0, 80, (16, 16, 3)) + 150 * row
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"photos/images_001/{i:03d}.png")
        labels = "|".join(name for name, bit in zip(NAMES, row, strict=True) if bit) or "No Finding"
        chest.append(f"{i:03d}.png,{labels},0,")
        kaggle.append(f"{i:03d},{','.join(str(int(bit)) for bit in row)}")
        plain.append(f"images_001/{i:03d}.png,{'bright' if row[0] else 'dark'}")
    for name, lines in (("chest", chest), ("kaggle", kaggle), ("plain", plain)):
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*TRAIN, "chest", "--labels-file", "chest.csv"]) == 0
    return folder / "chest"


def test_a_table_with_several_labels_is_trained_and_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((run / "classes.json").read_text()) == ["Edema", "Mass", "No Finding", "Nodule"]
    rows = evaluate_run(run, ["multilabel"], device="cpu", progress=False).rows
    values = {row.metric: row for row in rows if row.model == "recast"}
    assert values["map"].value == pytest.approx(read_metrics(run / "metrics.jsonl")[-1]["val_map"], abs=1e-4)
    assert values["map"].low < values["map"].value < values["map"].high
    assert {f"{metric}/{name}" for metric in ("f1", "auroc") for name in NAMES} <= values.keys()
    assert main(["evaluate", str(run), "--suite", "multilabel", "--device", "cpu"]) == 0
    assert f"{values['map'].value:.2f} %" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert "mAP" in (run / "report.html").read_text(encoding="utf-8")


def test_its_page_shows_a_sigmoid_of_each_label(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run), "val:0", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["outputs"] == "sigmoid"
    assert summary["images"][0]["label"]


def test_the_same_command_goes_on(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = (run / "weights.safetensors").read_bytes()
    assert main([*TRAIN, "chest", "--labels-file", "chest.csv", "--resume", "auto"]) == 0
    assert (run / "weights.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "metric", "classes"),
    [
        ("kaggle.csv --label-column Mass,Edema,Nodule", "val_map", list(NAMES)),
        ("kaggle.csv --label-column Mass --task multilabel", "val_map", ["Mass"]),
        ("plain.csv --class-weights balanced --mixup 0.1", "val_top1", ["bright", "dark"]),
    ],
)
def test_other_layouts_are_trained_by_one_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, metric: str, classes: list[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    assert main([*TRAIN, str(tmp_path / "run"), "--no-control", "--labels-file", *words.split()]) == 0
    assert 0 < read_metrics(tmp_path / "run" / "metrics.jsonl")[-1][metric] <= 100
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == classes
    if metric == "val_top1":
        rows = evaluate_run(tmp_path / "run", ["classes"], device="cpu", progress=False).rows
        assert {row.metric for row in rows} == {"balanced", "f1", "auroc"}


def scores(images: int = 60, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Logits, many of them equal, and labels."""
    random = np.random.default_rng(1)
    return random.normal(size=(images, classes)).round(1), random.random((images, classes)) < 0.3


def test_metrics_are_those_of_scikit_learn_also_of_a_draw() -> None:
    logits, labels = scores()
    for counts in (np.ones(60), np.random.default_rng(2).multinomial(60, np.full(60, 1 / 60)).astype(float)):
        drawn = np.repeat(np.arange(60), counts.astype(int))
        got = label_metrics(np.concatenate([logits, labels], 1), counts[None], list("abcd"))
        expected = {
            "map": metrics.average_precision_score(labels[drawn], logits[drawn], average="macro"),
            "f1": metrics.f1_score(labels[drawn], logits[drawn] >= 0, average="macro", zero_division=np.nan),
            "auroc": metrics.roc_auc_score(labels[drawn], logits[drawn], average="macro"),
            "f1/b": metrics.f1_score(labels[drawn, 1], logits[drawn, 1] >= 0),
            "auroc/d": metrics.roc_auc_score(labels[drawn, 3], logits[drawn, 3]),
        }
        for name, value in expected.items():
            assert got[name] == pytest.approx([100 * value], abs=1e-10), name


def test_metrics_of_one_label_are_those_of_scikit_learn() -> None:
    probabilities = torch.from_numpy(scores()[0]).softmax(1).numpy()
    labels = np.random.default_rng(3).choice(4, 60, p=[0.6, 0.2, 0.1, 0.1])
    rows = np.concatenate([probabilities, labels[:, None]], 1)
    got = pool_classes(None, "classes", rows, np.ones((1, 60)))  # type: ignore[arg-type]  # needs no context
    predicted = probabilities.argmax(1)
    assert got["balanced"] == pytest.approx([100 * metrics.balanced_accuracy_score(labels, predicted)])
    assert got["f1"] == pytest.approx([100 * metrics.f1_score(labels, predicted, average="macro")])
    assert got["auroc"] == pytest.approx([100 * metrics.roc_auc_score(labels, probabilities, multi_class="ovr")])


def test_two_processes_measure_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = (torch.from_numpy(values.astype(float)) for values in scores())
    data: Any = SimpleNamespace(val=range(60), classes=list("abcd"), name="drawn", check_logits=lambda *_: None)

    def measured(part: int, parts: int) -> LabelMeter:
        monkeypatch.setattr(training, "process_number", lambda: part)
        monkeypatch.setattr(training, "process_count", lambda: parts)
        meter = LabelMeter(data)
        for start in range(0, 60, 25):
            share = slice(start + part, min(start + 25, 60), parts)
            meter.add(nn.Identity(), logits[share], labels[share])
        return meter

    alone, first, second = measured(0, 1), measured(0, 2), measured(1, 2)
    expected = 100 * metrics.average_precision_score(labels.numpy(), logits.numpy(), average="macro")
    assert alone.values(alone.sums) == pytest.approx((expected,))
    assert first.values(first.sums + second.sums) == pytest.approx((expected,))


def test_a_class_without_images_has_no_rank() -> None:
    assert np.isnan(ranked(np.zeros((4, 1)), np.zeros((4, 1), bool), np.ones((2, 4)))).all()


def test_the_loss_and_its_gradient_are_torchs() -> None:
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets = (torch.rand(5, 3) < 0.4).float()
    loss = multi_hot_loss(logits, targets)
    probabilities = logits.detach().sigmoid()
    assert loss.item() == pytest.approx(F.binary_cross_entropy(probabilities, targets.double()).item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, (probabilities - targets) / 15, rtol=1e-12)
    assert torch.equal(multi_hot_loss((logits, None), targets), loss)
    with pytest.raises(RecastError, match=r"\(5, 3\).*\(5, 2\)"):
        multi_hot_loss(logits[:, :2], targets)


def test_images_are_grouped_by_their_rarest_class() -> None:
    hot = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 0]])
    assert rarest(hot).tolist() == [0, 1, 3, 2, 1]


def test_balanced_weights_make_classes_count_equally() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    weights = balanced_weights(labels, 3)
    sklearn_s = class_weight.compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert weights.tolist() == pytest.approx(sklearn_s.tolist())
    logits = torch.randn(10, 3, dtype=torch.float64)
    loss, plain = label_loss(ClassifyConfig(), 3, weights), label_loss(ClassifyConfig(), 3)
    for targets in (labels, F.one_hot(labels, 3).double()):
        of_classes = [plain(logits[labels == c], targets[labels == c]).item() for c in range(3)]
        assert loss(logits, targets).item() == pytest.approx(sum(of_classes) / 3)
