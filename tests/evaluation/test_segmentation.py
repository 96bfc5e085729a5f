from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import binary_erosion
from sklearn.metrics import confusion_matrix
from torch import nn

from recast.lab.config.evaluation import Options
from recast.lab.data import Data
from recast.lab.evaluation.runner import measure, open_context
from recast.papers.dense.predictions import draw_predictions
from recast.papers.dense.segment.evaluation import inner_boundary, mask_panels, mean_iou, over_views, pixel_counts
from recast.papers.dense.segment.networks import SceneFCN
from recast.papers.dense.segment.pairs import IGNORE, ImagePairs

CLASSES = ["a", "b", "c", "nowhere"]


class Reads(nn.Module):
    """Predicts what the red channel says, as torchvision's dictionary of (B, 4, H, W)."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.shift, self.scale = shift, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        of_red = ((x[:, 0] * 255).round().long() + self.shift) % 3
        return {"out": nn.functional.one_hot(of_red, 4).permute(0, 3, 1, 2).float() * self.scale}


def dense_data(count: int = 12) -> Data:
    pixels = torch.randint(3, (count, 3, 8, 8)).to(torch.uint8)
    masks = torch.where(torch.rand(count, 8, 8) < 0.4, pixels[:, 0], pixels[:, 1])
    masks[torch.rand(count, 8, 8) < 0.1] = IGNORE
    pairs = ImagePairs(pixels, masks, 8)
    return Data("noise", pairs, pairs, CLASSES, (0.0,) * 3, (1.0,) * 3, 8)


def of_matrix(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    known = labels != IGNORE
    matrix = confusion_matrix(labels[known], predicted[known], labels=range(len(CLASSES)))
    right, labelled, answered = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    with np.errstate(invalid="ignore"):
        iou, accuracy = right / (labelled + answered - right), right / labelled
    scores = {f"iou/{name}": value for name, value in zip(CLASSES, iou, strict=True) if np.isfinite(value)}
    scores |= {"miou": np.nanmean(iou), "macc": np.nanmean(accuracy), "aacc": right.sum() / labelled.sum()}
    return {name: 100 * value for name, value in scores.items()}


def by_erosion(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Boundary IoU written out: of each class its masks without the eroded ones, intersections over unions."""
    d = max(1, round(0.02 * float(np.hypot(*labels.shape[1:]))))
    values = []
    for number in range(len(CLASSES)):
        both = either = 0
        for truth, prediction in zip(labels, predicted, strict=True):
            masks = [truth == number, (prediction == number) & (truth != IGNORE)]
            inner = [m & ~binary_erosion(m, np.ones((3, 3)), iterations=d, border_value=0) for m in masks]
            both, either = both + (inner[0] & inner[1]).sum(), either + (inner[0] | inner[1]).sum()
        if either:
            values.append(both / either)
    return 100 * float(np.mean(values))


