"""The page as a whole: complete, self-contained, safe, and never half-written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import recast.report
from recast.errors import RecastError
from recast.report import write_report

MakeRun = Callable[..., Path]


class Page(HTMLParser):
    """Collects what a page loads, and checks that its tags close."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "sigmoid", "control": False},
        {"epochs": 0, "rows": False, "attention": False, "verify": False},
        {"epochs": 1},
    ],
    ids=["full", "sigmoid", "bare", "one epoch"],
)
def test_self_contained(make_run: MakeRun, options: dict[str, object]) -> None:
    path = make_run(**options)
    out = write_report([path])
    assert out == path / "report.html"
    assert not list(path.glob("*.tmp"))
    text = out.read_text(encoding="utf-8")
    assert len(text) < 4_000_000
    assert "nan" not in re.sub(r"data:[^\"]+", "", text).lower()
    page = Page(text)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{}]  # one, inside the page
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), f"{tag} loads {address}"
        assert not any(name.startswith("on") for name in attributes)
        if tag == "img":
            assert attributes["alt"]
        if tag == "th":
            assert attributes.get("scope") in {"row", "col", "rowgroup"}
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {address[1:] for tag, a in page.tags if tag == "a" and (address := a.get("href"))} <= set(ids)


def test_what_files_say_is_escaped(make_run: MakeRun) -> None:
    path = make_run()
    evil = "<script>alert(1)</script>"
    for name, old in (
        ("plan.json", "stage3.0.conv1"),
        ("metrics.jsonl", "stage3.0.conv1"),
        ("rows.csv", "contrast"),
        ("recipe.yaml", "recast_resnet_small"),
        ("environment.json", "Linux-x86_64"),
    ):
        content = (path / name).read_text(encoding="utf-8")
        assert old in content
        (path / name).write_text(content.replace(old, evil), encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    assert text.count("<script") == 1
    assert text.count("&lt;script&gt;") >= 6


def test_numbers_that_are_not_finite(make_run: MakeRun) -> None:
    path = make_run(epochs=3)
    for name in ("metrics.jsonl", "finetuned/metrics.jsonl"):
        lines = (path / name).read_text(encoding="utf-8").splitlines()
        lines[2] = re.sub(r'("val_loss": |"gamma": \[)[-\d.e]+', r"\1NaN", lines[2])
        (path / name).write_text("\n".join(lines), encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    assert "nan" not in re.sub(r"data:[^\"]+", "", text).lower()


def test_missing_parts_say_so(make_run: MakeRun) -> None:
    text = write_report([make_run(rows=False, attention=False, control=False)]).read_text(encoding="utf-8")
    assert "Not evaluated yet" in text
    assert "No attention maps were recorded" in text
    assert "There is no fine-tuned parent in this run" in text


def test_several_runs(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"seed{seed}", seed=seed) for seed in (0, 1)]
    with pytest.raises(RecastError, match="2 runs belongs to none of them"):
        write_report(runs)
    text = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert 'href="#run2">seed1</a>' in text
    assert 'id="run2"' in text
    assert "Mean of the seeds" in text
    assert ">Schedule</th>" not in text


def test_an_error_leaves_the_old_report(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run()
    report = path / "report.html"
    report.write_text("old", encoding="utf-8")

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("recast.run.files.os.replace", refuse)
    with pytest.raises(RecastError, match=r"cannot write the report .*: Permission denied"):
        write_report([path])
    assert report.read_text(encoding="utf-8") == "old"
    assert not list(path.glob(".report*"))


def test_nowhere_to_write(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="at least one run"):
        write_report([])
    with pytest.raises(RecastError, match="got the folder"):
        write_report([tmp_path], tmp_path)
    with pytest.raises(RecastError, match="does not exist"):
        write_report([tmp_path], tmp_path / "no" / "report.html")


def test_without_the_extra(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("recast.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RecastError, match=r"needs jinja2: pip install 'recast-vision\[report\]'"):
        write_report([make_run()])


def test_torch_is_not_imported(make_run: MakeRun) -> None:
    source = str(Path(recast.report.__file__).parents[2])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from recast.report import write_report; "
        "write_report([sys.argv[2]]); "
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, source, str(make_run(epochs=2))], check=True, timeout=60)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_fits_a_phone_and_fetches_nothing(make_run: MakeRun) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    report = write_report([make_run()])
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(report.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
        width = page.evaluate("document.documentElement.scrollWidth")
        broken = page.evaluate("[...document.images].filter(image => !image.naturalWidth).length")
        browser.close()
    assert width == 390
    assert broken == 0
    assert [text for text in complaints if not text.startswith(("data:", report.as_uri()))] == []
