"""A run folder that is missing a file or holds half of one: the error names it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recast.errors import RecastError
from recast.report.read.run import read_run

MakeRun = Callable[..., Path]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(0.7 * len(content))])


def test_reads_what_was_written(make_run: MakeRun) -> None:
    run = read_run(make_run(gain=0.4, epochs=3))
    assert [row["epoch"] for row in run.metrics] == [0, 1, 2, 3]
    assert len(run.control) == 4
    assert run.value("recast", "clean", "top1") == pytest.approx(97.2)
    assert math.isnan(run.value("recast", "clean", "nothing"))
    assert run.attention is not None
    assert run.attention.predictions == ["0", "6", "8"]
    assert [layer.mix.shape for layer in run.attention.layers] == [(3, 9, 16, 16), (3, 9, 8, 8)]


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"not a run folder: .*nowhere"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["recipe.yaml", "plan.json", "metrics.jsonl"])
def test_a_needed_file_is_missing(make_run: MakeRun, name: str) -> None:
    path = make_run()
    (path / name).unlink()
    with pytest.raises(RecastError, match=rf"{name} is missing"):
        read_run(path)


@pytest.mark.parametrize("name", ["verify.json", "environment.json", "rows.csv", "attention.npz", "finetuned"])
def test_the_rest_may_be_missing(make_run: MakeRun, name: str) -> None:
    path = make_run()
    if (path / name).is_dir():
        shutil.rmtree(path / name)
    else:
        (path / name).unlink()
    read_run(path)


@pytest.mark.parametrize(
    "name",
    ["plan.json", "metrics.jsonl", "finetuned/metrics.jsonl", "verify.json", "environment.json", "attention.npz"],
)
def test_a_truncated_file_is_named(make_run: MakeRun, name: str) -> None:
    path = make_run()
    cut(path / name)
    with pytest.raises(RecastError, match=rf"{name}.* truncated or not"):
        read_run(path)


def test_a_truncated_table_names_its_line(make_run: MakeRun) -> None:
    path = make_run()
    rows = path / "rows.csv"
    rows.write_text(
        "\n".join(rows.read_text(encoding="utf-8").splitlines()[:4]) + "\nrun,parent,fgsm", encoding="utf-8"
    )
    with pytest.raises(RecastError, match=r"rows\.csv line 5: expected 9 cells"):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("recipe.yaml", "a: [1", "not readable YAML"),
        ("recipe.yaml", "- 1", "must hold a mapping, got list"),
        ("metrics.jsonl", "\n", "is empty"),
        ("metrics.jsonl", '{"epoch": 0}\n', "line 1 lacks val_loss, val_top1"),
        ("plan.json", '{"steps": []}', "lacks left"),
        (
            "plan.json",
            '{"steps": [{"name": "a", "before": 1, "after": {}}], "left": []}',
            "must be a JSON object, got int",
        ),
        ("verify.json", "[]", "must be a JSON object, got list"),
        ("rows.csv", "run,model,value\n", "must start with the columns run,model,suite"),
    ],
)
def test_another_format(make_run: MakeRun, name: str, content: str, message: str) -> None:
    path = make_run()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(RecastError, match=message):
        read_run(path)


def test_attention_of_another_shape(make_run: MakeRun) -> None:
    path = make_run()
    with np.load(path / "attention.npz") as stored:
        arrays = dict(stored)
    np.savez(path / "attention.npz", **arrays | {"mix_1": arrays["mix_1"][:, :4]})
    with pytest.raises(RecastError, match=r"mix_1 must be .*\(3, 9, h, w\), got \(3, 4, 8, 8\)"):
        read_run(path)
    del arrays["gate_0"]
    np.savez(path / "attention.npz", **arrays)
    with pytest.raises(RecastError, match="gate_0"):
        read_run(path)


def test_a_repeated_epoch_counts_once(make_run: MakeRun) -> None:
    path = make_run(epochs=2)
    again = {"epoch": 1, "val_loss": 1.0, "val_top1": 12.5}
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n")
    assert [row["val_top1"] for row in read_run(path).metrics if row["epoch"] == 1] == [12.5]
