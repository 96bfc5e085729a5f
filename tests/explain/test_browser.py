import base64
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_browser import CHROMIUM, chromium, opened
from on_pages import GATES, every_geometry, mix_of, recast_network
from torch import nn

from recast import GPSA, AttentionBeside, RecastConfig, plan, recast_
from recast.lab.explain.inputs import Input
from recast.lab.explain.make import explain, make_scene
from recast.lab.explain.scene import Layer, Maps, Picture, Scene
from recast.lab.explain.write import write_scene
from recast.layers.functional.operands import scatter_heads

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def look(browser: Any) -> Iterator[Any]:
    """`look(path, width=…)`: the page, drawn."""
    with ExitStack() as pages:

        def drawn(path: Path, **options: Any) -> Any:
            sized = {"viewport": {"width": 1280, "height": 900}, **options}
            page = pages.enter_context(opened(browser, path, **sized))
            page.evaluate("page.ready")
            return page

        yield drawn


MAPS = """async ([name, view]) => {
  const of = page.scene.layers[name], stored = await Maps.unpack(page.scene.pictures[0].maps[name]);
  const all = [];
  for (let head = 0; head < Maps.heads(of, stored); head++)
    for (let i = 0; i < of.queries[0][2]; i++) for (let j = 0; j < of.queries[1][2]; j++)
      all.push(...Maps.map(of, stored, view, head, [i, j]));
  const bytes = Array.from(new Uint8Array(new Float32Array(all).buffer), (byte) => String.fromCharCode(byte));
  return btoa(bytes.join(""));  // Playwright takes seconds for as many numbers
}"""
"""All maps of a layer as the page computes them, in base64."""


@pytest.mark.parametrize("config", GATES, ids=str)
@torch.no_grad()
def test_the_maps_on_the_page_are_the_layers_own(
    config: dict[str, Any], look: Any, open_gates: Any, tmp_path: Path
) -> None:
    model, x = recast_network(open_gates, **config), torch.rand(1, 3, 12, 14)
    page = look(explain(model, x[0], tmp_path / "page.html", mean=(0, 0, 0), std=(1, 1, 1)))

    def drawn(name: str, view: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(page.evaluate(MAPS, [name, view])), np.float32)

    for name, layer in model.named_children():
        if hasattr(layer, "geometry"):
            expected = mix_of(layer, x)
            if isinstance(layer, AttentionBeside):
                assert np.abs(drawn(name, "mix").reshape(expected.shape) - expected).max() < 0.005
                x = layer(x)
                continue
            mix, content, position = (
                drawn(name, view).reshape(expected.shape) for view in ("mix", "content", "position")
            )
            scale = max(1.0, float(layer.gates()["gamma"].abs().max()) if config["gate"] == "linear" else 1.0)
            assert np.abs(mix - expected).max() < 0.005 * scale, (name, layer)
            assert np.abs(mix - expected).mean() < 0.001
            if isinstance(layer, GPSA):
                share = scatter_heads(layer.coefficients().content, layer.content_heads, layer.num_heads).numpy()
                share = share[:, None, None, None, None]
                assert np.abs(share * content + (1 - share) * position - mix).max() < 1e-5
        x = layer(x)
    assert len(page.evaluate("page.scene.order")) == (5 if config["gate"] == "bias" else 6)  # and Grad-CAM


