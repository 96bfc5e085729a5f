import base64
import hashlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from in_browser import CHROMIUM, chromium, opened
from on_reports import rewrite

from recast.errors import RecastError
from recast.lab.report import write_report

pytestmark = pytest.mark.usefixtures("charts_drawn_once")


class Page(HTMLParser):
    """Collects the tags of a page, and checks that they close."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag


def text_of(*paths: Path) -> str:
    """The words of the page alone, on one line."""
    html = write_report(paths, paths[0] / "page.html").read_text(encoding="utf-8").partition("</style>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\u00a0", " ").split())


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"recipe": {"recast.gate": "sigmoid"}, "without": ("finetuned",)}, marks=pytest.mark.slow),
        {"epochs": 0, "without": ("rows.csv", "verify.json", "analysis")},
        pytest.param({"epochs": 1}, marks=pytest.mark.slow),
        {"source": "during"},
        {"source": "during", "recipe": {"recast.gate": "bias", "optim.gate_l1": 0.0}, "epochs": 1},
        {"name": "not finite", "without": ("analysis",)},
    ],
    ids=["full", "sigmoid", "bare", "one epoch", "during", "bias", "not finite"],
)
def test_self_contained(make_run: Any, options: dict[str, Any]) -> None:
    path = make_run(**options)
    for file in path.rglob("metrics.jsonl") if path.name == "not finite" else ():
        pattern = r'("epoch": 2,.*?"val_loss": |"gamma": \[)[-\d.e]+'
        file.write_text(re.sub(pattern, r"\1NaN", file.read_text(encoding="utf-8")), encoding="utf-8")
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
    (script,) = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in text or f"script-src 'sha256-{digest}'" in text


def test_what_files_say_is_escaped(make_run: Any) -> None:
    path = make_run()
    evil = "<script>alert(1)</script>"
    for name, old in (
        ("plan.json", "layer3.0.conv1"),
        ("metrics.jsonl", "layer3.0.conv1"),
        ("rows.csv", "contrast"),
        ("recipe.yaml", "digits_resnet"),
        ("environment.json", "Linux"),
    ):
        content = (path / name).read_text(encoding="utf-8")
        assert old in content
        (path / name).write_text(content.replace(old, evil), encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    assert text.count("<script") == 1
    assert text.count("&lt;script&gt;") >= 6


def test_sections_without_data_are_left_out(make_run: Any, make_plain: Any) -> None:
    """Of a run that was not measured, of a network alone, and of one whose pooling alone became attention."""
    text = text_of(make_run("bare", without=("rows.csv", "finetuned", "analysis")))
    assert "recast evaluate" in text
    assert "control arm" in text
    alone = text_of(make_plain())
    assert not any(part in alone for part in ("Recast −", "Gates and spans", "Recast layers"))
    pooled = make_run(without=("analysis",), epochs=2, recipe={"where": ["none"], "pool.kind": "per_class"})
    rewrite(pooled / "plan.json", steps=[])
    text = text_of(pooled)
    assert "Comparison" in text
    assert "Gates and spans" not in text


def test_several_runs(make_run: Any, tmp_path: Path) -> None:
    def make(name: str, **recipe: Any) -> Path:
        return make_run(name, recipe=recipe, epochs=0, without=("analysis",))

    def page(*paths: Path) -> str:
        return write_report(paths, tmp_path / "page.html").read_text(encoding="utf-8")

    first = make("seed0", seed=0)
    text = page(first, make("seed1", seed=1))
    assert all(part in text for part in ('href="#run2">seed1</a>', 'id="run2"', "Mean of the seeds"))
    text = page(first, make("sub/seed0"))
    assert all(part in text for part in ('href="#run1">seed0</a>', 'href="#run2">sub/seed0</a>'))
    with pytest.raises(RecastError, match="digits, cifar10"):
        page(first, make("cifar", **{"data.name": "cifar10"}))


def test_every_cost_can_be_chosen(make_measured: Any) -> None:
    """The page has a rule of style for each: it needs no script."""
    path = make_measured()
    control = path / "finetuned" / "metrics.jsonl"
    content = control.read_text(encoding="utf-8")
    control.write_text(content.replace('"seconds": 1.0', '"seconds": 2.0'), encoding="utf-8")
    text = write_report([path]).read_text(encoding="utf-8")
    choices = [attributes["id"] for tag, attributes in Page(text).tags if tag == "input" and "name" in attributes]
    assert (len(choices), choices[-1]) == (5, "run1-x-seconds")
    for number in range(1, len(choices) + 1):
        assert f".choice input:nth-of-type({number}):checked ~ .axis:nth-of-type({number})" in text


def test_an_error_leaves_the_old_report(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(RecastError, match="at least one run"):
        write_report([])
    path = make_run(epochs=0, without=("analysis",))
    report = path / "report.html"
    monkeypatch.setattr("recast.files.os.replace", refuse)
    old = '<meta name="generator" content="recast">'
    for text, message in (("mine", r"report\.html was not written"), (old, "Permission denied")):
        report.write_text(text, encoding="utf-8")
        with pytest.raises(RecastError, match=message):
            write_report([path])
        assert report.read_text(encoding="utf-8") == text
    assert not list(path.glob(".report*"))


def test_without_the_extra(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("recast.lab.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecastError, match="matplotlib"):
        write_report([make_run()])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_in_a_browser(make_run: Any) -> None:
    report = write_report([make_run(epochs=1)])
    phone = {"width": 390, "height": 844}
    open_all = "document.querySelectorAll('details').forEach(item => item.open = true)"
    with chromium() as browser:
        with opened(browser, report, viewport={"width": 1100, "height": 900}) as page:
            # folds open by a link into them, and when the page is printed
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
            # figures grow
            page.evaluate(open_all)
            page.locator(".axis:visible .enlarge").first.click()
            dialog = page.locator("dialog")
            assert dialog.locator("svg").bounding_box()["width"] > 700
            dialog.get_by_role("button", name="Close").click()
            assert not dialog.is_visible()
        with opened(browser, report, viewport=phone, java_script_enabled=False) as page:
            page.locator("#run1-robust summary").first.click()
            costs = page.locator("#run1-robust .choice")
            costs.locator("label", has_text="parameters").click()
            assert "parameters" in costs.locator(".axis:visible svg").first.text_content()
            assert page.locator(".enlarge").count() == 0
        with opened(browser, report, viewport=phone) as page:
            page.evaluate(open_all)
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
            assert page.evaluate(f"{wide}.map(box => box.ariaLabel)") == []
            assert page.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
