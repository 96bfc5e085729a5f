import csv
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recast.errors import RecastError
from recast.lab.config import DataConfig, Recipe
from recast.lab.config.evaluation import Options
from recast.lab.data import load_data
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.evaluation.runner import Results
from recast.lab.folder.files import locked
from recast.lab.folder.records import Row
from recast.lab.folder.tables import read_records
from recast.lab.open import open_run
from recast.lab.training.run import train
from recast.models.config import ModelConfig

SMALL = DataConfig("digits", img_size=16, num_train=40, num_val=30, batch_size=20)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on few digits."""
    recipe = Recipe(ModelConfig("digits_resnet"), SMALL, where=["layer3.1.conv1"], epochs=1, device="cpu")
    return train(recipe, tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "mine"))


def measured(folder: Path, *suites: str, **arguments: Any) -> Results:
    return evaluate_run(folder, suites, device="cpu", progress=False, **arguments)


def test_a_run_is_measured_by_one_at_a_time(copied: Path) -> None:
    with ThreadPoolExecutor(1) as threads, locked(copied), pytest.raises(RecastError, match="in use by another"):
        threads.submit(measured, copied, "clean").result()


@pytest.mark.slow
def test_two_processes_measure_what_one_does(copied: Path, two_processes: Any) -> None:
    shared = copied.rename(copied.with_name("shared"))
    alone = Path(shutil.copytree(shared, shared.with_name("alone")))
    words = "-m recast evaluate --suite clean,agreement,pgd --batch-size 8"
    done = two_processes(*words.split(), shared)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("clean top1") == 1
    measured(alone, "clean", "agreement", "pgd", batch_size=8)
    for file in ("rows.csv", "differences.csv", "analysis/agreement.csv"):
        texts = ((folder / file).read_text(encoding="utf-8").splitlines() for folder in (alone, shared))
        assert len({tuple(sorted(line.replace("alone", "shared") for line in text)) for text in texts}) == 1


def test_the_accuracy_is_the_one_that_training_wrote(copied: Path) -> None:
    rows = {(row.model, row.metric): row for row in measured(copied, "clean").rows}
    for arm, folder in (("recast", copied), ("finetuned", copied / "finetuned")):
        first, *_, last = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        assert rows[arm, "top1"].value == pytest.approx(last["val_top1"])
        assert rows[arm, "loss"].value == pytest.approx(last["val_loss"], rel=1e-5)
        assert rows["parent", "loss"].value == pytest.approx(first["val_loss"], rel=1e-5)
    assert {row.run for row in rows.values()} == {"mine"}
    assert sorted(map(str, read_records(copied / "rows.csv", Row))) == sorted(map(str, rows.values()))


def test_what_is_not_finished_or_damaged_is_named(copied: Path) -> None:
    for weights in (copied / "finetuned" / "weights.safetensors", copied / "weights.safetensors"):
        content = weights.read_bytes()
        weights.write_bytes(content[:1000])
        with pytest.raises(RecastError, match=f"{weights} is no readable"):
            open_run(copied)
        weights.write_bytes(content)
    weights.unlink()
    with pytest.raises(RecastError, match="recast train --resume"):
        open_run(copied)


def test_what_made_the_numbers_is_written_beside_them(copied: Path) -> None:
    options = Options(num_images=20, eps=(2.0,))
    measured(copied, "fgsm", "agreement", options=options, command="recast x")
    measured(copied, "clean")
    record = json.loads((copied / "evaluation.json").read_text(encoding="utf-8"))["suites"]
    assert {name: suite["images"] for name, suite in record.items()} == {"fgsm": 20, "agreement": 20, "clean": 30}
    assert record["fgsm"]["options"] == {"eps": [2.0], "num_images": 20, "seed": 0}
    assert (record["fgsm"]["command"], record["fgsm"]["dataset"]) == ("recast x", "digits")
    assert record["fgsm"]["versions"]["torch"] == torch.__version__
    lines = (copied / "analysis" / "agreement.csv").read_text(encoding="utf-8").splitlines()
    assert (lines[0], len(lines)) == ("index,image,label,parent,finetuned,recast", 21)
    assert all(set(line.split(",")[2:]) <= set("0123456789") for line in lines[1:])


def test_a_look_at_fewer_images_does_not_replace_what_is_there(copied: Path) -> None:
    rows = measured(copied, "clean", "agreement", command="all").rows
    with (copied / "analysis" / "agreement.csv").open(encoding="utf-8") as file:
        predictions = list(csv.DictReader(file))
    for row in [row for row in rows if row.metric == "top1"]:
        assert sum(image[row.model] == image["label"] for image in predictions) == pytest.approx(0.3 * row.value)
    before = {name: (copied / name).read_bytes() for name in ("rows.csv", "differences.csv", "analysis/agreement.csv")}
    with pytest.warns(UserWarning, match=r"keeps (clean|agreement) of 30 images; the result on 10 is not saved"):
        few = measured(copied, "clean", "agreement", options=Options(num_images=10))
    assert {row.n for row in few.rows} == {10}
    assert before == {name: (copied / name).read_bytes() for name in before}
    measured(copied, "clean", command="again")
    record = (copied / "evaluation.json").read_text(encoding="utf-8")
    assert '"all"' in record
    assert '"again"' not in record  # it was read from the scores, not measured


def test_results_on_other_images_are_printed_and_not_saved(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report would give them as the run's own."""
    measured(copied, "clean", "agreement")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.parent.name != "scores"}
    own = load_data(SMALL)
    trained = replace(own, val=own.train)
    monkeypatch.setattr("recast.lab.open.load_data", lambda *_: trained)
    with (
        pytest.warns(UserWarning, match=rf"Of the {len(own.train)} images at least \d+ are training images of the run"),
        pytest.warns(UserWarning, match="clean, agreement of others will be printed, not saved"),
    ):
        results = measured(copied, "clean", "agreement")
    assert {row.n for row in results.rows} == {len(own.train)}
    assert {path: path.read_bytes() for path in before} == before


def test_a_bad_request_writes_nothing(copied: Path) -> None:
    before = sorted(path.name for path in copied.iterdir())
    for suite, options in (("clene", Options()), ("clean", Options(num_images=31))):
        with pytest.raises(RecastError):
            measured(copied, suite, options=options)
    assert sorted(path.name for path in copied.iterdir()) == before


def test_data_that_changed_since_the_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for classes in (["a", "b"], [*"9876543210"]):
        changed = replace(load_data(SMALL), classes=classes)
        monkeypatch.setattr("recast.lab.open.load_data", lambda *_, changed=changed: changed)
        with pytest.raises(RecastError, match="was trained"):
            open_run(copied)
