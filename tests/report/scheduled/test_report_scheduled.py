"""The page and the sentences of a run that is recast during training."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recast.report import write_report
from recast.report.figures import arms as charts
from recast.report.figures.heads import head_charts
from recast.report.read.run import read_run
from recast.report.tables import summary as tables
from recast.report.text.verdict import joint_verdict, verdict
from recast.report.text.words import FROM_START, PARENT, words

MakeRun = Callable[..., Path]
CHROMIUM = shutil.which("chromium")


def said(path: Path) -> str:
    return verdict(read_run(path)).replace("\u00a0", " ")


def text_of(path: Path) -> str:
    """The words of the page alone, on one line."""
    html = write_report([path]).read_text(encoding="utf-8").partition("</style>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\u00a0", " ").split())


# the page


@pytest.mark.parametrize(
    "options",
    [
        {"rows": True},
        {"name": "learned"},
        {"trained": 6, "gate": "linear", "control": False},
        {"trained": 0, "control": False, "verify": False},
        {"name": "learned", "trained": 1},
        {"name": "at_once", "epochs": 1},
        {"name": "listed"},
    ],
    ids=["bias", "learned", "unfinished", "untrained", "first epoch", "from the start", "no dates"],
)
def test_the_page_holds_the_section(make_scheduled: MakeRun, options: dict[str, Any]) -> None:
    html = write_report([make_scheduled(**options)]).read_text(encoding="utf-8")
    assert "When layers became attention" in html
    assert 'href="#run1-switches"' in html
    assert "nan" not in re.sub(r"data:[^\"]+", "", html).lower()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_a_run_recast_before_training_says_nothing_of_switches(make_run: MakeRun) -> None:
    text = text_of(make_run(rows=False, attention=False))
    assert "When layers became attention" not in text
    assert "Parent, fine-tuned" in text
    assert "became gated positional self-attention, 5 stayed" in text


def test_a_bias_run_has_no_gates(make_scheduled: MakeRun) -> None:
    text = text_of(make_scheduled())
    assert "cmhsa_vit_3_tiny on digits, C-MHSA" in text
    assert "C-MHSA layers have no gates" in text
    assert "6 layers became self-attention with a positional bias (C-MHSA), 5 stayed. Costs are per image," in text
    assert "all layers at once, before training; max relative error 3e−7" in text
    assert "Vertical lines: layers became attention." in text


def test_an_unfinished_run(make_scheduled: MakeRun) -> None:
    text = text_of(make_scheduled(trained=6, gate="linear"))
    assert "2 of these 6 layers became gated positional self-attention" in text
    early = text_of(make_scheduled("early", trained=1, layers=2, gate="linear"))
    assert "No layer has become attention yet." in early
    assert "No layer is attention, so there are no gates." in early
    assert "No layer became attention." in text_of(make_scheduled("never", name="listed"))


def test_a_lost_schedule(make_scheduled: MakeRun) -> None:
    path = make_scheduled(trained=1)
    (path / "schedule.json").unlink()
    assert "The run folder has no schedule.json" in text_of(path)
    assert said(path).startswith("When layers became attention was not written down (no schedule.json); after 1 of 14")


def test_training_curves_are_marked_at_switches(make_scheduled: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    monkeypatch.setattr(charts, "line_chart", lambda *_, switches=(), **__: seen.append(list(switches)))
    charts.training(read_run(make_scheduled()))
    assert seen == [[2, 4, 6, 8, 10, 12]] * 2
    charts.training(read_run(make_scheduled("many", layers=30, epochs=90)))
    assert seen[2:] == [[], []]


def test_gates_begin_where_their_layer_became_attention(make_scheduled: MakeRun) -> None:
    layers, hidden = head_charts(read_run(make_scheduled(gate="linear", layers=2)), 10**7)
    assert [layer.name for layer in layers] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert hidden == 0
    first, second = (re.findall(r">(\d+)</text>", layer.panels[0].chart.svg) for layer in layers)
    assert first == second  # one axis, although the first layer has five epochs and the last ten
    assert first[0] == "0"


# sentences


def test_one_after_the_other(make_scheduled: MakeRun) -> None:
    assert said(make_scheduled(rows=True)) == (
        "6 layers became attention, one after the other, from epoch 3 to epoch 13; after 14 epochs the network reaches "
        "97.2 %, 0.4 points above the same network trained the same way as a convolution "
        "(1 of 360 images; one seed: a first look, not evidence)."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "at_once"}, "6 layers became attention together at the start of epoch 8; after 14 epochs"),
        ({"name": "at_once", "layers": 1}, "1 layer became attention at the start of epoch 8; after"),
        ({"name": "learned"}, "4 of 6 layers became attention, one after the other, from epoch 4 to epoch 12; after"),
        ({"trained": 4}, "1 of 6 layers became attention at the start of epoch 3; after 4 of 14 epochs"),
        ({"trained": 1}, "None of the 6 layers has become attention yet; after 1 of 14 epochs the network reaches"),
        ({"name": "listed"}, "None of the 6 layers has become attention; after 14 epochs"),
        ({"trained": 0}, "None of the 6 layers has become attention yet; the network has not been trained; as it"),
        ({"epochs": 6, "layers": 10}, "10 layers became attention from epoch 1 to epoch 6; after 6 epochs"),
    ],
)
def test_when_layers_became_attention(make_scheduled: MakeRun, options: dict[str, Any], words: str) -> None:
    assert said(make_scheduled(**options)).startswith(words)


def test_without_control(make_scheduled: MakeRun) -> None:
    words = said(make_scheduled(control=False))
    assert words.endswith("; it was not trained as a convolution beside that, so nothing is compared.")


def test_a_pretrained_parent_keeps_its_name(make_scheduled: MakeRun) -> None:
    assert words(read_run(make_scheduled())) is FROM_START
    path = make_scheduled("tuned", pretrained=True)
    assert words(read_run(path)) is PARENT
    assert "points above the parent fine-tuned the same way" in said(path)
    recipe = (path / "recipe.yaml").read_text(encoding="utf-8").replace("pretrained: true", "pretrained: false")
    (path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert words(read_run(path)) is FROM_START
    elsewhere = recipe.replace("checkpoint: null", "checkpoint: /elsewhere/parent.safetensors")
    (path / "recipe.yaml").write_text(elsewhere, encoding="utf-8")
    assert words(read_run(path)) is PARENT


def test_several_runs(make_run: MakeRun, make_scheduled: MakeRun, tmp_path: Path) -> None:
    paths = [
        make_run("before", rows=False, attention=False),
        make_scheduled("prs"),
        make_scheduled("learned", name="learned"),
    ]
    runs = [read_run(path) for path in paths]
    lines, _ = tables.summary(runs)
    found = [(line["schedule"], line["switches"].replace("\u00a0", " ")) for line in lines]
    assert found == [("before", ""), ("progressive", "epoch 3 to 13"), ("learned", "epoch 4 to 12")]
    html = write_report(paths, tmp_path / "all.html").read_text(encoding="utf-8")
    assert '<th scope="col" class="text">Schedule</th>' in html
    assert html.count("Convolution only</li>") > 0  # in the sections of their own
    assert html.partition('id="run1"')[0].count("fine-tuned</th>") == 2  # the table over all keeps the parent's name
    assert joint_verdict(runs).startswith(
        "2 of 3 recast models became attention during training; the other starts with its parent’s exact predictions;"
    )
    assert joint_verdict(runs[1:]).replace("\u00a0", " ") == (
        "Both recast models became attention during training; of 2 runs with the same network trained the same way as "
        "a convolution, the recast model ends above it in 2, below it in 0 and level in 0."
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_fits_a_phone(make_scheduled: MakeRun) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    report = write_report([make_scheduled(name="learned")])
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(report.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert width == 390
