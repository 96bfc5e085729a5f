"""The folder of figures: whole, citable, and never another's."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.report import export, write_report
from recast.lab.report.export import check_folder, write_figures
from recast.lab.report.load import Run, read_run
from recast.lab.report.page import group_parts, run_part

MakeRun = Callable[..., Path]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def parts(*paths: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    runs = [read_run(path) for path in paths]
    return [run_part(run, f"run{place}", len(runs)) for place, run in enumerate(runs, start=1)], group_parts(runs)


def test_every_figure_is_there_three_times(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "DPI", 50)
    folder = tmp_path / "figures"
    run = make_run(epochs=1, without=("analysis",))
    write_report([run], tmp_path / "page.html", folder)
    names = [line["file"].removesuffix(".svg") for line in read(folder / "index.csv")]
    assert {"accuracy_macs", "severity", "training_loss", "adversarial_fgsm", "attention_1"} <= set(names)
    assert len(names) == len(set(names))
    for name in names:
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert "var(--" not in svg
        assert not re.search(r"#0[12]0[1-3][0-9a-f]{2}\b", svg)  # no place-holder is left
        picture = np.asarray(Image.open(folder / f"{name}.png").convert("RGB"))
        assert (picture[:2] == 255).all()  # white ground
        assert (picture < 128).any()
        assert len(read(folder / f"{name}.csv")) > 1
    assert {path.stem for path in folder.iterdir()} == {*names, "index", "tables"}
    assert not list(tmp_path.glob(".*"))


def test_several_runs_have_folders_of_their_own(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(export, "write_chart", lambda path, chart: written.append(str(path)))
    write_figures(tmp_path / "figures", *parts(make_run("deep/a"), make_run("deep/b", recipe={"seed": 1})))
    places = [path.split("/new/")[1] for path in written]
    assert {"accuracy_macs", "fourier_runs", "run1-a/cka_parent_recast", "run2-b/gamma_layer3.0.conv1"} <= set(places)
    assert len(places) == len(set(places))


def test_tables_in_latex(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "write_chart", lambda path, chart: None)
    monkeypatch.setattr(Run, "name", "run-\udcff")  # a folder's name need not be text
    write_figures(tmp_path / "figures", *parts(make_run()))
    assert {line["run"] for line in read(tmp_path / "figures" / "tables.csv")} == {"run-\\udcff"}
    text = (tmp_path / "figures" / "tables.tex").read_text(encoding="utf-8")
    body = [line for line in re.findall(r"^(.*) \\\\$", text, flags=re.MULTILINE) if r"\multicolumn{7}" not in line]
    assert len(body) > 10
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {6}
    assert not re.search(r"(?<!\\)[%#_](?!.*interval)", "\n".join(body))


def test_a_folder_of_others_is_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("dear", encoding="utf-8")
    with pytest.raises(RecastError, match="mine"):
        write_report([make_run()], figures=folder)
    assert not (tmp_path / "run" / "report.html").exists()  # nothing is written before all is checked
    for wrong, message in ((folder / "thesis.tex", "thesis.tex"), (tmp_path / "no" / "figures", "no")):
        with pytest.raises(RecastError, match=message):
            check_folder(wrong)
    (folder / "thesis.tex").unlink()
    check_folder(folder)  # empty


def test_older_figures_are_replaced_whole_or_not_at_all(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "write_chart", lambda path, chart: path.write_text("figure", encoding="utf-8"))
    found = parts(make_run(epochs=0, without=("attention.npz", "analysis")))
    folder = tmp_path / "figures"
    write_figures(folder, *found)
    (folder / "old").write_text("", encoding="utf-8")

    def fail(path: Path, chart: object) -> None:
        raise OSError(28, "No space left on device")

    rename = Path.rename

    def refuse(source: Path, target: Path) -> Path:
        if source.name == "new":
            raise PermissionError(13, "Permission denied")
        return rename(source, target)

    for place, name, broken in ((export, "write_chart", fail), (Path, "rename", refuse)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, broken)
            with pytest.raises(RecastError, match=r"No space left|Permission denied"):
                write_figures(folder, *found)
        assert (folder / "old").exists()
    write_figures(folder, *found)
    assert not (folder / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "run"]
