"""How large an explain page is, how fast it opens and how fast a click answers, in headless Chromium.

    python benchmarks/explain.py            # writes results/explain.csv; needs Chromium and playwright

Pages of networks with random weights and opened gates (the maps of noise deflate least). `opens_ms`: from the start of
the navigation to the first maps drawn; `click_ms`: from the mouse button to the frame after the maps were drawn, over
20 clicks of each opening; medians, and for clicks the 95th of 100 too.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from timing import RESULTS, machine, write
from torch import nn

from recast.explain.inputs import Input
from recast.explain.make import make_scene
from recast.explain.write import write_pages
from recast.layers.gpsa import gpsa_layers
from recast.surgery.apply import recast_
from recast.surgery.planning import plan

RESULT = RESULTS / "explain.csv"
REPEATS = 5
CLICKS = 20
NORMALISATION = (0.5,) * 3, (0.25,) * 3

CLICK = """() => new Promise((resolve) => {
  const told = (event) => requestAnimationFrame(() => resolve(performance.now() - event.timeStamp));
  document.getElementById("stage").addEventListener("pointerdown", (event) => {
    setTimeout(() => page.drawn().then(() => told(event)));
  }, { once: true });
})"""


def network(kernel: int, side: int, layers: int, channels: int = 36) -> nn.Module:
    """`layers` recast convolutions on side × side pixels of an image of 224 × 224."""
    stride = 224 // side
    body = [nn.Sequential(nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(
        nn.Conv2d(3, channels, stride, stride), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
    )
    names = [f"{i + 1}.0" for i in range(layers)]
    recast_(model, plan(model, torch.zeros(1, 3, 224, 224), where=names, budget="tokens=none"))
    with torch.no_grad():
        for layer in gpsa_layers(model).values():
            layer.gamma.normal_(0, 0.3)
            layer.spread.uniform_(0, 1)
            layer.query.normal_(0, 1)
            layer.key.normal_(0, 1)
    return model


def pages(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Name, states and file of every page that is measured."""
    image = Input("noise.png", torch.rand(3, 224, 224))
    for name, kernel, side, layers, states in (
        ("4 layers, 9 heads, 14x14", 3, 14, 4, 1),
        ("4 layers, 9 heads, 14x14, 6 epochs", 3, 14, 4, 6),
        ("4 layers, 9 heads, 28x28", 3, 28, 4, 1),
        ("1 layer, 9 heads, 56x56", 3, 56, 1, 1),
        ("1 layer, 49 heads, 56x56", 7, 56, 1, 1),
    ):
        networks: list[tuple[int | None, dict[str, nn.Module]]] = [
            (epoch, {"recast": network(kernel, side, layers)}) for epoch in range(states)
        ]
        scene = make_scene(name, [image], networks, None, NORMALISATION, {"recast": "Recast"})
        yield name, states, write_pages(scene, folder / f"{name}.html")[0]


def measured(browser: Any, path: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of every opening and of every click."""
    opened, clicked = [], []
    for _ in range(REPEATS):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        opened.append(page.evaluate("page.ready.then(() => page.readyAt)"))
        box = page.locator("#stage").bounding_box()
        for number in range(CLICKS):
            answer = page.evaluate_handle(f"() => {{ window.answer = ({CLICK})(); }}")
            answer.dispose()
            along = 0.1 + 0.8 * number / CLICKS
            page.mouse.click(box["x"] + along * box["width"], box["y"] + (1 - along) * box["height"])
            clicked.append(page.evaluate("window.answer"))
        page.close()
    return opened, clicked


def main() -> None:
    """Every page, one row each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, states, path in pages(Path(folder)):
            opened, clicked = measured(browser, path)
            rows.append(
                {
                    "page": name,
                    "states": states,
                    "megabytes": round(path.stat().st_size / 1e6, 2),
                    "opens_ms": round(statistics.median(opened)),
                    "click_ms": round(statistics.median(clicked), 1),
                    "click_p95_ms": round(statistics.quantiles(clicked, n=20)[-1], 1),
                    "repeats": REPEATS,
                    "clicks": len(clicked),
                    "browser": f"Chromium {browser.version}",
                    "machine": machine(),
                }
            )
            print(rows[-1])
        browser.close()
    write(RESULT, rows)


if __name__ == "__main__":
    main()
