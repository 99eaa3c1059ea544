"""A line between here and a board: every byte arrives later by a set time, and it can be cut.

A TCP relay on loopback, for machines whose kernel has no `netem`. Each way delays by half of the
round trip; what is under way when the line is cut never arrives.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from types import TracebackType

__all__ = ["Line"]

_CHUNK = 1 << 17
#: Bytes under way: enough that the delay, and not the relay, bounds the rate.
_CHUNKS = 4096


class Line:
    """Listens on `port` of loopback and relays to `to`. `round_trip_s` may be set at any time."""

    def __init__(self, to: int, round_trip_s: float = 0.0) -> None:
        self.round_trip_s = round_trip_s
        #: Connections are cut once so many more bytes have come from the board; None for never.
        self.cut_after: int | None = None
        self.refusing = False
        self.connections = 0
        self._to = to
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refusing = True
        # Closing alone does not end a wait for a connection: where that is begun again (after a
        # stop, say), it is for whatever has the descriptor's number by then, as the next line has.
        self._server.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End every connection that goes over this line, on both sides."""
        with self._guard:
            ended, self._open = self._open, set()
        for each in ended:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self.refusing:
                near.close()
                continue
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._to))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self._open |= {near, far}
            # The caller's first packet goes after a round trip of TCP's own.
            time.sleep(self.round_trip_s)
            self._relay(near, far, back=False)
            self._relay(far, near, back=True)

    def _relay(self, source: socket.socket, sink: socket.socket, *, back: bool) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_CHUNKS)

        def take() -> None:
            while True:
                try:
                    chunk = source.recv(_CHUNK)
                except OSError:
                    chunk = b""
                under_way.put((time.monotonic() + self.round_trip_s / 2, chunk))
                if not chunk:
                    return

        def give() -> None:
            while True:
                due, chunk = under_way.get()
                wait = due - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                try:
                    if not chunk:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(chunk)
                except OSError:
                    return
                if back and self.cut_after is not None:
                    self.cut_after -= len(chunk)
                    if self.cut_after < 0:
                        self.cut_after = None
                        self.cut()

        for work in (take, give):
            threading.Thread(target=work, daemon=True).start()
