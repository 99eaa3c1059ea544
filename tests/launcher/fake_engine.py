"""A Docker engine of a test's own: answers on a unix socket as its table says."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

__all__ = ["HANGS_S", "VERSION", "FakeEngine", "fake_engine"]

#: How long what never answers keeps its caller, unless its test ends before that, as it should.
HANGS_S = 120.0
#: What Docker 20.10 says of itself.
VERSION = {"Version": "20.10.24", "ApiVersion": "1.41", "Arch": "amd64", "Os": "linux"}


@dataclass
class FakeEngine:
    """`answers` maps the end of `METHOD /path` (a regular expression) to a status and a body.

    What is not there is a 404, as the engine gives. `asked` is what was asked for, in order.
    A body of None never comes.
    """

    path: Path
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def env(self) -> dict[str, str]:
        return {"DOCKER_HOST": f"unix://{self.path}"}

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        asked = f"{method} {re.sub(r'^/v[0-9.]+', '', path)}"
        self.asked.append(asked)
        for pattern, found in self.answers.items():
            if re.fullmatch(pattern, asked):
                return found
        return 404, {"message": f"page not found: {asked}"}


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    engine: FakeEngine


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._do("GET")

    def do_POST(self) -> None:
        self._do("POST")

    def do_DELETE(self) -> None:
        self._do("DELETE")

    def _do(self, method: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.engine.answer(method, self.path.partition("?")[0])
        if body is None:
            self.server.engine.over.wait(HANGS_S)
            return
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def fake_engine(
    folder: Path, answers: Mapping[str, tuple[int, Any]] | None = None
) -> Iterator[FakeEngine]:
    """An engine at `folder`/docker.sock, gone at the end. It says VERSION unless told otherwise."""
    engine = FakeEngine(folder / "docker.sock", {"GET /version": (200, VERSION), **(answers or {})})
    server = _Server(str(engine.path), _Handler)
    server.engine = engine
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