@pytest.mark.parametrize("width", [1280, 390])
def test_a_lone_head_is_large_and_taps_are_one_small_kernel(
    width: int, look: Any, open_gates: Any, tmp_path: Path
) -> None:
    """The default's one head; one content head of 15, with no Gaussian; a layer of taps alone; a head of two."""

    def drawn(heads: int, **config: Any) -> Any:
        model = nn.Sequential(nn.Conv2d(3, 4, (3, 5), padding=(1, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        recast_(model, plan(model, x, RecastConfig(**config), where=["0"]))
        layer = model[0]
        if isinstance(layer, GPSA):
            open_gates(layer).prune_((), layer.content_heads[:heads])
        return look(explain(model, x[0], tmp_path / "page.html"), viewport={"width": width, "height": 900})

    x = torch.rand(1, 3, 8, 8)
    for config, heads in (
        ({"gate": "beside"}, 1),
        ({"gate": "linear", "content_heads": 1}, 1),
        ({"gate": "linear", "content_heads": 1}, 0),
        ({"gate": "linear", "content_heads": 2}, 2),
    ):
        page, taps = drawn(heads, **config), 0 if config["gate"] == "beside" else 15 - heads
        page.evaluate("page.choose({ layer: 0, head: -1 })")
        assert page.locator(".head").count() == heads
        assert page.locator("#taps").is_visible() == bool(taps)
        assert page.locator("#taps b:visible:not(.content)").count() == taps
        assert not taps or f"{taps} heads" in page.inner_text("#taps")
        assert page.locator("#scales").is_visible() == (heads > 1)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        boxes = [canvas.bounding_box() for canvas in page.query_selector_all(".head canvas")]
        assert all(box["width"] > (250 if heads == 1 else 130) for box in boxes)
        assert not taps or page.locator("#taps i").bounding_box()["width"] < 60
        if heads:  # the map over the image is that of the head, which is not the first of the kernel
            page.locator(".head").first.click()
            assert page.is_visible("#overlay")
            assert page.evaluate("page.maps().maps[page.chosen.head] !== null")
            assert page.evaluate("page.chosen.head") == (7 if config.get("content_heads") == 1 else 0)
    captions = page.evaluate("page.maps().of.offsets.map((_, head) => Words.tap(page.maps().of, [], head))")
    assert captions == [
        *("↑1 ←2", "↖", "↑", "↗", "↑1 →2"),
        *("←2", "←", "•", "→", "→2"),
        *("↓1 ←2", "↙", "↓", "↘", "↓1 →2"),
    ]


def test_mouse_keys_and_touch(look: Any, open_gates: Any, tmp_path: Path) -> None:
    images = [Input(f"{label}.png", torch.rand(3, 12, 14), label) for label in ("cat", "dog")]
    networks = {"parent": every_geometry(), "recast": recast_network(open_gates, gate="linear")}
    arms = {"parent": "Parent", "recast": "Recast"}
    scene = make_scene("net on pets", images, networks, ["cat", "dog", "cow"], ((0.5,) * 3, (0.5,) * 3), arms)
    path = write_scene(scene, tmp_path / "run.html")
    page = look(path)
    assert page.title() == "net on pets"
    assert page.locator(".head").count() == 9
    # the mouse
    box = page.locator("#stage").bounding_box()
    page.mouse.click(box["x"] + 6, box["y"] + 6)
    assert page.inner_text("#where") == "Query row 1 of 6, column 1 of 7"
    before = page.evaluate("page.maps().maps[0].join()")
    page.mouse.click(box["x"] + box["width"] - 6, box["y"] + box["height"] - 6)
    assert page.inner_text("#where") == "Query row 6 of 6, column 7 of 7"
    assert page.evaluate("page.maps().maps[0].join()") != before
    # the keyboard: the image is reached by Tab, arrows move by a query and stop at the edge
    page.focus("#stage")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#where") == "Query row 6 of 6, column 4 of 7"
    page.keyboard.press("2")
    assert page.inner_text("#layer-name") == "2"
    page.keyboard.press("[")
    assert page.inner_text("#layer-name") == "0"
    # a head's map over the image, and off again
    assert not page.is_visible("#overlay")
    page.locator(".head").nth(4).press("Enter")
    assert page.is_visible("#overlay")
    assert page.locator(".head").nth(4).get_attribute("aria-pressed") == "true"
    assert "Tap in the middle: γ =" in page.inner_text("#chosen")
    page.keyboard.press("Escape")
    assert page.locator(".head[aria-pressed=true]").count() == 0
    # another image
    page.locator("#thumbs button").nth(1).click()
    assert "dog.png" in page.inner_text("#about")
    assert page.get_attribute("#image", "alt").startswith("dog.png, label dog")
    for label in page.locator(".head").all():
        assert "largest weight" in label.get_attribute("aria-label")
    broken = "[...document.images].filter(image => !image.naturalWidth || !image.hasAttribute('alt')).length"
    assert page.evaluate(broken) == 0
    # a phone: nothing sticks out, and a tap chooses
    phone = look(path, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme="dark")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    box = phone.locator("#stage").bounding_box()
    phone.touchscreen.tap(box["x"] + 6, box["y"] + 6)
    assert phone.inner_text("#where") == "Query row 1 of 6, column 1 of 7"


def test_a_model_without_maps_has_its_predictions(look: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 14, 3))
    page = look(explain(model, torch.rand(3, 12, 14), tmp_path / "page.html", classes=["cat", "dog", "cow"]))
    assert "no recast layer" in page.inner_text("#nothing")
    assert page.locator("#predictions li").count() == 3
    assert not page.is_visible("#grid")
    page.focus("#stage")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("]")
    page.mouse.click(200, 300)


def scene_with_classes() -> Scene:
    """Two pictures, a layer of each kind of maps: for every query and of either sign, and a map for each class."""
    random = np.random.default_rng(0)
    grid, single = (range(4), range(5)), (range(1), range(1))
    layers = (
        Layer("mixing", "maps", "4×5 patches", (1, 1), (), (4, 5), grid, grid, names=("weights",)),
        Layer("token", "classes", "of either sign", (1, 1), (), (4, 5), grid, single, names=("mean", "head 1")),
        Layer("pool", "classes", "attention pooling", (1, 1), (), (4, 5), grid, single, names=("1.", "2.", "3.")),
    )
    pictures = []
    for name, ranked in (("a.png", ("cat 61 %", "dog 20 %", "cow 3 %")), ("b.png", ("cow 50 %", "dog 9 %", "cat 8 %"))):
        classes = random.dirichlet(np.ones(20), 3).reshape(3, 1, 1, 4, 5).astype(np.float32)
        classes[2] = 0.04
        signed = random.normal(0, 1, (1, 4, 5, 4, 5)).astype(np.float32)
        maps = {
            "mixing": Maps.of(signed, tuple(range(4)), tuple(range(5)), signed=True),
            "token": Maps.of(signed[:, :2, :1].reshape(2, 1, 1, 4, 5), (0,), (0,), signed=True),
            "pool": Maps.of(classes, (0,), (0,), names=ranked),
        }
        pictures.append(Picture(name, np.full((40, 50, 3), 255, dtype=np.uint8), None, (), {}, maps))
    return Scene("classes", {"recast": "Network"}, layers, tuple(pictures))


PIXELS = """(selector) => [...document.querySelectorAll(selector)].map((canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  return Array.from({ length: data.length / 4 }, (_, i) => Array.from(data.slice(4 * i, 4 * i + 4)));
})"""


def test_maps_of_classes_need_no_query(look: Any, tmp_path: Path) -> None:
    """What attention pooling and class tokens give, beside a layer with queries."""
    scene = scene_with_classes()
    stored = [picture.maps for picture in scene.pictures]
    page = look(write_scene(scene, tmp_path / "page.html"))

    def maps() -> np.ndarray:
        return np.array(page.evaluate("page.maps().maps.map((map) => Array.from(map))"))

    # it opens with the classes, the likeliest one's map over the image, and takes no query
    assert page.inner_text("#layer-name") == "pool"
    assert page.locator(".caption").all_inner_texts() == ["cat 61 %", "dog 20 %", "cow 3 %"]
    assert np.abs(maps() - stored[0]["pool"].values.reshape(3, 20)).max() < 1e-6
    assert page.is_visible("#overlay")
    assert page.get_attribute("#stage", "role") == "group"
    before = page.evaluate("JSON.stringify(page.chosen)")
    page.click("#stage", position={"x": 9, "y": 9})
    page.focus("#stage")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("JSON.stringify(page.chosen)") == before
    # min–max: the smallest weight is cividis' darkest, the largest its brightest, an even map is in the middle
    page.get_by_label("Alone").check()
    page.evaluate("page.drawn()")
    for tile, values in zip(page.evaluate(PIXELS, ".head canvas")[:2], maps(), strict=False):
        assert tile[values.argmin()] == [0, 34, 77, 255]
        assert tile[values.argmax()] == [253, 231, 55, 255]
    assert len({tuple(color) for color in page.evaluate(PIXELS, ".head canvas")[2]}) == 1
    # a tile is laid over the image, and says its true range
    page.locator(".head").nth(1).press("Enter")
    assert page.evaluate(PIXELS, "#overlay")[0] == page.evaluate(PIXELS, ".head canvas")[1]
    page.locator(".head").nth(2).click()
    assert page.inner_text("#chosen").startswith("cow 3 %:")  # the name of a class stays as it is
    assert "0.04" in page.inner_text("#chosen")
    # another image has its own classes
    page.locator("#thumbs button").nth(1).click()
    page.evaluate("page.drawn()")
    assert page.locator(".caption").all_inner_texts() == ["cow 50 %", "dog 9 %", "cat 8 %"]
    assert np.abs(maps() - stored[1]["pool"].values.reshape(3, 20)).max() < 1e-6
    # of either sign: blue for the lowest, orange for the largest
    page.keyboard.press("[")
    page.evaluate("page.drawn()")
    assert np.abs(maps() - stored[1]["token"].values.reshape(2, 20)).max() < 1e-6
    for tile, values in zip(page.evaluate(PIXELS, ".head canvas"), maps(), strict=True):
        (low_red, _, low_blue, _), (high_red, _, high_blue, _) = tile[values.argmin()], tile[values.argmax()]
        assert low_blue > low_red
        assert high_red > high_blue
    # and back to a query: the stage takes clicks and keys again
    page.keyboard.press("1")
    page.evaluate("page.drawn()")
    assert page.get_attribute("#stage", "role") == "application"
    page.click("#stage", position={"x": 9, "y": 9})
    assert page.inner_text("#where") == "Query row 1 of 4, column 1 of 5"
    assert np.abs(maps() - stored[1]["mixing"].values[:, 0, 0].reshape(1, 20)).max() < 1e-6
