import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_pages import data_of
from PIL import Image
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import recast.lab.explain
from recast import RecastConfig, RecastError, plan, recast_
from recast.lab.analysis.grad_cam import grad_cam
from recast.lab.explain.inputs import Input
from recast.lab.explain.make import explain, make_scene
from recast.lab.explain.scene import GRAD_CAM, Layer, Maps, Picture, Prediction, Scene, share_text
from recast.lab.explain.write import LIMIT, pack, write_scene
from recast.layers.config import PAPERS_LAYER


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 7),
    )


def child() -> Any:
    model = network()
    return recast_(
        model, plan(model, torch.zeros(1, 3, 8, 8), RecastConfig("linear", **PAPERS_LAYER), where=["0", "2"])
    )


def page_of(model: nn.Module, image: Any, path: Path, **options: Any) -> Any:
    """The data of a page."""
    return data_of(explain(model, image, path / "page.html", **options))


def test_predictions_are_those_of_the_normalised_image(tmp_path: Path) -> None:
    model, image = child().train(), torch.rand(3, 8, 8)
    names, mean, std = [f"class {i}" for i in range(7)], (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    data = page_of(model, image, tmp_path, classes=names, mean=mean, std=std, against={"parent": network()})
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        normalised = (image - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        best = model.eval()(normalised[None]).softmax(1)[0].topk(5)
    ranked, parents = (data["pictures"][0]["predictions"][arm] for arm in ("recast", "parent"))
    assert ranked == parents  # the linear gate's start is the parent
    assert [name for name, _ in ranked] == [names[i] for i in best.indices.tolist()]
    assert [p for _, p in ranked] == pytest.approx(best.values.tolist(), abs=2e-5)
    assert list(data["arms"].values()) == ["Parent", "Recast"]
    assert data["order"] == ["0", "2", "Grad-CAM"]


class Detector(nn.Module):
    """Normalises images itself, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.transform = network(), GeneralizedRCNNTransform(8, 8, [0.5] * 3, [0.5] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x
        logits: torch.Tensor = self.body(x)
        return logits


def test_a_detector_of_torchvision_gets_pixels(tmp_path: Path) -> None:
    detector, image = Detector(), torch.rand(3, 8, 8)
    page_of(detector, image, tmp_path)
    torch.testing.assert_close(detector.input[0], image, rtol=0, atol=0)


def test_a_file_and_a_half_precision_model(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(path)
    from_file = page_of(child(), path, tmp_path, size=(10, 12))["pictures"][0]
    assert from_file["size"] == [10, 12]
    assert from_file["predictions"]["recast"][0][0] in map(str, range(7))  # numbers where classes have no names
    assert page_of(child().to(torch.bfloat16), path, tmp_path, size=8)["order"] == ["0", "2", "Grad-CAM"]


def test_grad_cam_of_every_arm_side_by_side() -> None:
    image, (model, parent) = torch.rand(3, 8, 8), (child(), network())
    with torch.no_grad():
        parent[6].weight.mul_(-1)
    model.insert(3, nn.Upsample(scale_factor=2))  # its last map is larger
    networks, labels = {"parent": parent, "recast": model}, {"parent": "Parent", "recast": "Recast"}
    names = [f"class {i}" for i in range(7)]
    scene = make_scene("title", [Input("a", image)], networks, names, ((0,) * 3, (1,) * 3), labels)
    stored = scene.pictures[0].maps["Grad-CAM"]
    with torch.no_grad():
        shares = {arm: arm_network.eval()(image[None]).softmax(1)[0] for arm, arm_network in networks.items()}
    best = shares["recast"].topk(3).indices
    assert stored.names == tuple(
        f"{labels[arm]}: {names[i]}, {share_text(float(shares[arm][i]))}" for arm in labels for i in best.tolist()
    )
    cams: list[Any] = [grad_cam(arm_network, image[None], best[None]) for arm_network in networks.values()]
    assert [maps.shape[-2:] for maps in cams] == [(4, 4), (8, 8)]
    large = torch.cat([nn.functional.interpolate(maps, (8, 8), mode="bilinear")[0] for maps in cams])
    assert np.abs(stored.values[:, 0, 0] - large.numpy()).max() < 0.004 * float(large.max())
    assert min(large[:3].max(), large[3:].max()) > 0


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    image, broken = torch.rand(3, 8, 8), child()
    with torch.no_grad():
        broken[2].gamma[3] = torch.nan
    for model, pixels, options, match in (
        (child(), torch.rand(1, 8, 8), {}, "got a tensor"),
        (child(), torch.rand(1, 3, 8, 8), {}, "got a tensor"),
        (child(), torch.zeros(3, 8, 8, dtype=torch.uint8), {}, "got a tensor"),
        (child(), image, {"classes": ["a", "b", "c"]}, "3 class names for a network with 7 outputs"),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), image, {}, "on an image of 8×8 pixels failed: "),
        (broken, image, {}, "2 has gates or positions that are not finite"),
    ):
        with pytest.raises(RecastError, match=match):
            page_of(model, pixels, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


ASSETS = Path(recast.lab.explain.__file__).parent / "assets"


def a_layer(name: str = "layer4", kind: str = "gpsa", side: int = 6) -> Layer:
    grid = range(side), range(side)
    return Layer(name, kind, "3×3 pad 1", (3, 3), (), (side + 2, side + 2), grid, grid)


def a_scene(count: int = 1, side: int = 6, **fields: Any) -> Scene:
    random, stored = np.random.default_rng(0), tuple(range(side))
    pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    predictions = {"parent": (Prediction("dog", 0.5, 0),), "recast": (Prediction("cat", 0.75, 1),)}
    shown = []
    for number in range(count):
        values = random.dirichlet(np.ones(side * side), (9, side, side)).reshape(9, side, side, side, side)
        maps = Maps.of(values.astype(np.float32), stored, stored)
        shown.append(Picture(f"cat {number}.jpg", pixels, "cat", (), predictions, {"layer4": maps}))
    arms = {"parent": "Parent", "recast": "Recast"}
    return replace(Scene("net on pets", arms, (a_layer(side=side),), tuple(shown)), **fields)


def test_maps_of_classes_are_open_first(tmp_path: Path) -> None:
    kinds = zip("abcd", ("gpsa", "classes", "classes", "maps"), strict=True)
    scene = a_scene(layers=tuple(a_layer(name, kind) for name, kind in kinds))
    assert (scene.first_layer(), scene.first_layer("a"), a_scene().first_layer()) == ("c", "a", "layer4")
    cam = a_layer(GRAD_CAM, "classes")  # where there is nothing else
    for layers, first in (((), None), ((cam,), GRAD_CAM), ((a_layer("d"), cam), "d")):
        assert a_scene(layers=layers).first_layer() == first
    with pytest.raises(RecastError, match=r"'layer5' .*Did you mean layer4"):
        write_scene(a_scene(), tmp_path / "page.html", layer="layer5")
    assert list(tmp_path.iterdir()) == []


def test_a_page_too_large_gets_coarser_maps_and_says_so() -> None:
    def maps(limit: int) -> tuple[dict[str, Any], list[str]]:
        packed = pack(a_scene(side=8), limit=limit)
        return packed["pictures"][0]["maps"]["layer4"], packed["notes"]

    full, notes = maps(LIMIT)
    assert notes == []
    half, notes = maps(len(full["data"]) // 2)
    assert len(half["data"]) < len(full["data"]) / 2
    coarse = "layer4: maps are stored for every second query in each direction (others show the nearest)"
    assert notes == [f"{coarse} to keep the page small."]
    assert maps(0)[0]["blocks"] == (2, 2)  # the coarsest that there is; pack returns


def test_a_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = write_scene(a_scene(2), tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r'\s(?:src|href|srcset|action)="([^"]*)"', text))
    assert {address for address in addresses if not address.startswith("data:image")} == {"data:,"}
    assert "url(" not in text
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|import\(", text)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert LIMIT + sum(path.stat().st_size for path in ASSETS.iterdir()) < 8_000_000  # as documented


def test_what_names_say_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>$style&amp;"
    predictions = {"recast": (Prediction(evil, 0.5, 0),)}
    picture = replace(a_scene().pictures[0], name=evil, label=evil, predictions=predictions)
    scene = a_scene(title=evil, notes=(evil,), about=(("Run", evil),), pictures=(picture,))
    path = write_scene(scene, tmp_path / "page.html")
    assert path.read_text(encoding="utf-8").count("<script") == 2
    data = data_of(path)
    assert data["title"] == data["notes"][0] == data["pictures"][0]["name"] == evil
    assert data["pictures"][0]["predictions"]["recast"][0][0] == evil


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine", encoding="utf-8")
    for out, message in (
        (tmp_path / "mine.html", "was not written by this command"),
        (tmp_path, "got the folder"),
        (tmp_path / "no" / "page.html", "does not exist"),
        (tmp_path / "page.pdf", r"page\.pdf: use the ending \.html"),
        (tmp_path / "page.JPG", r"page\.JPG: use the ending \.html"),
    ):
        with pytest.raises(RecastError, match=message):
            write_scene(a_scene(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