@pytest.mark.parametrize(
    ("shape", "cell"), [((3, 20, 30), 6), ((2, 90, 120), 13), ((1, 150, 30), 40), ((2, 1, 70), 5), ((1, 60, 60), 60)]
)
def test_boundary_iou(shape: tuple[int, int, int], cell: int) -> None:
    random = np.random.default_rng(cell)
    grid = np.ix_(range(shape[0]), *(np.arange(side) // cell for side in shape[1:]))
    labels, predicted = (random.integers(0, 3, shape)[grid] for _ in range(2))
    predicted = np.where(random.random(shape)[grid] < 0.6, labels, predicted)
    labels[random.random(shape) < 0.002] = IGNORE
    maps = torch.from_numpy(np.where(labels == IGNORE, IGNORE, predicted)), torch.from_numpy(labels)
    means = pixel_counts(*map(inner_boundary, maps), 4).mean(0).numpy()
    assert float(mean_iou(means.ravel())) == pytest.approx(by_erosion(labels, predicted), rel=1e-12)


def test_the_suite_has_intervals_and_paired_differences() -> None:
    data, models = dense_data(), {"recast": Reads(), "finetuned": Reads(1)}
    results = measure(open_context(models, data, 5), ["segmentation", "cost"], progress=False)
    labels = np.stack([mask for _, mask in data.val])
    pixels = np.stack([(image[0] * 255).round() for image, _ in data.val])
    for name, shift in (("recast", 0), ("finetuned", 1)):
        predicted = (pixels + shift) % 3
        expected = of_matrix(labels, predicted) | {"boundary_iou": by_erosion(labels, predicted)}
        rows = {row.metric: row for row in results.rows if (row.model, row.suite) == (name, "segmentation")}
        assert rows.keys() == expected.keys(), "a class that is nowhere has no IoU"
        for metric, row in rows.items():
            assert row.value == pytest.approx(expected[metric], rel=1e-5)
            assert row.low < row.value < row.high
            assert row.n == 12
    (gap,) = [line for line in results.differences if line.metric == "miou"]
    assert 0 < gap.low < gap.value < gap.high


def test_scales_and_mirrored_images() -> None:
    network, images = SceneFCN(3, widths=(4, 6, 8)).eval(), torch.rand(2, 3, 24, 36)
    forward = torch.no_grad()(network)
    assert torch.equal(over_views(forward, images, (1.0,), flip=False), forward(images))
    large = nn.functional.interpolate(images, (36, 54), mode="bicubic", antialias=True).clamp(0, 1)
    views = [forward(images), forward(images.flip(3)).flip(3)]
    for logits in (forward(large), forward(large.flip(3)).flip(3)):
        views.append(nn.functional.interpolate(logits, (24, 36), mode="bilinear"))
    mean = torch.stack([logits.softmax(1) for logits in views]).mean(0)
    torch.testing.assert_close(over_views(forward, images, (1.0, 1.5), flip=True), mean)


@pytest.mark.parametrize("mode", ["square", "whole"])
def test_images_of_other_shapes(mode: Any, tmp_path: Path) -> None:
    """Every pixel of wide and tall images counts once, and what fills a batch up does not."""
    random, sizes = np.random.default_rng(0), [(8, 8), (8, 20), (13, 8), (16, 16), (24, 16)]
    arrays: Any = {"image": [], "mask": []}
    for number, (height, width) in enumerate(sizes):
        factor = min(height, width) // 8
        for name, drawn in arrays.items():
            drawn.append(random.integers(0, 3, (height // factor, width // factor), np.uint8))
            large = drawn[-1].repeat(factor, 0).repeat(factor, 1)
            Image.fromarray(large).save(tmp_path / f"{name}{number}.png")
    files = [[str(tmp_path / f"{name}{number}.png") for number in range(len(sizes))] for name in arrays]
    pairs = ImagePairs(*files, 8, num_classes=4)
    data = Data("files", pairs, pairs, CLASSES, (0.0,) * 3, (1.0,) * 3, 8)
    context = open_context({"recast": Reads()}, data, 3, options=Options(test_mode=mode))
    rows = {row.metric: row.value for row in measure(context, ["segmentation"], progress=False).rows}
    rows.pop("boundary_iou")
    pixels, labels = (np.concatenate([array.ravel() for array in drawn]) for drawn in arrays.values())
    everything = of_matrix(labels, pixels)
    if mode == "square":
        assert rows["miou"] != pytest.approx(everything["miou"], rel=1e-3)
    else:
        assert rows == pytest.approx(everything, rel=1e-5)


def test_predictions_are_drawn() -> None:
    data = dense_data()
    context = open_context({"recast": Reads(), "finetuned": Reads(1)}, data, 5)
    drawn = np.asarray(draw_predictions(context, mask_panels, count=3))
    assert drawn.shape == (3 * 12, 4 * 12, 3)
    image, mask, recast, finetuned = (panel[2:10, 2:10] for panel in np.split(drawn[:12], 4, axis=1))
    (index,) = [i for i, (pixels, _) in enumerate(data.val) if np.array_equal(pixels.permute(1, 2, 0) * 255, image)]
    assert np.array_equal((mask == 255).all(-1), data.val[index][1] == IGNORE)
    known = data.val[index][1].numpy() != IGNORE
    agree = data.val[index][1].numpy() == image[..., 0]
    assert np.array_equal((mask == recast).all(-1)[known], agree[known])
    assert not (recast == finetuned).all(-1).any()
