"""The folder of figures: whole, citable, and never another's."""

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
from recast.lab.report.load import read_run
from recast.lab.report.page import Part, joint_part, run_part

MakeRun = Callable[..., Path]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def parts(*paths: Path) -> tuple[list[Part], Part | None]:
    runs = [read_run(path) for path in paths]
    every = [run_part(run, f"run{place}", len(runs)) for place, run in enumerate(runs, start=1)]
    return every, joint_part(runs) if len(runs) > 1 else None


def test_every_figure_is_there_three_times(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "DPI", 50)
    folder = tmp_path / "figures"
    run = make_run(epochs=1, without=("analysis",))
    write_report([run], tmp_path / "page.html", folder)
    names = [line["file"].removesuffix(".svg") for line in read(folder / "index.csv")]
    assert {"cost_macs_clean", "training_loss", "adversarial_fgsm"} <= set(names)
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
    (folder / "mine.tex").touch()
    check_folder(folder)
    monkeypatch.setattr(export, "write_chart", lambda path, chart: None)
    write_figures(folder, *parts(run))  # once more, and what is not ours stays
    assert (folder / "mine.tex").exists()


def test_several_runs_have_folders_of_their_own(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(export, "write_chart", lambda path, chart: written.append(str(path)))
    write_figures(tmp_path / "figures", *parts(make_run("deep/a"), make_run("deep/b", recipe={"seed": 1})))
    places = [path.split("/figures/")[1] for path in written]
    assert {"cost_macs_clean", "fourier_runs", "run1-a/cka_parent_recast", "run2-b/gamma_layer3.0.conv1"} <= set(places)
    assert len(places) == len(set(places))


def test_tables_in_latex(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "write_chart", lambda path, chart: None)
    write_figures(tmp_path / "figures", *parts(make_run()))
    text = (tmp_path / "figures" / "tables.tex").read_text(encoding="utf-8")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(body) > 10
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {7}
    assert not re.search(r"(?<!\\)[%#_]|[−πε]", "\n".join(body))


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
