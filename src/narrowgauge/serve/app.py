"""Which address gives which page. Endpoints are plain functions: starlette runs them in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from narrowgauge.report.html import environment, page_css
from narrowgauge.report.text import clean
from narrowgauge.serve.follow import Followers
from narrowgauge.serve.guard import Guard
from narrowgauge.serve.runs import find_picture, find_run, list_runs, load_page
from narrowgauge.store import STATUS_WORDS, RunFolder, Store
from narrowgauge_contract import __version__
from narrowgauge_contract.errors import NarrowgaugeError

if TYPE_CHECKING:
    from narrowgauge.compare import Pair

__all__ = ["Pages", "Report", "make_app"]

_PER_PAGE = 50
#: Where the list can go on: nobody reads further, and a number may be any.
_LAST_START = 1_000_000
_SCRIPT = "live.js"
#: What the page `/report` shows: the HTML and its content policy.
Report = Callable[[], tuple[str, str]]


def make_app(store: Store, report: Report, hosts: Iterable[bytes]) -> Guard:
    """The pages of a store. `hosts` are the Host headers that name this server."""
    pages = Pages(store, report)
    app = Starlette(
        routes=[
            Route("/", pages.runs),
            Route("/runs/{run}", pages.run),
            Route("/runs/{run}/live", pages.live),
            Route("/runs/{run}/pictures/{picture}", pages.picture),
            Route("/compare", pages.compare),
            Route("/report", pages.report),
            Route("/assets/style.css", pages.style),
            Route("/assets/live.js", pages.script),
        ],
        exception_handlers={
            HTTPException: pages.refuse,
            NarrowgaugeError: pages.tell,
            Exception: pages.fail,
        },
    )
    # A run's name may end with a slash that a link wrote as %2F: it names nothing, and is told so.
    app.router.redirect_slashes = False
    # Around everything, so that even the page of an unexpected error has the headers.
    return Guard(app, hosts)


class Pages:
    """The endpoints. Holds what several requests share: templates, and readers of live runs."""

    def __init__(self, store: Store, report: Report) -> None:
        self._store = store
        self._report = report
        self._judging = threading.Lock()
        self._followers = Followers()
        self._templates = environment("narrowgauge.serve")

    def runs(self, request: Request) -> Response:
        """The list, newest first."""
        experiment, status = (request.query_params.get(key, "") for key in ("experiment", "status"))
        start = _start(request.query_params.get("from", "0"))
        lines, more = list_runs(self._store, experiment, status, start, _PER_PAGE)

        def link(place: int) -> str:
            words = {"experiment": experiment, "status": status, "from": str(place)}
            return "/?" + urlencode({key: value for key, value in words.items() if value})

        values = {
            "lines": lines,
            "experiment": clean(experiment),
            "status": clean(status),
            "statuses": STATUS_WORDS,
            "newer": link(max(0, start - _PER_PAGE)) if start else "",
            "older": link(start + _PER_PAGE) if more else "",
            "root": clean(self._store.root),
        }
        return self._page("runs.html.j2", values)

    def run(self, request: Request) -> Response:
        """One run; while it goes on, its script asks for `live` again and again."""
        folder = self._folder(request)
        live = self._followers.view(folder) if folder.events_path.is_file() else None
        page = load_page(folder)
        values = {"page": page, "live": live, "going": page.open, "svg": Markup}
        return self._page("run.html.j2", values)

    def live(self, request: Request) -> Response:
        """The part of a run's page that changes."""
        folder = self._folder(request)
        live = self._followers.view(folder)
        if live is None:
            raise HTTPException(404, "This run cannot be followed.")
        going = not folder.recorded
        answer = self._page("live.html.j2", {"live": live, "going": going, "svg": Markup})
        answer.headers["x-narrowgauge-open"] = "yes" if going else "no"
        return answer

    def picture(self, request: Request) -> Response:
        path = find_picture(self._folder(request), request.path_params["picture"])
        if path is None:
            raise HTTPException(404, "There is no such picture.")
        return FileResponse(path, media_type="image/png")

    def compare(self, request: Request) -> Response:
        """Two runs side by side; without names, which two."""
        left, right = (request.query_params.get(key, "") for key in ("left", "right"))
        values: dict[str, Any] = {"left": clean(left), "right": clean(right), "found": None}
        if left and right:
            from narrowgauge.compare import compare
            from narrowgauge.noise import Floors

            records = [self._find(name).record() for name in (left, right)]
            found = compare(records[0], records[1], Floors.in_store(self._store))
            values |= {
                "found": found,
                "differences": [clean(each) for each in found.differences],
                "lines": [_pair(each) for each in found.pairs],
                "alone": [
                    f"only {side}: {clean(label) or 'all rows'}"
                    for side, labels in (("left", found.only_left), ("right", found.only_right))
                    for label in labels
                ],
            }
        return self._page("compare.html.j2", values)

    def report(self, request: Request) -> Response:
        """The verdicts on the records that are here now."""
        del request
        with self._judging:
            page, policy = self._report()
        headers = {"content-security-policy": f"{policy}; frame-ancestors 'none'"}
        return HTMLResponse(page, headers=headers)

    def style(self, request: Request) -> Response:
        del request
        return Response(page_css(), media_type="text/css")

    def script(self, request: Request) -> Response:
        del request
        loader = self._templates.loader
        assert loader is not None
        return Response(
            loader.get_source(self._templates, _SCRIPT)[0], media_type="text/javascript"
        )

    def refuse(self, request: Request, error: Exception) -> Response:
        """No such page, or not so."""
        del request
        assert isinstance(error, HTTPException)
        return self._page("error.html.j2", {"title": error.detail, "lines": []}, error.status_code)

    def tell(self, request: Request, error: Exception) -> Response:
        """A record or a claim that cannot be used: what, why, and what to do."""
        del request
        lines = clean(error, lines=True).splitlines()
        return self._page("error.html.j2", {"title": lines[0], "lines": lines[1:]}, 422)

    def fail(self, request: Request, error: Exception) -> Response:
        """A bug of ours. The trace goes to the terminal, not to the page."""
        del request
        title = f"Unexpected {type(error).__name__}; the terminal has its trace"
        return self._page("error.html.j2", {"title": title, "lines": []}, 500)

    def _folder(self, request: Request) -> RunFolder:
        return self._find(request.path_params["run"])

    def _find(self, name: str) -> RunFolder:
        folder = find_run(self._store, name)
        if folder is None:
            raise HTTPException(404, "There is no such run.")
        return folder

    def _page(self, template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        text = self._templates.get_template(template).render({**values, "version": __version__})
        return HTMLResponse(text, status_code=status)


def _start(word: str) -> int:
    return min(int(word), _LAST_START) if word.isascii() and word.isdigit() and len(word) < 9 else 0


def _pair(pair: Pair) -> dict[str, str]:
    from narrowgauge.units import scale_of

    scale = scale_of(pair.left.median, pair.unit)
    interval = pair.ratio_interval
    return {
        "label": clean(pair.label),
        "metric": clean(pair.metric),
        "left": clean(scale.text(pair.left.median)),
        "right": clean(scale.text(pair.right.median)),
        "ratio": f"{pair.ratio:.4g}",
        "interval": f"{interval.low:.4g} to {interval.high:.4g}" if interval else pair.no_interval,
        "detectable": pair.detectable.text,
    }
