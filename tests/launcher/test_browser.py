"""The report and the local page in a real browser: headless Chromium."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report_cases as cases
from playwright.sync_api import Browser, Page, sync_playwright
from result_cases import record_of, recorded
from serving import Served, served
from test_serve import FIRST, OPEN, SECOND, begin

from narrowgauge.report.cards import card_of
from narrowgauge.report.content import build
from narrowgauge.report.html import html_report
from narrowgauge.store import Store
from narrowgauge_contract.events import EventKind, EventLog

pytestmark = pytest.mark.browser
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
#: A column's cells of the rows that are shown.
COLUMN = """n => [...document.querySelectorAll('#verdicts tbody tr:not([hidden])')]
  .map(row => row.cells[n].innerText.trim())"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium here: apt-get install chromium, or leave it out by --no-browser"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path)
        yield found
        found.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens a page; fails where any page wrote to its console, or asked another host."""
    said: list[str] = []
    pages: list[Page] = []

    def opened(url: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Page:
        # "light" and "dark" are all that is asked for; the library's type is a closed list.
        page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        pages.append(page)
        page.goto(url)
        return page

    asked: list[str] = []
    yield opened
    for page in pages:
        page.close()
    assert said == []
    assert [u for u in asked if not u.startswith(("file:", "data:", "http://127.0.0.1:"))] == []


@pytest.fixture(scope="module")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_report(cases.report()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("results")
    recorded(root, FIRST)
    recorded(root, SECOND, epochs=[4])
    with served(Store(root)) as found:
        yield found


def test_the_table_sorts_by_each_column_both_ways(report_url: str, visit: Open) -> None:
    page = visit(report_url)
    for column in (0, 1, 6):
        button = page.locator("#verdicts thead button").nth(column)
        button.click()
        first = page.evaluate(COLUMN, column)
        head = page.locator("#verdicts thead th").nth(column)
        way = head.get_attribute("aria-sort")
        button.click()
        second = page.evaluate(COLUMN, column)

        assert {way, head.get_attribute("aria-sort")} == {"ascending", "descending"}
        assert sorted(first) == sorted(second)
        assert first != second
        assert (
            page.locator("#verdicts th[aria-sort=ascending], th[aria-sort=descending]").count() == 1
        )
    ordered = page.evaluate(COLUMN, 6)
    numbers = [int(each) for each in ordered if each]
    assert numbers == sorted(numbers, reverse=True)


def test_the_table_sorts_by_keyboard(report_url: str, visit: Open) -> None:
    page = visit(report_url)
    page.locator("#verdicts thead button").nth(1).focus()
    page.keyboard.press("Enter")

    assert page.evaluate(COLUMN, 1) == sorted(page.evaluate(COLUMN, 1))


def test_the_table_filters_and_says_how_many_are_left(report_url: str, visit: Open) -> None:
    page = visit(report_url)
    page.select_option("#only", "REPRODUCED")
    assert set(page.evaluate(COLUMN, 0)) == {"REPRODUCED"}
    assert page.locator("#shown").inner_text() == "2 of 8 claims shown"
    page.select_option("#only", "measured")
    assert len(page.evaluate(COLUMN, 0)) == 6
    page.fill("#words", "toy-ORDER")
    assert page.evaluate(COLUMN, 1) == ["toy-order"]


def test_every_link_leads_to_what_it_names(report_url: str, visit: Open) -> None:
    page = visit(report_url)
    hrefs = page.evaluate("[...document.links].map(a => a.getAttribute('href'))")

    assert len(hrefs) > 20
    assert page.evaluate("hs => hs.filter(h => !document.querySelector(h))", hrefs) == []
    page.click("#verdicts tbody a >> nth=0")
    assert page.evaluate("document.querySelector(':target').className") == "claim"


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_fits_and_can_be_read(
    report_url: str, visit: Open, viewport: dict[str, int], scheme: str
) -> None:
    page = visit(report_url, viewport, scheme)

    assert page.evaluate(OVERFLOW) == 0
    assert page.evaluate(CONTRAST) == []
    assert page.locator("svg.picture").first.bounding_box()["width"] > 250  # type: ignore[index]
    fill = page.evaluate("getComputedStyle(document.querySelector('.fill-here')).fill")
    assert fill == {"light": "rgb(0, 96, 160)", "dark": "rgb(108, 182, 255)"}[scheme]


#: Texts whose contrast with the ground is below 4.5 (WCAG 2.1, 1.4.3).
CONTRAST = """() => {
  const parse = s => s.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = c => { const [r, g, b] = c.map(v => v / 255).map(
    v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(parse(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('h1, p, td, th, a, dt, dd, .verdict, .quiet')].filter(e => {
    const ink = light(parse(getComputedStyle(e).color));
    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) < 4.5;
  }).map(e => e.outerHTML.slice(0, 80));
}"""


def test_a_screen_reader_finds_its_way(report_url: str, visit: Open) -> None:
    page = visit(report_url)
    tree = page.locator("body").aria_snapshot()

    for words in (
        'heading "Verdicts on 8 claims" [level=1]', 'columnheader "verdict"',
        'rowheader "toy-reproduced"', 'img "The paper: 1.5 ± 10 %. Here: 1.505', "searchbox",
        'region "REPRODUCED toy/toy-reproduced"', "status",
    ):  # fmt: skip
        assert words in tree, words
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_it_prints_light_and_whole(report_url: str, visit: Open) -> None:
    page = visit(report_url, scheme="dark")
    page.emulate_media(media="print")

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.fill-ink')).fill") == (
        "rgb(27, 31, 36)"
    )
    assert page.locator("#filters").is_hidden()
    assert len(page.pdf()) > 10_000


def test_it_is_whole_without_script(browser: Browser, report_url: str) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(report_url)

    assert page.locator("#verdicts tbody tr").count() == 8
    assert page.locator("#filters").is_hidden()
    page.close()


def test_hostile_texts_do_nothing(tmp_path: Path, visit: Open) -> None:
    record = recorded(tmp_path).record()
    cards = [(each, card_of(cases.hostile_record(record, each))) for each in cases.HOSTILE]
    path = tmp_path / "hostile.html"
    path.write_text(html_report(build(cases.hostile_judged(), cards)), encoding="utf-8")
    page = visit(path.as_uri(), PHONE)

    assert page.locator("script").count() == 1
    assert page.evaluate(OVERFLOW) == 0
    assert page.locator("#verdicts tbody tr").count() == len(cases.HOSTILE)


# The local page.


def test_the_local_pages_lead_to_each_other(server: Served, visit: Open) -> None:
    page = visit(server.url)
    page.click(f"text={FIRST}")
    page.wait_for_url(f"**/runs/{FIRST}")
    assert page.locator("h1").inner_text() == FIRST
    page.click("text=Report")
    assert "Verdicts on 8 claims" in page.locator("h1").inner_text()
    page.locator("#verdicts thead button").nth(1).click()
    assert page.evaluate(COLUMN, 1) == sorted(page.evaluate(COLUMN, 1))


def test_two_runs_are_chosen_and_compared(server: Served, visit: Open) -> None:
    page = visit(server.url)
    page.check(f"input[name=left][value='{FIRST}']")
    page.check(f"input[name=right][value='{SECOND}']")
    page.click("text=Compare the two chosen")

    assert page.locator("text=parameter epochs: 3 / 4").count() == 1
    assert page.locator("tbody tr").count() >= 4


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_local_pages_fit(server: Served, visit: Open, viewport: dict[str, int]) -> None:
    paths = ("/", f"/runs/{FIRST}", f"/compare?left={FIRST}&right={SECOND}")
    for path in paths:
        page = visit(server.url + path, viewport, "dark")
        assert page.evaluate(OVERFLOW) == 0, path
        assert page.evaluate(CONTRAST) == [], path


def test_a_run_is_followed_until_it_is_recorded(tmp_path: Path, visit: Open) -> None:
    store = Store(tmp_path)
    folder = begin(store)
    with served(store) as server:
        page = visit(f"{server.url}/runs/{OPEN}")
        assert "train 3/6 epochs" in page.locator("#live").inner_text()
        with EventLog(folder.events_path) as log:
            log.emit(EventKind.LOG, 0, text="<img src=x onerror=alert(1)>")
            log.emit(EventKind.PROGRESS, 0, done=5, total=6, unit="epochs", phase="train")
        page.wait_for_selector("text=train 5/6 epochs", timeout=8000)
        assert page.locator("#live pre").inner_text().endswith("<img src=x onerror=alert(1)>")
        assert page.locator("#live img").count() == 0
        record = dataclasses.replace(record_of(folder), run_id=OPEN)
        folder.write_record(record)
        page.wait_for_selector(".verdict.complete", timeout=8000)
        assert page.locator("[data-live]").count() == 0


def test_another_site_cannot_read_the_results(server: Served, browser: Browser) -> None:
    """A page of another origin in the same browser: neither fetched nor framed."""
    page: Any = browser.new_page()
    page.goto("data:text/html,<title>other</title>")
    fetched = page.evaluate(
        "u => fetch(u).then(a => a.text()).then(() => 'read', () => 'refused')", server.url
    )
    framed = page.evaluate(
        """u => new Promise(done => { const f = document.createElement('iframe'); f.src = u;
        f.onload = () => { try { done(f.contentDocument ? 'read' : 'opaque'); }
        catch { done('opaque'); } }; document.body.append(f); })""",
        server.url,
    )
    page.close()

    assert (fetched, framed) == ("refused", "opaque")
