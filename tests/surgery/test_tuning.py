"""`tune_`: the fastest form of each layer, mode and size runs, and nothing else changes."""

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import PAD_1, outputs_and_gradients, recast_copy
from torch import Tensor, nn

import recast
from recast import GPSA, Geometry, RecastConfig, RecastError
from recast.layers.cmhsa import gated_layers
from recast.layers.forms import Forms
from recast.surgery import chosen_forms, tuning


def network(open_gates: Callable[..., GPSA]) -> nn.Sequential:
    """Two layers of the same kind, one with a stride, and one that no image reaches."""
    config = RecastConfig("linear", content_heads=3, gaussian_heads=2)
    same, strided = PAD_1, Geometry((3, 3), (2, 2), (1, 1, 1, 1))
    model = nn.Sequential(*(GPSA(4, 4, geometry, config=config) for geometry in (same, same, strided))).double()
    model[0].aside = GPSA(4, 4, PAD_1).double()
    for layer in gated_layers(model).values():
        open_gates(layer)
    return model


def timing(**milliseconds: float) -> Callable[..., dict[str, list[float]]]:
    """Replace the clock: every form takes 1 s unless named."""

    def times(models: Mapping[str, Any], images: Tensor, *_: Any) -> dict[str, list[float]]:
        for model in models.values():
            model(images)  # every form runs
        return {form: [milliseconds.get(form, 1.0)] * 3 for form in models}

    return times


