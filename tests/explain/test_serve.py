"""`recast explain --serve`: what it answers, what it refuses, and that it lives on; by plain HTTP and in a browser."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from socket import create_connection
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from in_browser import CHROMIUM, chromium
from on_pages import data_in, recast_network
from PIL import Image
from torch import nn

from recast.errors import RecastError
from recast.lab.explain.inputs import read_inputs
from recast.lab.explain.make import make_scene
from recast.lab.explain.pages import Subject
from recast.lab.explain.serve import LARGEST, Server, serve
from recast.layers.gpsa import GPSA

Ask = Callable[..., tuple[int, str]]


def photo(kind: str = "PNG", size: tuple[int, int] = (30, 20)) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


@pytest.fixture
def server(open_gates: Callable[..., GPSA]) -> Iterator[Server]:
    """A parent and its recast network with open gates, on a free port."""
    parent: nn.Module = recast_network(open_gates, gate="sigmoid")
    arms = {"parent": parent, "recast": recast_network(open_gates)}

    def show(inputs: Any, notes: Any) -> Any:
        normalisation, labels = ((0,) * 3, (1,) * 3), {"parent": "Parent", "recast": "Recast"}
        return make_scene("net", inputs, [(None, arms)], ["cat", "dog", "cow"], normalisation, labels, notes)

    with Server(0) as served:
        served.subject = Subject(lambda wanted: read_inputs(wanted, (12, 14), 1), show)
        running = Thread(target=serve, args=[served])
        running.start()
        yield served
        served.shutdown()
        running.join()


@pytest.fixture
def ask(server: Server) -> Ask:
    """`ask("POST", "/page", body)` → status and text; as our own page asks, but for other `headers`."""

    def call(method: str, path: str, body: bytes | None = None, token: str = "", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection(server.authority)
        own = {"Origin": f"http://{server.authority}"} if method == "POST" else {}
        path += ("&" if "?" in path else "?") + f"token={token or server.token}"
        connection.request(method, path, body, {**own, **headers})
        answer = connection.getresponse()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return answer.status, answer.read().decode()

    return call


def test_images_of_any_format_one_after_the_other(ask: Ask) -> None:
    assert "Choose an image" in ask("GET", "/")[1]
    for kind, size in (("PNG", (30, 20)), ("JPEG", (5, 90)), ("WEBP", (200, 40)), ("TIFF", (12, 14))):
        status, text = ask("POST", "/page?name=my%20%3Ccat%3E.x", photo(kind, size))
        assert status == 200, text
        (picture,) = data_in(text)["pictures"]
        assert (picture["name"], picture["size"]) == ("my-cat-.x", [12, 14])
        assert set(picture["predictions"][0]) == {"parent", "recast"}
    for asked, name in (("..%2F..%2Fx", "x"), ("", "image")):
        assert data_in(ask("POST", f"/page?name={asked}", photo())[1])["pictures"][0]["name"] == name
    assert ask("POST", "/page?name=" + "%F0%9F%90%88a" * 900, photo())[0] == 200


def test_what_is_refused_and_that_it_lives_on(ask: Ask, server: Server) -> None:
    port = server.authority.partition(":")[2]
    for content, reason in ((photo()[:200], ""), (b"no image", "not an image in a known format, or truncated")):
        status, text = ask("POST", "/page?name=cat.png", content)
        assert (status, text.count("\n")) == (422, 0)
        assert text.startswith(f"cannot read image cat.png: {reason}")
    evil = "http://evil.example"
    for expected, method, path, headers in (
        (403, "GET", "/", {"Host": f"evil.example:{port}"}),
        (403, "GET", "/", {"Host": "127.0.0.1"}),
        (403, "POST", "/page", {"Host": f"evil.example:{port}", "Origin": f"{evil}:{port}"}),
        (403, "POST", "/page", {"Origin": evil}),
        (403, "POST", "/page", {"Origin": "null"}),
        (403, "POST", "/page", {"Origin": f"http://localhost:{port}"}),
        (400, "POST", "/other", {}),
        (413, "POST", "/page", {"Content-Length": str(LARGEST + 1)}),
        (413, "POST", "/page", {"Content-Length": "9" * 5000}),
        (400, "POST", "/page", {"Content-Length": "-1"}),
        (400, "POST", "/page", {"Content-Length": "²"}),
        (404, "GET", "/../../etc/hostname", {}),
        (403, "GET", "/", {"token": "other"}),
        (403, "GET", "/", {"token": "%C3%A9"}),
        (403, "POST", "/page", {"token": "other"}),
    ):
        body = photo() if method == "POST" and "Content-Length" not in headers else None
        status, text = ask(method, path, body, **headers)
        assert (status, text.count("\n")) == (expected, 0), (method, path, headers, text)
    show, subject = server.subject.show, server.subject

    def fails(*_: Any) -> Any:
        raise MemoryError("so large")

    server.subject = Subject(subject.read, fails)
    assert ask("POST", "/page", photo()) == (500, "MemoryError: so large")
    server.subject = Subject(subject.read, show)
    home = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert ask("POST", "/page", photo(), **home)[0] == 200


def test_port_80_is_not_said_by_a_browser_and_a_malformed_address_is_answered(ask: Ask, server: Server) -> None:
    server.hosts |= {"127.0.0.1"}  # as at port 80, which a test may not have
    headers = {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"}
    assert ask("POST", "/page", photo(), **headers)[0] == 200
    with create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(f"GET http://[ HTTP/1.1\r\nHost: {server.authority}\r\n\r\n".encode())
        assert b" 400 " in connection.recv(100)


def test_unfinished_uploads_wait_unread(server: Server) -> None:
    """Each may hold 32 MiB, and forty connections at once are none too many."""
    head = f"POST /page?token={server.token} HTTP/1.1\r\nHost: {server.authority}\r\n"
    head += f"Origin: http://{server.authority}\r\nContent-Length: {LARGEST}\r\n\r\n"
    connections = [create_connection(server.server_address, timeout=30) for _ in range(40)]
    for connection in connections:
        connection.sendall(head.encode())
    deadline = monotonic() + 20
    while server.uploads.acquire(blocking=False):  # until all places are taken
        server.uploads.release()
        assert monotonic() < deadline
        sleep(0.01)
    for connection in connections:
        connection.close()
    with server.uploads:  # free again
        pass


def test_a_port_in_use(server: Server) -> None:
    port = int(server.authority.partition(":")[2])
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(RecastError, match=f"cannot serve at port {port}: it is in use"):
        Server(port)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_a_browser_drops_an_image_and_clicks_a_pixel(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(photo())
    (tmp_path / "broken.png").write_bytes(photo()[:200])
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(300_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda one: complaints.append(one.url))
        home = f"http://{server.authority}/"
        page.goto(server.address)
        page.set_input_files("#file", tmp_path / "cat.png")
        inner = page.frame_locator("#page")
        inner.locator("#grid canvas").first.wait_for()
        inner.locator("#predictions").get_by_text("Parent").first.wait_for()
        before = inner.locator("#where").inner_text()
        inner.locator("#stage").click(position={"x": 5, "y": 5})
        assert inner.locator("#where").inner_text() != before
        inner.get_by_label("Grad-CAM").check()  # class maps of both, side by side
        inner.get_by_text(re.compile("^Parent: (cat|dog|cow) ")).first.wait_for()
        assert inner.locator(".caption").filter(has_text="Parent: ").count() == 3
        assert inner.locator(".caption").filter(has_text="Recast: ").count() == 3
        assert [text for text in complaints if not text.startswith((home, "data:"))] == []
        page.set_input_files("#file", tmp_path / "broken.png")
        page.get_by_text("cannot read image broken.png").wait_for()
        # dropped on the page of the image before, as on the form
        drop = """bytes => {
          const held = new DataTransfer();
          held.items.add(new File([new Uint8Array(bytes)], "dropped.webp"));
          window.dispatchEvent(new DragEvent("drop", { dataTransfer: held, cancelable: true, bubbles: true }));
        }"""
        page.frames[1].evaluate(drop, list(photo("WEBP")))
        page.locator("#status", has_text=re.compile(r"^dropped\.webp$")).wait_for()
        inner.locator("#about", has_text="dropped.webp").wait_for()
        server.shutdown()
        server.socket.close()
        page.set_input_files("#file", tmp_path / "cat.png")
        page.get_by_text("No answer: is recast explain --serve still running?").wait_for()
