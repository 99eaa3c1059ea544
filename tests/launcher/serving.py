"""A server of a results folder in a thread, for tests that ask it as a browser or an attacker."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import report_cases as cases

from narrowgauge.report.html import content_policy_of, html_report
from narrowgauge.serve.app import Report
from narrowgauge.serve.server import bind, server_on
from narrowgauge.store import Store


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read().decode("utf-8"))

    def send(self, payload: bytes) -> bytes:
        """Bytes as they are; what came back before the server closed or fell silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(OSError):
                while chunk := connection.recv(65536):
                    found += chunk
            return found


def verdicts() -> tuple[str, str]:
    """A report as the server shows one, without records behind it."""
    return html_report(cases.report()), content_policy_of()


@contextlib.contextmanager
def served(store: Store, report: Report = verdicts) -> Iterator[Served]:
    with bind(0) as listening:
        server = server_on(listening, store, report)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        left = time.monotonic() + 20
        while not server.started and time.monotonic() < left:
            time.sleep(0.01)
        assert server.started
        try:
            yield Served(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
