"""How a notebook's container begins and ends, with an engine that is a stand-in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, NotFound

from narrowgauge.errors import NarrowgaugeError, RunFailed
from narrowgauge.jupyter import serve
from narrowgauge.plan import NotebookServer, User, plan_notebook
from narrowgauge.targets import Accelerator, load_targets

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")


class _Engine:
    """The calls of docker's SDK that are made, in order. `states` is what inspecting gives; the
    inspection `signal_at`, if any, comes with the signal `number` to this process."""

    base_url = "http://stand-in"

    def __init__(self, *states: dict[str, Any], signal_at: int = 0, number: int = 0) -> None:
        self.states = list(states)
        self.looks, self.signal_at, self.number = 0, signal_at, number
        self.calls: list[str] = []
        self.refuses_start = False

    def create_network(self, name: str, **settings: Any) -> None:
        assert settings["options"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}
        self.calls.append("network")

    def create_container_from_config(self, body: dict[str, Any], name: str) -> dict[str, str]:
        assert body["HostConfig"]["NetworkMode"] == name
        self.calls.append("container")
        return {"Id": "c"}

    def start(self, container: str) -> None:
        if self.refuses_start:
            raise APIError("no", None, "could not select device driver")
        self.calls.append("start")

    def inspect_container(self, container: str) -> dict[str, Any]:
        self.looks += 1
        if self.looks == self.signal_at:
            os.kill(os.getpid(), self.number)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"State": {"Running": True, "ExitCode": 0, **state}}

    def logs(self, container: str, tail: int) -> bytes:
        return b"bad config\n"

    def stop(self, container: str, timeout: int) -> None:
        self.calls.append("stop")

    def remove_container(self, container: str, force: bool) -> None:
        assert force
        self.calls.append("remove")

    def remove_network(self, name: str) -> None:
        self.calls.append("remove network")


class _Handler(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers['Authorization']}")
        known = self.headers["Authorization"] == "token secret"
        self.send_response(200 if known else 403)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that is there and wants the token `secret`."""
    _Handler.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(5)


BEGUN = ["network", "container", "start"]
GONE = ["stop", "remove", "remove network"]


def _serve(
    engine: _Engine, port: int, token: str = "secret", patience_s: float = 120.0
) -> list[str]:
    server = NotebookServer(port, token)
    plan = plan_notebook(
        TARGETS["cpu"], name="n", image="i", cache="c", results=Path("/r"), experiments=Path("/e"),
        data=None, user=User(1, 1), accelerator=Accelerator.NONE, server=server,
    )  # fmt: skip
    said: list[str] = []
    serve(engine, plan, server, said.append, "notebooks/toy.ipynb", patience_s)  # type: ignore[arg-type]
    return said


def test_it_says_where_it_is_once_it_answers_and_goes_when_it_ends(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _Engine({}, {}, {"Running": False})

    said = _serve(engine, port)

    assert capsys.readouterr().out == (
        f"http://127.0.0.1:{port}/lab/tree/notebooks/toy.ipynb?token=secret\n"
    )
    assert said == ["JupyterLab runs here; Ctrl-C ends it:", "JupyterLab has ended"]
    assert _Handler.asked == ["/api/contents token secret"], "asked once, then left alone"
    assert engine.calls == BEGUN + GONE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(port: int, number: signal.Signals) -> None:
    engine = _Engine({}, signal_at=2, number=number)

    said = _serve(engine, port)

    assert said[-1] == "ending JupyterLab"
    assert engine.calls == BEGUN + GONE


def test_one_that_fails_says_why_and_nothing_is_left(port: int) -> None:
    engine = _Engine({"Running": False, "ExitCode": 3})

    with pytest.raises(RunFailed, match="exit code 3") as raised:
        _serve(engine, port)

    assert raised.value.why == "bad config"
    assert engine.calls == BEGUN + GONE


def test_one_that_never_answers_is_given_up(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    engine = _Engine({})

    with pytest.raises(RunFailed, match="does not answer"):
        _serve(engine, port, token="another", patience_s=0.5)

    assert capsys.readouterr().out == "", "no address that does not work"
    assert engine.calls == BEGUN + GONE


def test_a_refused_start_leaves_nothing(port: int) -> None:
    engine = _Engine({})
    engine.refuses_start = True

    with pytest.raises(NarrowgaugeError, match="cannot give a container the GPU"):
        _serve(engine, port)

    assert engine.calls == ["network", "container", *GONE]


def test_a_container_that_somebody_removed_is_no_error(port: int) -> None:
    engine = _Engine({}, {"Running": False})

    def gone(container: str, timeout: int) -> None:
        raise NotFound("gone")

    engine.stop = gone  # type: ignore[method-assign]

    assert _serve(engine, port)[-1] == "JupyterLab has ended"
    assert engine.calls == [*BEGUN, "remove", "remove network"]


@pytest.mark.parametrize("refused", ["stop", "remove_container"])
def test_what_refuses_to_end_is_removed_as_far_as_it_can_be(port: int, refused: str) -> None:
    engine = _Engine({}, {"Running": False})

    def refuse(container: str, **_: object) -> None:
        raise APIError("cannot stop container: tried to kill it, and it did not die")

    setattr(engine, refused, refuse)

    with pytest.raises(APIError, match="did not die"):
        _serve(engine, port)

    left = {"stop": ["remove"], "remove_container": ["stop"]}[refused]
    assert engine.calls == [*BEGUN, *left, "remove network"]
