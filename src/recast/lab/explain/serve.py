"""`recast explain --serve`: a local page that takes an image and answers with its explain page.

Every request needs the token of the printed address, which other users of the machine do not know. Other sites open in
the same browser can neither read an answer nor have an image computed: every request must name this machine as its host
(a site may point its own name at 127.0.0.1), a POST must come from our own page, and the content security policy lets
the page load nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore, Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from recast.errors import RecastError, first_line, one_line
from recast.lab.explain.pages import Subject
from recast.lab.explain.write import fill_page, one_page, safe_stem

HOST, PORT = "127.0.0.1", 8765
LARGEST = 32 * 2**20  # bytes of an image file
UPLOADS = 4  # image files held in memory at a time; others wait unread
LONGEST_NAME = 60  # characters of up to four bytes; file names are limited to 255 bytes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingTCPServer):
    """Server bound on construction, so that a port in use is reported before a network is loaded.

    Set `subject` before serving. `HTTPServer` is not used because it looks up the name of its address.
    """

    allow_reuse_address = os.name == "posix"  # elsewhere two servers could share a port
    daemon_threads = True  # browsers keep unused connections open
    request_queue_size = 128  # with the default of 5, bursts of a browser are reset
    subject: Subject
    name: str = "a network"
    layer: str | None = None

    def __init__(self, port: int = PORT) -> None:
        self.one_at_a_time = Lock()  # maps are recorded by hooks on the shared network
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise RecastError(f"cannot serve at port {port}: {reason}; --port 0 chooses a free port") from None
        port = self.server_address[1]
        self.authority, self.token = f"{HOST}:{port}", secrets.token_urlsafe(16)
        self.address = f"http://{self.authority}/?token={self.token}"
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        if port == 80:  # browsers omit the default port
            self.hosts |= {HOST, "localhost"}
        self.uploads = BoundedSemaphore(UPLOADS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed the connection."""

    def page(self, name: str, content: bytes) -> str:
        """Return the page of an image file. Raises `RecastError` as `read_image` and `make_scene` do."""
        with self.one_at_a_time, TemporaryDirectory() as folder:
            path = Path(folder, safe_stem(name)[-LONGEST_NAME:] or "image")
            path.write_bytes(content)
            try:
                return one_page(self.subject.show(*self.subject.read([path])), self.layer)
            except RecastError as error:
                raise RecastError(str(error).replace(str(path), path.name)) from None


class Handler(BaseHTTPRequestHandler):
    """GET / returns the upload page; POST /page?name=NAME with an image file as its body returns its page."""

    server: Server
    timeout = 30  # seconds to wait for the next byte of a request

    def do_GET(self) -> None:
        if (request := self._checked()) is None:
            return None
        if request[0] != "/":
            return self._answer(HTTPStatus.NOT_FOUND, "not found: the only page is /")
        title = f"Where does {self.server.name} look?"
        page = fill_page("serve.html", title, ("page.css", "serve.css"), largest=str(LARGEST))
        return self._answer(HTTPStatus.OK, page, "text/html")

    def do_POST(self) -> None:
        if (request := self._checked()) is None:
            return None
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            return self._answer(HTTPStatus.FORBIDDEN, "images are accepted from our own page only")
        path, name = request
        length = self.headers.get("Content-Length", "")
        if path != "/page" or not length.isdecimal():
            return self._answer(HTTPStatus.BAD_REQUEST, "expected POST /page?name=NAME with an image file as its body")
        if len(length) > len(str(LARGEST)) or int(length) > LARGEST:
            return self._answer(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"image files must not exceed {LARGEST // 2**20} MiB"
            )
        with self.server.uploads:
            content = self.rfile.read(int(length))
            if len(content) < int(length):
                return None  # the sender has gone
            try:
                answer = HTTPStatus.OK, self.server.page(name, content), "text/html"
            except RecastError as error:
                answer = HTTPStatus.UNPROCESSABLE_ENTITY, one_line(error), "text/plain"
            except Exception as error:  # the user's network may raise anything; the next image may still work
                text = one_line(f"{type(error).__name__}: {first_line(error)}")
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain"
        return self._answer(*answer)

    def _checked(self) -> tuple[str, str] | None:
        """Return the path of the request and the image's name; None if the request was refused, with an answer."""
        try:
            url = urlsplit(self.path)
        except ValueError as error:  # a host such as [
            self._answer(HTTPStatus.BAD_REQUEST, f"malformed address: {error}")
            return None
        query = parse_qs(url.query)
        if self.headers.get("Host") not in self.server.hosts:
            problem = f"this server is http://{self.server.authority}/ only"
        elif not secrets.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode()):
            problem = "open the address that --serve printed, with its token"
        else:
            return url.path, query.get("name", ["image"])[0]
        self._answer(HTTPStatus.FORBIDDEN, problem)
        return None

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no log: the page reports errors."""


def serve(server: Server) -> None:
    """Serve until Ctrl-C. The image being computed is finished, and no other is started."""
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.one_at_a_time.acquire()  # let torch finish and temporary files be removed before the interpreter exits
