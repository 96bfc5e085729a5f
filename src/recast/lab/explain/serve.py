"""`recast explain --serve`: a page on the loopback alone that takes an image and answers with the page of it.

Every request must bring the token of the address that the command prints: other users of the machine do not know it.
Other sites that are open in the same browser can neither read an answer nor have an image computed: every request must
name this machine as its host (a site may point its own name at 127.0.0.1), a POST must come from our own page, and the
policy that goes with a page lets it load nothing.
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
LARGEST = 32 * 2**20
"""Bytes of an image file."""
UPLOADS = 4
"""Image files that are held at a time; others wait unread."""
LONGEST_NAME = 60
"""Characters, of four bytes at most: a file's name has 255."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingTCPServer):
    """Bound when it is made: a port in use is told before a network is loaded. `subject` is set before it serves.

    Not an `HTTPServer`, which asks the network for the name of its address.
    """

    allow_reuse_address = os.name == "posix"  # elsewhere two servers could share a port
    daemon_threads = True  # a browser keeps connections open that it never uses
    request_queue_size = 128  # of 5, the default, a browser's burst is reset
    subject: Subject
    name: str = "a network"
    layer: str | None = None

    def __init__(self, port: int = PORT) -> None:
        self.one_at_a_time = Lock()  # the hooks that record maps are a network's
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "it is in use" if taken else error.strerror
            raise RecastError(f"cannot serve at port {port}: {why}; --port 0 takes a free one") from None
        port = self.server_address[1]
        self.authority, self.token = f"{HOST}:{port}", secrets.token_urlsafe(16)
        self.address = f"http://{self.authority}/?token={self.token}"
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        if port == 80:  # which a browser does not say
            self.hosts |= {HOST, "localhost"}
        self.uploads = BoundedSemaphore(UPLOADS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle is nothing to tell."""

    def page(self, name: str, content: bytes) -> str:
        """The page of an image file. Raises `RecastError` as `read_image` and `make_scene` do."""
        with self.one_at_a_time, TemporaryDirectory() as folder:
            path = Path(folder, safe_stem(name)[-LONGEST_NAME:] or "image")
            path.write_bytes(content)
            try:
                return one_page(self.subject.show(*self.subject.read([path])), self.layer)
            except RecastError as error:
                raise RecastError(str(error).replace(str(path), path.name)) from None


class Handler(BaseHTTPRequestHandler):
    """GET / is the page that takes images, POST /page?name=NAME with an image file as its body is the page of that."""

    server: Server
    timeout = 30
    """Seconds that a request may keep us waiting for its next byte."""

    def do_GET(self) -> None:
        if (asked := self._asked()) is not None:
            if asked[0] != "/":
                return self._answer(HTTPStatus.NOT_FOUND, "there is one page: /")
            title = f"Where does {self.server.name} look?"
            self._answer(HTTPStatus.OK, fill_page("serve.html", title, largest=str(LARGEST)), "text/html")

    def do_POST(self) -> None:
        if (asked := self._asked()) is None:
            return None
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            return self._answer(HTTPStatus.FORBIDDEN, "images are taken from our own page alone")
        path, name = asked
        length = self.headers.get("Content-Length", "")
        if path != "/page" or not length.isdecimal():
            return self._answer(HTTPStatus.BAD_REQUEST, "expected POST /page?name=NAME with an image file as its body")
        if len(length) > len(str(LARGEST)) or int(length) > LARGEST:
            return self._answer(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an image file of at most {LARGEST // 2**20} MiB is expected"
            )
        with self.server.uploads:
            content = self.rfile.read(int(length))
            if len(content) < int(length):
                return None  # whoever sent it has gone
            try:
                answer = HTTPStatus.OK, self.server.page(name, content), "text/html"
            except RecastError as error:
                answer = HTTPStatus.UNPROCESSABLE_ENTITY, one_line(error), "text/plain"
            except Exception as error:  # whatever a network of the user's raises, the next image may do
                text = one_line(f"{type(error).__name__}: {first_line(error)}")
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, text, "text/plain"
        self._answer(*answer)

    def _asked(self) -> tuple[str, str] | None:
        """Path and name that are asked for; None where the request is refused, which is answered."""
        why = ""
        try:
            url = urlsplit(self.path)
        except ValueError as error:  # a host such as [
            self._answer(HTTPStatus.BAD_REQUEST, f"malformed address: {error}")
            return None
        query = parse_qs(url.query)
        if self.headers.get("Host") not in self.server.hosts:
            why = f"this server is http://{self.server.authority}/ and no other"
        elif not secrets.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode()):
            why = "open the address that --serve printed, with its token"
        if why:
            self._answer(HTTPStatus.FORBIDDEN, why)
            return None
        return url.path, query.get("name", ["image"])[0]

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page tells what it cannot show."""


def serve(server: Server) -> None:
    """Answer until Ctrl-C; the image that is being computed is finished, and no other is begun."""
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.one_at_a_time.acquire()  # no torch runs, and no temporary file is left, while the interpreter ends
