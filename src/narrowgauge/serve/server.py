"""The socket on 127.0.0.1, and the server on it until Ctrl-C."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from narrowgauge.checkout import Checkout
from narrowgauge.errors import UsageError
from narrowgauge.report.html import content_policy_of, html_report
from narrowgauge.serve.app import Report, make_app
from narrowgauge.serve.guard import hosts_of
from narrowgauge.store import Store

__all__ = ["bind", "report_of", "serve_results", "server_on"]

_ADDRESS = "127.0.0.1"
#: A reader's browser has a handful of connections; more is no reader.
_MOST_CONNECTIONS = 64


def serve_results(store: Store, checkout: Checkout, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted. Raises UsageError where the port is taken."""
    with bind(port) as listening:
        server = server_on(listening, store, report_of(store, checkout))
        address = f"http://{_ADDRESS}:{listening.getsockname()[1]}/"
        say(f"results of {store.root} on {address} (Ctrl-C ends)")
        server.run(sockets=[listening])


def bind(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((_ADDRESS, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"cannot listen on {_ADDRESS}:{port}",
            why="something else does already" if taken else str(error),
            next_step="name another port: --port 0 takes a free one",
        ) from error
    return listening


def server_on(listening: socket.socket, store: Store, report: Report) -> uvicorn.Server:
    """A server for the store's pages; `run(sockets=[listening])` serves."""
    app = make_app(store, report, hosts_of(listening.getsockname()[1]))
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def report_of(store: Store, checkout: Checkout) -> Report:
    """Judges the store's records when asked, and again only when a record or a claim changed."""
    known: dict[tuple[tuple[str, int], ...], tuple[str, str]] = {}

    def report() -> tuple[str, str]:
        state = _state(store, checkout.experiments)
        if state not in known:
            from narrowgauge.judge.gather import judge_stored
            from narrowgauge.report.cards import find_cards
            from narrowgauge.report.content import build

            judged = judge_stored(checkout, store)
            cards = find_cards(judged.run_ids, store, checkout.experiments)
            page = html_report(build(judged, cards))
            known.clear()
            known[state] = page, content_policy_of()
        return known[state]

    return report


def _state(store: Store, experiments: Path) -> tuple[tuple[str, int], ...]:
    """When each record and each page of claims was written."""
    paths = [*store.root.glob("*/*/record.json"), *store.root.glob("*/record.json")]
    paths += experiments.glob("*/claims.toml")
    found = []
    for path in sorted(paths):
        try:
            found.append((str(path), path.stat().st_mtime_ns))
        except OSError:
            continue
    return tuple(found)
