"""The page as a whole: complete, self-contained, safe, and never half-written; in a browser too."""

import base64
import hashlib
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from changed_runs import rewrite
from in_browser import CHROMIUM, chromium, opened

from recast.errors import RecastError
from recast.lab.report import write_report

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


def text_of(*paths: Path) -> str:
    """The words of the page alone, on one line."""
    html = write_report(paths, paths[0] / "page.html").read_text(encoding="utf-8").partition("</style>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\u00a0", " ").split())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": {"recast.gate": "sigmoid"}, "without": ("finetuned",)},
        {"epochs": 0, "without": ("rows.csv", "verify.json", "analysis")},
        {"epochs": 1},
        {"source": "during"},
        {"source": "during", "recipe": {"recast.gate": "bias", "optim.gate_l1": 0.0}, "epochs": 1},
    ],
    ids=["full", "sigmoid", "bare", "one epoch", "during", "bias"],
)
def test_self_contained(make_run: MakeRun, options: dict[str, Any]) -> None:
    path = make_run(**options)
    out = write_report([path])
    assert out == path / "report.html"
    assert not list(path.glob("*.tmp"))
    text = out.read_text(encoding="utf-8")
    assert len(text) < 4_000_000
    assert "nan" not in re.sub(r"data:[^\"]+", "", text).lower()
    page = Page(text)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]  # one, inside the page
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
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in text or f"script-src 'sha256-{digest}'" in text


def test_what_files_say_is_escaped(make_run: MakeRun) -> None:
    path = make_run()
    evil = "<script>alert(1)</script>"
    for name, old in (
        ("plan.json", "layer3.0.conv1"), ("metrics.jsonl", "layer3.0.conv1"), ("rows.csv", "contrast"),
        ("recipe.yaml", "digits_resnet"), ("environment.json", "Linux"),
    ):  # fmt: skip
        content = (path / name).read_text(encoding="utf-8")
        assert old in content
        (path / name).write_text(content.replace(old, evil), encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    assert text.count("<script") == 1
    assert text.count("&lt;script&gt;") >= 6


def test_numbers_that_are_not_finite(make_run: MakeRun) -> None:
    path = make_run(without=("analysis",))
    for name in ("metrics.jsonl", "finetuned/metrics.jsonl"):
        text = (path / name).read_text(encoding="utf-8")
        text = re.sub(r'("epoch": 2,.*?"val_loss": |"gamma": \[)[-\d.e]+', r"\1NaN", text)
        (path / name).write_text(text, encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    assert "nan" not in re.sub(r"data:[^\"]+", "", text).lower()


def test_sections_without_data_are_left_out(make_run: MakeRun, make_plain: MakeRun) -> None:
    """Of a run that was not measured, of a network alone, and of one whose pooling alone became attention."""
    absent = ("analysis",)
    text = text_of(make_run("bare", without=("rows.csv", "finetuned", *absent)))
    assert "recast evaluate" in text
    assert "control arm" in text
    alone = text_of(make_plain())
    assert not any(part in alone for part in ("Recast −", "Gates and spans", "Recast layers"))
    pooled = make_run(without=absent, epochs=2, recipe={"where": ["none"], "pool.kind": "per_class"})
    rewrite(pooled / "plan.json", steps=[])
    text = text_of(pooled)
    assert "Comparison" in text
    assert "Gates and spans" not in text


def test_several_runs(make_run: MakeRun, tmp_path: Path) -> None:
    absent = ("analysis",)
    runs = [make_run(f"seed{seed}", recipe={"seed": seed}, epochs=0, without=absent) for seed in (0, 1)]
    text = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert all(part in text for part in ('href="#run2">seed1</a>', 'id="run2"', "Mean of the seeds"))
    alike = write_report([runs[0], make_run("sub/seed0", epochs=0, without=absent)], tmp_path / "alike.html")
    text = alike.read_text(encoding="utf-8")
    assert 'href="#run1">seed0</a>' in text
    assert 'href="#run2">sub/seed0</a>' in text
    other = make_run("other", recipe={"data.name": "cifar10"}, epochs=0, without=absent)
    with pytest.raises(RecastError, match="digits, cifar10"):
        write_report([runs[0], other], tmp_path / "apart.html")


def test_every_cost_can_be_chosen(make_measured: MakeRun) -> None:
    """The page has a rule of style for each: it needs no script."""
    path = make_measured()
    control = path / "finetuned" / "metrics.jsonl"
    control.write_text(
        control.read_text(encoding="utf-8").replace('"seconds": 1.0', '"seconds": 2.0'), encoding="utf-8"
    )
    text = write_report([path]).read_text(encoding="utf-8")
    choices = [attributes["id"] for tag, attributes in Page(text).tags if tag == "input" and "name" in attributes]
    assert (len(choices), choices[-1]) == (5, "run1-x-seconds")
    for number in range(1, len(choices) + 1):
        assert f".choice input:nth-of-type({number}):checked ~ .axis:nth-of-type({number})" in text


def test_an_error_leaves_the_old_report(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="at least one run"):
        write_report([])
    path = make_run(epochs=0, without=("analysis",))
    report = path / "report.html"
    report.write_text("mine", encoding="utf-8")
    with pytest.raises(RecastError, match=r"report\.html"):
        write_report([path])
    old = '<meta name="generator" content="recast">'
    report.write_text(old, encoding="utf-8")

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("recast.files.os.replace", refuse)
    with pytest.raises(RecastError, match="Permission denied"):
        write_report([path])
    assert report.read_text(encoding="utf-8") == old
    assert not list(path.glob(".report*"))


def test_without_the_extra(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("recast.lab.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecastError, match="matplotlib"):
        write_report([make_run()])


# in a browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_in_a_browser(make_run: MakeRun) -> None:
    report = write_report([make_run(epochs=1)])
    phone = {"width": 390, "height": 844}
    with chromium() as browser:
        with opened(browser, report, viewport={"width": 1100, "height": 900}) as page:
            folds_open(page)
            figures_grow(page)
        with opened(browser, report, viewport=phone, java_script_enabled=False) as page:
            nothing_needs_the_script(page)
        with opened(browser, report, viewport=phone) as page:
            it_fits_a_phone(page)


OPEN_ALL = "document.querySelectorAll('details').forEach(item => item.open = true)"


def folds_open(page: Any) -> None:
    """By a link into them, and when the page is printed; the summary comes first."""
    shut = page.locator("details:not([open])")
    assert page.evaluate("document.documentElement.scrollHeight") < 3000
    for _ in range(2):  # the same link again too
        page.locator('nav a[href="#run1-training"]').click()
        assert page.locator("#run1-training figure").first.is_visible()
        page.locator("#run1-training summary").first.click()
    before = shut.count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shut.count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shut.count() == before > 3
    page.evaluate(OPEN_ALL)


def figures_grow(page: Any) -> None:
    page.locator(".axis:visible .enlarge").first.click()
    dialog = page.locator("dialog")
    assert dialog.locator("svg").bounding_box()["width"] > 700
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()


def nothing_needs_the_script(page: Any) -> None:
    page.locator("#run1-robust summary").first.click()
    costs = page.locator("#run1-robust .choice")
    costs.locator("label", has_text="parameters").click()
    assert "parameters" in costs.locator(".axis:visible svg").first.text_content()
    assert page.locator(".enlarge").count() == 0


def it_fits_a_phone(page: Any) -> None:
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
    assert page.evaluate(f"{wide}.map(box => box.ariaLabel)") == []
    assert page.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
