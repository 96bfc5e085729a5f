"""From models and images to what a page shows, and the library's verb, without a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from recast.errors import RecastError
from recast.evaluation.run_folder import Run
from recast.explain.inputs import Input
from recast.explain.make import explain, make_scene
from recast.explain.pages import kept_states
from recast.explain.scene import Maps
from recast.layers.gpsa import GPSA
from recast.surgery.apply import recast_
from recast.surgery.planning import plan

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


def network(classes: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes),
    )  # fmt: skip


def child(*names: str) -> nn.Sequential:
    model = network()
    recast_(model, plan(model, torch.zeros(1, 3, 8, 8), where=["0", "2"]), steps=list(names) or ["0", "2"])
    return model


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_predictions_are_those_of_the_normalised_image(tmp_path: Path) -> None:
    model, image = child().train(), torch.rand(3, 8, 8)
    names = [f"class {i}" for i in range(7)]
    page = explain(
        model, image, tmp_path / "page.html", classes=names, mean=MEAN, std=STD, against={"parent": network()}
    )
    assert all(module.training for module in model.modules())
    model.eval()
    with torch.no_grad():
        normalised = (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        wanted = model(normalised[None]).softmax(1)[0]
    data = data_of(page)
    ((ranked, parents),) = [(found["recast"], found["parent"]) for found in data["pictures"][0]["predictions"]]
    assert ranked == parents  # the linear gate's start is the parent
    assert [name for name, _ in ranked] == [names[i] for i in wanted.topk(5).indices.tolist()]
    assert [p for _, p in ranked] == pytest.approx(wanted.topk(5).values.tolist(), abs=2e-5)
    assert list(data["arms"].values()) == ["Parent", "Recast"]
    assert data["order"] == ["0", "2"]


def test_every_kind_of_source_and_of_model(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    picture.save(tmp_path / "x.png")
    from_file, from_picture = (
        data_of(explain(child(), source, tmp_path / "page.html", size=(10, 12)))["pictures"][0]
        for source in (tmp_path / "x.png", picture)
    )
    assert from_file["size"] == from_picture["size"] == [10, 12]
    assert from_file["src"] == from_picture["src"]
    assert from_file["predictions"] == from_picture["predictions"]
    assert from_file["predictions"][0]["recast"][0][0] in map(str, range(7))  # numbers where classes have no names
    half = child().to(torch.bfloat16)
    assert data_of(explain(half, picture, tmp_path / "page.html", size=8))["order"] == ["0", "2"]

    class Dense(nn.Module):
        """One number per pixel and class: nothing that could be ranked."""

        def __init__(self) -> None:
            super().__init__()
            self.body = child()[:4]

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.body(x)}

    dense = data_of(explain(Dense(), picture, tmp_path / "page.html", size=8))
    assert dense["pictures"][0]["predictions"] == [{}]
    assert dense["order"] == ["body.0", "body.2"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    image, out = torch.rand(3, 8, 8), tmp_path / "page.html"
    for wrong in (torch.rand(1, 8, 8), torch.rand(1, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(RecastError, match=r"pixels \(3, height, width\) in \[0, 1\], got a tensor"):
            explain(child(), wrong, out)
    with pytest.raises(RecastError, match="3 names of classes for a network with 7 outputs"):
        explain(child(), image, out, classes=["a", "b", "c"])
    with pytest.raises(RecastError, match=r"the network cannot take an image of 8×8 pixels: "):
        explain(nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), image, out)
    broken = child()
    with torch.no_grad():
        broken[2].gamma[3] = torch.nan
    with pytest.raises(RecastError, match="2 has gates or positions that are not finite"):
        explain(broken, image, out)
    with pytest.raises(RecastError, match=r"give it the ending \.html"):
        explain(child(), image, tmp_path / "page.txt")
    assert list(tmp_path.iterdir()) == []


def test_states_have_the_layers_they_had_then(open_gates: Callable[..., GPSA]) -> None:
    half, done = child("2"), child()
    open_gates(done[0])
    images = [Input(name, torch.rand(3, 8, 8)) for name in "ab"]
    networks = ((epoch, {"recast": model}) for epoch, model in ((0, network()), (1, half), (2, done)))
    scene = make_scene("title", images, networks, None, (MEAN, STD), {"recast": "Network"})
    assert [[layer.name for layer in state.layers] for state in scene.states] == [[], ["2"], ["0", "2"]]
    assert scene.layer_order == ("0", "2")  # as the image meets them, not as they came
    for picture in scene.pictures:
        assert [list(maps) for maps in picture.maps] == [[], ["2"], ["0", "2"]]
        assert len(picture.predictions) == 3
    one, other = (picture.maps[2]["0"].stored for picture in scene.pictures)
    assert not np.array_equal(one, other)


def test_many_kept_epochs_are_thinned_evenly(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for epoch in (*range(0, 101), 5000):
        (tmp_path / "checkpoints" / f"epoch-{epoch:04d}.safetensors").touch()
    (tmp_path / "checkpoints" / "epoch-x.safetensors").touch()
    recipe: Any = SimpleNamespace(epochs=100)
    run = Run(tmp_path, recipe, cast(Any, None), {})
    states, notes = kept_states(run)
    assert list(states) == [0, 10, 20, 30, 40, 50, 59, 69, 79, 89, 99, 100]
    assert states[100] is None  # the end is weights.safetensors itself
    assert notes == ["Of 101 epochs whose weights were kept, 12 are shown."]
    recipe.epochs = 4
    states, notes = kept_states(run)
    assert (list(states), notes) == ([0, 1, 2, 3, 4], [])


@pytest.mark.parametrize("signed", [False, True])
def test_stored_maps_come_back(signed: bool) -> None:
    """To half a step of 255 (or, signed, 127 on either side of 0), whose square root is what is stored."""
    values = np.random.default_rng(0).normal(size=(2, 1, 3, 4, 5)).astype(np.float32)
    values[0, 0, 0] = 0  # no scale to divide by
    values[1, 0, 2, 1, 1] = np.nan
    maps = Maps.of(values, (0,), (0, 1, 2), 2, names=("a", "b"), signed=signed)
    kept = np.nan_to_num(values) if signed else np.maximum(np.nan_to_num(values), 0)
    largest = np.abs(kept).max((-2, -1), keepdims=True)
    assert np.all(np.abs(maps.values - kept) <= (0.008 if signed else 0.004) * largest)
    assert np.array_equal(maps.values[0, 0, 0], np.zeros((4, 5)))
    assert (maps.stored.dtype, maps.stored[0, 0, 0, 0, 0]) == (np.uint8, 128 if signed else 0)
    by_hand = maps.scale[1, 0, 1]
    by_hand = by_hand * (
        np.sign(maps.stored[1, 0, 1] - 128.0) * ((maps.stored[1, 0, 1] - 128.0) / 127) ** 2
        if signed
        else (maps.stored[1, 0, 1] / 255.0) ** 2
    )
    assert np.allclose(maps.values[1, 0, 1], by_hand)
    coarse = maps.coarser_keys()
    assert (coarse.pool, coarse.names, coarse.signed) == (4, ("a", "b"), signed)
    sums = [[maps.values[1, 0, 1, i : i + 2, j : j + 2].sum() for j in (0, 2, 4)] for i in (0, 2)]
    assert np.allclose(coarse.values[1, 0, 1], sums, atol=0.008 * np.abs(sums).max())
    assert maps.fewer_queries().columns == (0, 2)
    assert maps.fewer_queries().signed is signed
