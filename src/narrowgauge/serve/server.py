"""The socket on 127.0.0.1, and the server on it until Ctrl-C."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from narrowgauge.catalog import EXPERIMENT_FILE
from narrowgauge.checkout import Checkout
from narrowgauge.errors import UsageError
from narrowgauge.judge.gather import CLAIMS_FILE
from narrowgauge.report.html import content_policy_of
from narrowgauge.reproduce.conclude import JUDGED_FOLDER
from narrowgauge.serve.app import Report, make_app
from narrowgauge.serve.guard import hosts_of
from narrowgauge.store import Store
from narrowgauge_contract.outcome import OUTCOME_FILE
from narrowgauge_contract.record import RECORD_FILE

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
        say("every user of this machine can read that; nobody on another one can")
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
            from narrowgauge.report.assembled import assemble_page
            from narrowgauge.reproduce.occasions import labelled, occasions_in

            judged = labelled(judge_stored(checkout, store), occasions_in(store.root))
            page = assemble_page(judged, store, checkout.experiments)
            known.clear()
            known[state] = page, content_policy_of()
        return known[state]

    return report


def _state(store: Store, experiments: Path) -> tuple[tuple[str, int], ...]:
    """When each file that judging reads was written."""
    paths = [
        path
        for name in (RECORD_FILE, OUTCOME_FILE)
        for depth in ("*", "*/*", "*/*/out")
        for path in store.root.glob(f"{depth}/{name}")
    ]
    paths += store.root.glob(f"{JUDGED_FOLDER}/2*.json")
    for name in (CLAIMS_FILE, EXPERIMENT_FILE):
        paths += experiments.glob(f"*/{name}")
    found = []
    for path in sorted(paths):
        try:
            found.append((str(path), path.stat().st_mtime_ns))
        except OSError:
            continue
    return tuple(found)
