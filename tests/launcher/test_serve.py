"""The local page: who is answered, what is shown, and that nothing sent to it breaks it."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import report_cases as cases
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from result_cases import job, record_of, recorded
from serving import Served, served

from narrowgauge.errors import UsageError
from narrowgauge.serve.curves import curve_picture
from narrowgauge.serve.follow import Follower, Followers, LiveView
from narrowgauge.serve.runs import find_picture, find_run
from narrowgauge.serve.series import Series
from narrowgauge.serve.server import bind
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.events import EventKind, EventLog

FIRST, SECOND = "20261121T100000Z-toy-aaaaaa", "20261121T110000Z-toy-bbbbbb"
OPEN = "20261121T120000Z-toy-cccccc"


def begin(store: Store, name: str = OPEN) -> RunFolder:
    """A run that goes on: its first row is half done."""
    folder = store.new_run(job(name))
    with EventLog(folder.events_path) as log:
        log.emit(EventKind.ROW_START, 0, repeat=0, seed=0,
                 parameters={"precision": "fp32", "epochs": 3})  # fmt: skip
        for epoch in range(3):
            for metric, unit in (("loss", "nat"), ("energy_gross", "J")):
                log.emit(EventKind.METRIC, 0, name=metric, unit=unit, source="x",
                         values=[1.0 / (epoch + 1)], index="epoch", conditions={})  # fmt: skip
        log.emit(EventKind.LOG, 0, text="\x1b[31mred\x1b[0m <b>bold</b> \x1b[2J")
        log.emit(EventKind.PROGRESS, 0, done=3, total=6, unit="epochs", phase="train")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("results")
    drawn = recorded(root, FIRST)
    drawn.derived.mkdir()
    Image.new("RGB", (40, 30), "white").save(drawn.derived / "loss.png")
    recorded(root, SECOND, epochs=[4])
    begin(Store(root))
    return Store(root)


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[Served]:
    with served(store) as found:
        yield found


def test_the_list_shows_every_run_newest_first(server: Served) -> None:
    text = server.get("/").text

    assert [text.index(f'href="/runs/{name}"') for name in (OPEN, SECOND, FIRST)] == sorted(
        text.index(f'href="/runs/{name}"') for name in (OPEN, SECOND, FIRST)
    )


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("?status=open", [OPEN]),
        ("?experiment=toy&status=complete", [SECOND, FIRST]),
        ("?experiment=none", []),
        ("?from=1", [SECOND, FIRST]),
        ("?from=999999999999", [OPEN, SECOND, FIRST]),
        ("?from=-1&status=%00", []),
        ("?experiment=%27%20OR%201=1--", []),
    ],
)
def test_the_list_is_filtered(server: Served, query: str, shown: list[str]) -> None:
    answer = server.get(f"/{query}")

    assert answer.status == 200
    for name in (OPEN, SECOND, FIRST):
        assert (f'href="/runs/{name}"' in answer.text) == (name in shown)


def test_a_figure_and_its_range_have_one_unit(tmp_path: Path) -> None:
    """It read `10.7 ms (0.01023 to 0.01117)`."""
    store = Store(tmp_path)
    folder = store.new_run(job(OPEN))
    with EventLog(folder.events_path) as log:
        for repeat, latency in enumerate((0.010, 0.011, 0.012)):
            log.emit(EventKind.ROW_START, repeat, repeat=repeat, seed=repeat, parameters={})
            log.emit(EventKind.METRIC, repeat, name="latency", unit="s", source="x",
                     values=[latency], index="", conditions={})  # fmt: skip
            log.emit(EventKind.ROW_END, repeat, status="complete", seconds=1.0, error=None)
    with served(store) as server:
        text = server.get(f"/runs/{OPEN}").text

    assert "11 ms (10 to 12)" in text


def test_a_run_shows_figures_environment_and_pictures(server: Served) -> None:
    text = server.get(f"/runs/{FIRST}").text

    for words in ("precision=bf16", "2.13.0", "sha256:" + "d" * 64, "complete", "loss.png"):
        assert words in text
    picture = server.get(f"/runs/{FIRST}/pictures/loss.png", method="HEAD")
    assert (picture.status, picture.headers["content-type"]) == (200, "image/png")


def test_what_came_of_a_run_that_is_over_stands_before_its_curves(tmp_path: Path) -> None:
    folder = recorded(tmp_path, FIRST)
    with EventLog(folder.events_path) as log:
        log.emit(EventKind.METRIC, 0, name="loss", unit="nat", source="x", values=[2.0, 1.0],
                 index="epoch", conditions={})  # fmt: skip
    with served(Store(tmp_path)) as server:
        text = server.get(f"/runs/{FIRST}").text
    begin(Store(tmp_path))
    with served(Store(tmp_path)) as server:
        live = server.get(f"/runs/{OPEN}").text

    assert 0 < text.index("Figures</h2>") < text.index("Curves</h2>")
    assert 0 < live.index("<progress") < live.index("Curves</h2>")
    assert "Figures</h2>" not in live, "it has none yet"


def test_a_run_that_goes_on_shows_how_far_it_is(server: Served) -> None:
    page = server.get(f"/runs/{OPEN}").text
    live = server.get(f"/runs/{OPEN}/live")

    assert f'data-live="/runs/{OPEN}/live"' in page
    assert live.headers["x-narrowgauge-open"] == "yes"
    for words in ("8 %", "0 of 6 rows", "train 3/6 epochs", "energy_gross", "<svg", "loss (nat)"):
        assert words in live.text, words
    assert "red &lt;b&gt;bold&lt;/b&gt; \ufffd[2J" in live.text, "a log is text"


def test_a_recorded_run_is_not_asked_for_again(server: Served) -> None:
    assert "data-live" not in server.get(f"/runs/{FIRST}").text


def test_two_runs_are_compared(server: Served) -> None:
    text = server.get(f"/compare?left={FIRST}&right={SECOND}").text

    for words in ("Not pooled", "parameter epochs: 3 / 4", "images_per_second", "precision=fp32"):
        assert words in text
    assert "Not pooled" not in server.get(f"/compare?left={FIRST}&right={FIRST}").text


def test_runs_that_cannot_be_compared_say_why(server: Served) -> None:
    unfinished = server.get(f"/compare?left={FIRST}&right={OPEN}")

    assert unfinished.status == 422
    assert "has no record yet" in unfinished.text
    assert server.get(f"/compare?left={FIRST}&right=nix").status == 404
    assert server.get("/compare").status == 200


def test_the_report_has_its_own_policy(server: Served) -> None:
    answer = server.get("/report")

    assert "Verdicts on" in answer.text
    assert "sha256-" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", f"/runs/{FIRST}", "/report", "/nix", "/assets/live.js"])
def test_every_answer_carries_the_headers(server: Served, path: str) -> None:
    headers = server.get(path).headers

    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers


# Who is answered.


def test_it_listens_on_loopback_alone() -> None:
    with bind(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UsageError, match="cannot listen"):
            bind(listening.getsockname()[1])


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", "", "[::1]"]
)
def test_another_host_is_refused(server: Served, host: str) -> None:
    assert server.get("/", headers={"Host": host}).status in (400, 403)


def test_localhost_is_this_host(server: Served) -> None:
    assert server.get("/", headers={"Host": f"LocalHost:{server.port}"}).status == 200


def test_two_hosts_are_refused(server: Served) -> None:
    host = f"127.0.0.1:{server.port}".encode()
    found = server.send(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nHost: evil\r\n\r\n")

    assert found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NIX"])
def test_nothing_but_reading_is_answered(server: Served, method: str) -> None:
    answer = server.get("/", method=method)

    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_of_another_site_is_refused(server: Served, site: str) -> None:
    assert server.get("/", headers={"Sec-Fetch-Site": site}).status == 403
    assert server.get("/", headers={"Sec-Fetch-Site": "same-origin"}).status == 200


def test_a_web_socket_is_refused(server: Served) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip

    assert server.get(f"/runs/{OPEN}/live", headers=upgrade).status in (200, 400, 403)
    assert "101" not in str(server.get("/", headers=upgrade).status)


# Paths.


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/runs/..%2f..%2f..%2fetc%2fpasswd", "/runs/%2e%2e", "/runs/.",
        "/runs/%00", f"/runs/{FIRST}%00", f"/runs/{FIRST}/pictures/..%2f..%2frecord.json",
        f"/runs/{FIRST}/pictures/record.json", f"/runs/{FIRST}/pictures/%2e%2e",
        f"/runs/{FIRST}/../{SECOND}", "/runs/toy%2f" + FIRST, "/assets/../guard.py",
        "//evil.example", "/runs/" + "a" * 1000,
    ],
)  # fmt: skip
def test_no_path_leads_out(server: Served, path: str) -> None:
    answer = server.get(path)

    assert answer.status in (400, 404)
    assert "root:" not in answer.text


def test_an_endless_address_is_refused(server: Served) -> None:
    assert server.get("/?experiment=" + "a" * 5000).status == 414


def test_a_picture_that_is_a_link_out_is_none(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "results")
    folder.derived.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder.derived / "out.png").symlink_to(tmp_path / "secret.png")
    (folder.derived / "in.png").write_bytes(b"picture")

    assert find_picture(folder, "out.png") is None
    assert find_picture(folder, "in.png") is not None
    assert find_run(Store(tmp_path / "results"), f"../results/toy/{folder.name}") is None


# Records that anybody wrote.


def test_hostile_records_are_shown_as_text(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number, text in enumerate(cases.HOSTILE):
        folder = store.new_run(job(f"20261121T1000{number:02}Z-toy-{number:06x}"))
        record = cases.hostile_record(record_of(folder), text)
        (folder.path / "record.json").write_text(dumps(record))
    with served(store) as server:
        pages = [server.get(f"/runs/{each.name}") for each in store.all()]
        pages += [server.get("/")]

    assert [page.status for page in pages] == [200] * len(pages)
    for page in pages:
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text
        assert not set(page.text) & set("\x1b\x07\u202e\u2028\x00")


def test_damaged_runs_have_a_page_that_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = recorded(tmp_path)
    folder.record_path.chmod(0o644)
    folder.record_path.write_text('{"format": 99}')
    broken = store.new_run(job(SECOND))
    broken.job_path.write_text("{")
    with served(store) as server:
        answers = [server.get(f"/runs/{name}") for name in (folder.name, SECOND)]
        listed = server.get("/").text
        live = server.get(f"/runs/{SECOND}/live").status

    assert [answer.status for answer in answers] == [200, 200]
    assert "record format 99" in answers[0].text
    assert listed.count("damaged</span>") == 2
    assert live == 404


def test_a_results_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    with served(Store(tmp_path / "none")) as server:
        assert "No run here" in server.get("/").text


def test_a_bug_of_ours_is_a_page_and_the_server_goes_on(store: Store) -> None:
    def broken() -> tuple[str, str]:
        raise ZeroDivisionError("<script>")

    with served(store, broken) as server:
        answer = server.get("/report")

        assert answer.status == 500
        assert "ZeroDivisionError" in answer.text
        assert "<script>" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert server.get("/").status == 200


# Malformed requests.

_PARTS = st.sampled_from(
    [b"GET", b"/", b" ", b"\r\n", b"\n", b"HTTP/1.1", b"HTTP/9.9", b"Host:", b"127.0.0.1", b"\x00",
     b"\xff\xfe", b"Content-Length: -1", b"Content-Length: 99999999999",
     b"Transfer-Encoding: chunked", b"0\r\n\r\n", b"%", b"%zz", b"?", b"#", b"..", b"\r\n\r\n",
     b"A" * 3000, b"PRI * HTTP/2.0"]
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_PARTS | st.binary(max_size=20), max_size=12).map(b"".join))
def test_malformed_requests_are_survived(server: Served, payload: bytes) -> None:
    found = server.send(payload)

    assert found == b"" or found.startswith(b"HTTP/1.1 ")
    assert not found.startswith(b"HTTP/1.1 5")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30), st.text(max_size=30))
@example(name="0/", value="")
def test_any_name_and_query_is_answered(server: Served, name: str, value: str) -> None:
    paths = [
        f"/runs/{quote(name, safe='', errors='replace')}",
        f"/?experiment={quote(value, errors='replace')}&status={quote(name, errors='replace')}",
        f"/compare?left={quote(name, errors='replace')}&right={quote(value, errors='replace')}",
    ]

    assert {server.get(path).status for path in paths} <= {200, 404}


def test_it_still_answers_after_all_of_that(server: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(20)]
    try:
        assert server.get("/").status == 200
    finally:
        for each in idle:
            each.close()


# Following.


def test_a_follower_reads_on_where_it_was(tmp_path: Path) -> None:
    folder = begin(Store(tmp_path))
    follower = Follower(folder)
    first = follower.view()
    with EventLog(folder.events_path) as log:
        log.emit(EventKind.METRIC, 0, name="energy_gross", unit="J", source="x", values=[42.0],
                 index="epoch", conditions={})  # fmt: skip
        log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0)
    second = follower.view()

    assert (first.rows_done, second.rows_done) == (0, 1)
    assert dict(first.energy) != dict(second.energy) == {"energy_gross": "42 J"}
    assert first.log == second.log


def test_a_half_written_line_is_waited_for(tmp_path: Path) -> None:
    folder = begin(Store(tmp_path))
    follower = Follower(folder)
    follower.view()
    line = json.dumps({"kind": "log", "t": 1.0, "utc": 1.0, "row": 0, "data": {"text": "whole"}})
    with open(folder.events_path, "a", encoding="utf-8") as stream:
        stream.write(line[:20])
        stream.flush()
        assert follower.view().damaged == 0
        stream.write(line[20:] + "\n")
    view = follower.view()

    assert view.log.endswith("whole")
    assert view.damaged == 0


@pytest.mark.parametrize(
    "data",
    [
        {"name": "a"},
        {"name": 3, "unit": None, "values": "abc"},
        {"name": "a", "values": [{}]},
        {"name": "b", "unit": "J", "values": ["NaN", "Infinity", 1]},
        {"done": "x", "total": 0},
    ],
)
@pytest.mark.parametrize("kind", ["metric", "progress", "log", "row-end"])
def test_odd_events_do_not_hide_the_rest(tmp_path: Path, kind: str, data: object) -> None:
    folder = begin(Store(tmp_path))
    with open(folder.events_path, "a", encoding="utf-8") as stream:
        stream.write(
            json.dumps({"kind": kind, "t": 1.0, "utc": 1.0, "row": 0, "data": data}) + "\n"
        )
    view = Follower(folder).view()

    assert view.rows_total == 6
    assert any(name == "loss (nat)" for name, _ in view.curves)


@pytest.mark.parametrize("headline", [5, None, [3], "loss", {"a": 1}])
def test_a_run_whose_declaration_is_damaged_is_followed(tmp_path: Path, headline: object) -> None:
    folder = begin(Store(tmp_path))
    document = json.loads(folder.job_path.read_text(encoding="utf-8"))
    document["spec"]["experiment"]["headline"] = headline
    folder.job_path.write_text(json.dumps(document), encoding="utf-8")

    with served(Store(tmp_path)) as server:
        page = server.get(f"/runs/{OPEN}")

    assert page.status == 200
    assert "loss (nat)" in page.text


def test_the_log_of_a_native_run_is_its_end(tmp_path: Path) -> None:
    folder = begin(Store(tmp_path))
    (folder.path / "lab.log").write_bytes(b"early\n" * 9000 + b"\xff late\n")
    log = Follower(folder).view().log

    assert log.endswith("\ufffd late")
    assert len(log) < 4000


def test_many_readers_follow_one_run(tmp_path: Path) -> None:
    folder, followers = begin(Store(tmp_path)), Followers()
    seen: list[object] = []
    threads = [
        threading.Thread(target=lambda: seen.append(followers.view(folder))) for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(seen) == 8
    assert len({str(each) for each in seen if each}) >= 1
    assert all(each is not None for each in seen)


def test_a_follower_is_let_go_when_others_are_watched(tmp_path: Path) -> None:
    followers = Followers()
    for number in range(12):
        folder = begin(Store(tmp_path), f"20261121T1200{number:02}Z-toy-{number:06x}")
        assert followers.view(folder) is not None

    assert len(followers._known) == 8


def by_row(values: dict[int, list[float]]) -> dict[int, Series]:
    return {row: Series(each) for row, each in values.items()}


@pytest.mark.parametrize(
    ("series", "strokes"),
    [
        ({0: [1.0]}, 2),
        ({0: [1.0, 2.0], 1: [2.0, 3.0]}, 3),
        ({0: [math.nan, 1.0, math.inf]}, 2),
        ({0: [float(n) for n in range(5000)]}, 2),
        ({0: [math.nan], 1: [1.0]}, 2),
    ],
)
def test_curves_are_drawn(series: dict[int, list[float]], strokes: int) -> None:
    picture = curve_picture("loss", "nat", by_row(series))

    assert picture.count("<path") == strokes
    assert " nat; the newest value is " in picture
    assert len(picture) < 20_000
    assert curve_picture("loss", "nat", by_row({0: [math.nan]})) == ""


def test_rows_of_one_value_stand_beside_each_other() -> None:
    picture = curve_picture("error", "1", by_row({row: [1.0 + row] for row in (4, 5, 6)}))

    starts = [float(x) for x in re.findall(r'd="M (\S+)', picture)]
    assert len({round(x) for x in starts[:3]}) == 3
    assert re.findall(r">(row \d)<", picture) == ["row 4", "row 6"]
    assert "of 3 rows, between 5 and 7; the newest" in picture
    several = by_row({0: [1.0, 2.0], 1: [2.0]})
    assert "row" not in curve_picture("loss", "nat", several).partition(">")[2]


def test_a_log_that_is_no_file_of_the_run_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    folder = begin(Store(tmp_path / "results"))
    log = folder.path / "lab.log"
    log.symlink_to(secret)
    assert "not yours" not in Follower(folder).view().log
    log.unlink()
    os.mkfifo(log)  # opening it for reading would wait for a writer
    assert "bold" in Follower(folder).view().log


def test_a_run_that_is_a_link_out_of_the_results_has_no_page(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    inside = recorded(store.root, FIRST)
    elsewhere = recorded(tmp_path / "private", SECOND)
    (store.root / "toy" / SECOND).symlink_to(elsewhere.path)

    assert find_run(store, SECOND) is None
    found = find_run(store, FIRST)
    assert found is not None
    assert found.path == inside.path


def test_a_slow_reader_of_one_run_does_not_hold_up_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "results")
    slow, quick = begin(store), begin(store, OPEN.replace("cccccc", "dddddd"))
    entered, release = threading.Event(), threading.Event()
    view = Follower._view

    def waiting(follower: Follower) -> LiveView:
        if follower._folder == slow:
            entered.set()
            assert release.wait(20)
        return view(follower)

    monkeypatch.setattr(Follower, "_view", waiting)
    followers = Followers()
    thread = threading.Thread(target=followers.view, args=(slow,))
    thread.start()
    try:
        assert entered.wait(20)
        assert followers.view(quick) is not None
    finally:
        release.set()
        thread.join(20)