@pytest.mark.parametrize("form", tuning.FORMS)
def test_a_choice_runs_and_changes_nothing(
    form: str, open_gates: Any, error_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = network(open_gates), torch.randn(2, 4, 7, 6, dtype=torch.float64)
    expected = {size: outputs_and_gradients(model, x[..., :size], allow_unused=True) for size in (6, 5)}
    monkeypatch.setattr(tuning, "time_models", timing(**{form: 0.5}))
    random = torch.get_rng_state()
    table = recast.tune_(model, x)
    assert [(row.layers, row.mode, row.chosen) for row in table] == [
        (name, mode, form) for name in ("0 and 1 more", "2") for mode in ("inference", "training")
    ]
    assert table.left_out == ["0.aside"]
    assert "0.aside" in str(table)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    for tuned in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = tuned[0]
        assert layer.chosen_backend((7, 6)) == layer.eval().chosen_backend((7, 6)) == form
        assert (layer.chosen_backend((7, 5)), layer.aside.chosen_backend((7, 6))) == ("merged", "merged")  # by the rule
        for size, values in expected.items():
            measured = outputs_and_gradients(tuned.train(), x[..., :size], allow_unused=True)
            assert measured.keys() == values.keys()
            assert all(error_of(measured[name], value) < 1e-10 for name, value in values.items())
    model[0].prune_((), (4,))
    assert not model[0].tuned


def test_the_modes_are_chosen_apart(open_gates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = network(open_gates), torch.randn(1, 4, 7, 6, dtype=torch.float64), []

    def times(models: Mapping[str, Any], images: Tensor, *_: Any) -> dict[str, list[float]]:
        fast = "dense" if model[0].training or model[2].training else "merged"
        calls.append(fast)
        return {form: [0.5 if form == fast else 1.0] for form in models}

    monkeypatch.setattr(tuning, "time_models", times)
    recast.tune_(model.eval(), x)
    assert set(calls) == {"dense", "merged"}
    assert not any(module.training for module in model.modules())
    assert model[0].chosen_backend((7, 6)) == "merged"
    assert model.train()[0].chosen_backend((7, 6)) == "dense"


@pytest.mark.parametrize("ratios", [(0.98, 0.98), (0.5, 0.99)])
def test_a_form_that_is_not_clearly_faster_twice_is_not_taken(
    ratios: tuple[float, float], open_gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(models: Mapping[str, Any], images: Tensor, *_: Any) -> dict[str, list[float]]:
        return {form: [ratios[len(models) == 2] if form == "dense" else 1.0] for form in models}

    monkeypatch.setattr(tuning, "time_models", times)
    table = recast.tune_(network(open_gates), torch.randn(1, 4, 7, 6, dtype=torch.float64))
    assert {(row.before, row.chosen, row.over_before) for row in table} == {("merged", "merged", 1.0)}


@pytest.mark.parametrize(
    ("geometry", "size"),
    [(PAD_1, 16), (Geometry((3, 3), padding=(1, 1, 1, 1), upsample=(2, 2), is_transposed=True), 8)],
)
def test_a_slow_form_that_was_set_is_replaced(geometry: Geometry, size: int, open_gates: Any) -> None:
    """On the real clock: the definition goes head by head with whole maps, several times slower than any other."""
    model = nn.Sequential(open_gates(GPSA(8, 8, geometry, config=RecastConfig("linear", backend="reference"))))
    with torch.inference_mode():
        table = recast.tune_(model, torch.randn(4, 8, size, size), seconds=0.02)
    assert [row.before for row in table] == ["reference", "reference"]
    assert "reference" not in {row.chosen for row in table}
    assert all(row.over_before < 0.8 for row in table)
    assert model[0].backend == "auto"
    assert model[0].chosen_backend((size, size)) == table[1].chosen
    assert all(p.grad is None for p in model.parameters())


def test_closed_heads_stay_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, x = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval(), torch.randn(2, 4, 6, 6)
    child = recast_copy(parent, x)
    monkeypatch.setattr(tuning, "time_models", timing(dense=0.5))
    (row,) = recast.tune_(child.eval(), x)
    assert (row.mode, row.chosen) == ("training", "dense")
    assert torch.equal(child(x), parent(x))


@pytest.mark.parametrize("machine", ["this", "another"])
def test_choices_are_saved_and_hold_on_a_device_of_the_same_name(
    machine: str, tmp_path: Path, open_gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, x = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)).eval(), torch.randn(2, 4, 6, 6)
    child = recast_copy(parent, x, RecastConfig("linear", content_heads=1), where=["0"])
    untuned = recast.save(child, tmp_path / "untuned.safetensors")
    assert not recast.load(untuned, parent)[0].tuned
    open_gates(child[0])
    monkeypatch.setattr(tuning, "time_models", timing(dense=0.5))
    recast.tune_(child, x)
    path = recast.save(child, tmp_path / "tuned.safetensors")
    if machine == "another":
        monkeypatch.setattr(chosen_forms, "device_name", lambda kind: "another")
    loaded = recast.load(path, parent)
    layer = loaded[0]
    assert layer.tuned == (child[0].tuned if machine == "this" else ())
    assert layer.chosen_backend((6, 6)) == ("dense" if machine == "this" else "split")
    torch.testing.assert_close(loaded(x), child.eval()(x))


def test_a_form_that_is_none_is_refused(tmp_path: Path) -> None:
    parent, x = nn.Sequential(nn.Conv2d(4, 4, 3)).eval(), torch.randn(2, 4, 6, 6)
    child = recast_copy(parent, x)
    child[0].tuned = (Forms("cpu", (6, 6), "eval", "split"),)
    path = recast.save(child, tmp_path / "child.safetensors")
    with pytest.raises(RecastError, match=r"child\.safetensors's forms.*eval"):
        recast.load(path, parent)


def test_networks_without_a_choice_are_refused() -> None:
    for layer in (nn.Conv2d(4, 4, 3), recast.CMHSA(4, 4, PAD_1)):
        with pytest.raises(RecastError, match="no layer with gates: call recast_"):
            recast.tune_(nn.Sequential(layer), torch.randn(1, 4, 6, 6))
    model = nn.Identity()
    model.aside = GPSA(4, 4, PAD_1, config=RecastConfig("linear", backend="dense"))
    with pytest.raises(RecastError, match="aside"):
        recast.tune_(model, torch.randn(1, 4, 6, 6))
    assert model.aside.backend == "dense"
