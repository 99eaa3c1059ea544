"""Who may ask what. A page of another site that this browser also shows must not reach the results:
so the Host must be ours (no DNS name that was pointed here), requests that another site made are
refused, and nothing but reading is answered."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["POLICY", "Guard", "hosts_of"]

POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none';"
    " connect-src 'self'; img-src 'self' data:; script-src 'self'; style-src 'self'"
)
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_METHODS = ("GET", "HEAD")
#: What a browser says of a request that the user made, or one of our own pages.
_OWN = (b"same-origin", b"none")
_LOOPBACK = "127.0.0.1"
#: Longer addresses are nobody's link.
_MOST_BYTES = 2000


def hosts_of(port: int) -> tuple[bytes, ...]:
    """The Host headers that name this server. Browsers leave out port 80."""
    names = [f"{_LOOPBACK}:{port}", f"localhost:{port}"]
    names += [_LOOPBACK, "localhost"] if port == 80 else []
    return tuple(name.encode() for name in names)


class Guard:
    """ASGI middleware: refuses before anything is looked up, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, hosts: Iterable[bytes]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A socket that is no HTTP: nothing here speaks it. Closing refuses it with 403.
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = {name for name, _ in message["headers"]}
                extra = [(b"content-security-policy", POLICY.encode()), *_HEADERS]
                added = [pair for pair in extra if pair[0] not in said]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope)
        answer = self._app if refusal is None else refusal
        await answer(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        client = scope.get("client")
        if client is not None and client[0] != _LOOPBACK:
            return _no(403, "This page is for this machine alone.")
        named = headers.get(b"host", [])
        if len(named) != 1 or named[0].lower() not in self._hosts:
            return _no(403, "The Host header does not name this server.")
        if scope["method"] not in _METHODS:
            refusal = _no(405, "Results are read here, never changed.")
            refusal.headers["allow"] = ", ".join(_METHODS)
            return refusal
        if any(value not in _OWN for value in headers.get(b"sec-fetch-site", [])):
            return _no(403, "Another site asked for this.")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > _MOST_BYTES:
            return _no(414, "The address is too long.")
        return None


def _no(status: int, why: str) -> PlainTextResponse:
    return PlainTextResponse(why + "\n", status_code=status)
