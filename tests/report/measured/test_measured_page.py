"""The page in a browser: nothing fetched, nothing complained of, and what can be pointed at and clicked works."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from recast.report import write_report

MakeRun = Callable[..., Path]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def opened(browser: Any, report: Path, **settings: Any) -> Iterator[Any]:
    """The report in a browser; fails at the end where it complained or fetched something."""
    page = browser.new_page(**settings)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert [text for text in complaints if not text.startswith(("data:", report.as_uri()))] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_in_a_browser(make_measured: MakeRun) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    path = make_measured(epochs=1, attention=False)
    rows = (path / "rows.csv").read_text(encoding="utf-8").splitlines()
    few = [line for line in rows if line.split(",")[2] in {"suite", "clean", "fgsm", "cost"}]  # fewer charts to draw
    (path / "rows.csv").write_text("\n".join(few) + "\n", encoding="utf-8")
    report = write_report([path])
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with opened(browser, report, viewport={"width": 1100, "height": 900}) as page:
            costs_are_chosen(page)
            values_are_told(page)
            figures_grow(page)
        with opened(browser, report, viewport={"width": 390, "height": 844}, java_script_enabled=False) as page:
            nothing_needs_the_script(page)
        with opened(browser, report, viewport={"width": 390, "height": 844}, has_touch=True) as page:
            a_tap_tells_a_value(page)
        browser.close()


def costs_are_chosen(page: Any) -> None:
    costs = page.locator("#run1-robust .choice")
    assert costs.locator(".axis:visible").count() == 1
    first = costs.locator(".axis:visible").inner_html()
    costs.locator("label", has_text="peak memory").click()
    assert costs.locator(".axis:visible").count() == 1
    assert costs.locator(".axis:visible").inner_html() != first
    costs.get_by_role("radio", name="peak memory").press("ArrowLeft")  # the keyboard chooses too
    assert costs.get_by_role("radio", name="images per second").is_checked()


def values_are_told(page: Any) -> None:
    tip = page.locator(".tip")
    assert not tip.is_visible()
    chart = page.locator("#run1-robust figure.card > svg[role=img]:visible").first
    chart.scroll_into_view_if_needed()
    chart.locator(".hit").last.hover(force=True)
    assert tip.inner_text() == "Recast: 76.3\u00a0% (75.1 to 77.5) at 640"
    point, box = chart.locator(".hit").last.bounding_box(), tip.bounding_box()
    assert 0 < point["y"] - (box["y"] + box["height"]) < 20  # right above it
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("Parent: 74.2\u00a0%")
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("Recast: 76.3")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def figures_grow(page: Any) -> None:
    page.locator(".axis:visible .enlarge").first.click()
    dialog, tip = page.locator("dialog"), page.locator(".tip")
    assert dialog.is_visible()
    assert dialog.locator("h2").inner_text() == "Clean images"
    assert dialog.locator("svg").bounding_box()["width"] > 700
    dialog.locator(".hit").first.hover(force=True)
    point, box = dialog.locator(".hit").first.bounding_box(), tip.bounding_box()
    assert 0 < point["y"] - (box["y"] + box["height"]) < 20
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()
    assert not tip.is_visible()


def nothing_needs_the_script(page: Any) -> None:
    costs = page.locator("#run1-robust .choice")
    assert costs.locator(".axis:visible figure").count() == 2
    costs.locator("label", has_text="parameters").click()
    assert "against parameters" in costs.locator(".axis:visible svg").first.get_attribute("aria-label")
    assert page.locator(".hit title").count() > 60
    assert page.locator(".enlarge").count() == 0


def a_tap_tells_a_value(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    chart = page.locator("#run1-fourier figure.card > svg").first
    chart.scroll_into_view_if_needed()
    chart.locator(".hit").last.tap(force=True)
    box = page.locator(".tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_the_script_is_the_one_that_the_page_allows(make_run: MakeRun) -> None:
    text = write_report([make_run(epochs=0, attention=False)]).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    script = re.search(r"<script>(.*)</script>", text, flags=re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1].replace("&#39;", "'")
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")


def test_runs_of_different_data_stand_apart(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", epochs=0, attention=False, rows=False), make_run("b", epochs=0, attention=False)]
    recipe = yaml.safe_load((runs[1] / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["data"]["name"] = "cifar10"
    (runs[1] / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    text = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "These runs are of 2 data sets. They are shown apart" in text
    assert "The run on digits" in text
    assert "The run on cifar10" in text
    assert "Mean of the seeds" not in text
