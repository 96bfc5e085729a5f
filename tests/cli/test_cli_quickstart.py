"""`recast quickstart`, with its two trainings shortened to nothing where they are not the point."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import recast.lab.training.run as training
from recast.lab.cli import quickstart
from recast.lab.config import Recipe

Cli = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    train = training.train

    def smaller(recipe: Recipe, *args: Any, **kwargs: Any) -> Path:
        data = recipe.data.replace(img_size=16, num_train=40, num_val=20, batch_size=20)
        return train(recipe.replace(data=data, epochs=1, device="cpu"), *args, **kwargs)

    monkeypatch.setattr(training, "train", smaller)
    monkeypatch.setattr(quickstart, "SUITES", ("clean",))


@pytest.mark.usefixtures("small")
def test_interrupted_in_each_phase_and_resumed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    fit = training.fit

    def interrupt(number: int) -> None:
        """Let Ctrl-C come when the training of arm `number` begins."""
        calls = iter(range(9))

        def pressed(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return fit(*args, **kwargs)

        monkeypatch.setattr(training, "fit", pressed)

    interrupt(0)
    words = ("quickstart", "--out", out, "--seed", "3")
    first = cli(*words)
    assert (first.code, "the same command goes on" in first.err.splitlines()[-1]) == (130, True)
    interrupt(2)
    assert cli(*words).code == 130
    assert (out / "weights.safetensors").is_file()
    assert cli("quickstart", "--out", out).code == 2  # of another seed

    monkeypatch.setattr(training, "fit", fit)
    done = cli(*words, "--json")
    assert done.code == 0
    assert "goes on with the quickstart" in done.err
    assert cli(*words).code == 2  # it is finished
    story = json.loads(done.out)
    assert Path(story["report"]).is_file()
    assert {row["model"] for row in story["rows"]} == {"parent", "finetuned", "recast"}
    assert "5/5  report" in done.err
    assert all("seed: 3" in path.read_text(encoding="utf-8") for path in out.rglob("recipe.yaml"))


def test_refused_before_anything_is_done(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert "is a file" in refused("quickstart", "--out", tmp_path / "file")
    assert "exists: delete it" in refused("quickstart", "--out", tmp_path)
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert "needs matplotlib: pip install matplotlib" in refused("quickstart", "--out", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
