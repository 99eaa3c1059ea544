"""The report: what it shows, that it is one file, the same each time, and inert."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import math
import time
from html.parser import HTMLParser
from pathlib import Path

import judge_cases
import pytest
import report_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from result_cases import recorded

from narrowgauge.errors import UsageError
from narrowgauge.judge.judging import judge
from narrowgauge.judge.model import Estimate, Judged
from narrowgauge.report.assembled import assemble, assemble_page
from narrowgauge.report.cards import card_of, find_cards
from narrowgauge.report.content import ORDER, Report, build
from narrowgauge.report.html import content_policy_of, html_report
from narrowgauge.report.latex import latex_report
from narrowgauge.report.markdown import (
    BEGIN,
    END,
    fill_block,
    markdown_block,
    markdown_report,
    update_block,
)
from narrowgauge.report.picture import _bounds, claim_picture
from narrowgauge.report.tabular import COLUMNS, csv_report, json_report
from narrowgauge.report.words import (
    estimate_words,
    expectation_words,
    interval_words,
    paper_words,
    told_apart,
    when,
)
from narrowgauge.store import Store
from narrowgauge_contract.claims import ClaimKind, Expectation, MetricOperator, Verdict
from narrowgauge_contract.codec import decode, dumps
from narrowgauge_contract.outcome import Metric


class _Page(HTMLParser):
    """What a page holds: ids, links, elements with their attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found.get("href")))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.elements if name == tag)


@pytest.fixture(scope="module")
def report() -> Report:
    return cases.report()


@pytest.fixture(scope="module")
def page(report: Report) -> _Page:
    return _Page(html_report(report))


def test_every_claim_has_a_row_and_a_section(report: Report, page: _Page) -> None:
    rows = [a for tag, a in page.elements if tag == "tr" and "data-verdict" in a]
    sections = [a for tag, a in page.elements if tag == "section" and a.get("class") == "claim"]

    assert len(rows) == len(sections) == len(report.claims) == len(Verdict) + 1
    ranks = [[v.value for v in ORDER].index(str(a["data-verdict"])) for a in rows]
    assert ranks == sorted(ranks), "what was found comes first"


def test_every_link_leads_to_a_place_of_the_page_and_no_id_is_taken_twice(page: _Page) -> None:
    assert len(set(page.ids)) == len(page.ids)
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_the_page_asks_for_nothing(page: _Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        for name in ("src", "href", "action", "srcset", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), f"{tag} {name}={value}"
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
    assert page.count("script") == page.count("style") == 1


def test_the_policy_names_the_style_sheet_and_the_script_by_hash(report: Report) -> None:
    text = html_report(report)
    policy = content_policy_of()

    assert policy.replace("'", "&#39;") in text
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2


def test_a_reader_by_keyboard_or_ear_is_served(page: _Page) -> None:
    heads = [a for tag, a in page.elements if tag == "th" and a.get("aria-sort")]
    pictures = [a for tag, a in page.elements if tag == "svg"]

    assert page.elements[0] == ("html", {"lang": "en"})
    assert [a["aria-sort"] for a in heads] == ["ascending"] + ["none"] * 7
    assert page.count("button") == len(heads)
    assert pictures
    assert all(
        a["role"] == "img" and str(a["aria-label"]).startswith("The paper") for a in pictures
    )
    assert any(a.get("class") == "skip" for tag, a in page.elements if tag == "a")
    assert page.count("h1") == 1


def test_a_section_says_what_was_claimed_found_and_would_change_it(report: Report) -> None:
    text = html_report(report)
    section = text[text.index('id="claim-toy-toy-reproduced"') :].partition("</section>")[0]

    for words in (
        "bf16 is 1.5 times as fast as fp32.", "Table 2", "1.5 ± 10 %", "1.505", "1.48 to 1.53",
        "A ratio below 1.35", "narrowgauge reproduce toy/toy-reproduced", "NVIDIA H200",
        "an effect of 1.2 % would have been found", "row 3: the row throttled",
        "1\N{NO-BREAK SPACE}505 image/s", "6 processes", "<svg", "#run-20261121t100000z-toy-aaaaaa",
    ):  # fmt: skip
        assert words in section, words


def test_no_line_ends_within_a_number(report: Report) -> None:
    first = dataclasses.replace(
        report.claims[0], paper="3 000 000 of 24 images, 12 1234", here="1 505 image/s"
    )
    text = html_report(dataclasses.replace(report, claims=(first, *report.claims[1:])))

    assert ">3\N{NO-BREAK SPACE}000\N{NO-BREAK SPACE}000 of 24 images, 12 1234</td>" in text
    assert ">1\N{NO-BREAK SPACE}505 image/s</td>" in text


def test_a_replay_says_that_it_is_no_reproduction() -> None:
    replay = cases.report(cases.judged(replay=True))
    words = "It is no reproduction"

    assert words in html_report(replay)
    assert words in markdown_block(replay)
    assert words in latex_report(replay)
    assert ",true," in csv_report(replay)
    assert words not in html_report(cases.report())


def test_refused_records_and_missing_ones_are_named(report: Report) -> None:
    for text in (html_report(report), markdown_report(report)):
        assert "results/toy/broken/record.json" in text
        assert "truncated" in text
        assert "20261121T110000Z-toy-cccccc" in text


@pytest.mark.parametrize("write", [html_report, markdown_report, latex_report, csv_report])
def test_the_same_judgements_give_the_same_bytes(write: object) -> None:
    assert callable(write)
    assert write(cases.report()) == write(cases.report())


def test_an_empty_report_is_one(tmp_path: Path) -> None:
    nothing = build(Judged(1, cases.judged().occasion, ()), ())

    for write in (html_report, markdown_report, latex_report, csv_report):
        assert write(nothing)
    assert "Verdicts on 0 claims" in html_report(nothing)


# Pictures.


def test_a_claim_without_a_figure_has_no_picture(report: Report) -> None:
    for each in report.claims:
        assert bool(claim_picture(each)) == each.measured


def test_a_picture_holds_both_figures_and_every_repeat(report: Report) -> None:
    picture = claim_picture(report.claims[0])

    assert picture.count('class="fill-paper"') == 2, "the tolerance and the figure"
    assert picture.count('class="fill-here"') == 1
    assert picture.count('class="stroke-here"') == 3, "the interval and its ends"
    strokes = picture.count('class="stroke-quiet"')
    assert strokes - len(cases.judgement(Verdict.REPRODUCED).estimate.per_repeat) >= 3  # type: ignore[union-attr]
    assert " id=" not in picture
    assert "style=" not in picture


@pytest.mark.parametrize(
    "expectation",
    [
        Expectation(minimum=8.0),
        Expectation(maximum=0.01),
        Expectation(),
        Expectation(figure=-3.0, tolerance=0.1),
        Expectation(figure=0.0, tolerance=0.1),
    ],
)
@pytest.mark.parametrize("figure", [0.0, -5.0, 1e-9, 3.4e14])
def test_any_expectation_and_figure_can_be_drawn(expectation: Expectation, figure: float) -> None:
    estimate = Estimate("a", figure, "MAC/s", None, None, 2, (figure, math.nan, math.inf))
    found = cases.judgement(Verdict.NOT_REPRODUCED, estimate=estimate, expectation=expectation)
    picture = claim_picture(cases.report(cases.judged([found])).claims[0])

    assert picture.startswith("<svg")
    assert "nan" not in picture.partition(">")[2]


def test_the_band_of_an_equivalence_is_what_judging_allows() -> None:
    """As many times less as more: 1 / 1.5 to 1.5, not 0.5 to 1.5."""
    same = {"kind": ClaimKind.EQUIVALENCE, "operator": MetricOperator.RATIO}
    expectation = Expectation(tolerance=0.5)
    claim = cases.claim(expected={"any": expectation}, **same)
    drawn = _bounds(expectation, claim)

    assert drawn == (pytest.approx(1 / 1.5), 1.0, 1.5)


def test_the_interval_of_an_equivalence_is_called_by_its_coverage() -> None:
    found = cases.judgement(Verdict.REPRODUCED)
    assert found.estimate is not None
    narrow = dataclasses.replace(found.estimate, coverage=0.9)
    report = cases.report(cases.judged([dataclasses.replace(found, estimate=narrow), found]))
    equal, other = report.claims

    assert equal.spread == "1.48 to 1.53 (90 % interval)"
    assert other.spread == "1.48 to 1.53"
    for text in (html_report(report), markdown_report(report), claim_picture(equal)):
        assert "90 % interval" in text
    assert r"90 \% interval 1.48" in latex_report(report)
    assert "90 % interval" not in claim_picture(other)


def test_an_order_is_told_from_the_smallest_to_the_largest() -> None:
    one = judge_cases.claim(
        kind="ordering",
        metric={"operator": "order", "of": ["time{engine=own}", "time{engine=eager}"]},
        expected={"any": {}},
    )
    found = judge(one, judge_cases.race(), [judge_cases.both()])
    report = cases.report(cases.judged([found]))

    assert report.claims[0].here == "own < eager"
    assert "found, smallest first" in html_report(report)
    assert "time{engine=own} &lt; time{engine=eager}" in html_report(report)


def test_a_figure_that_is_no_number_is_not_drawn() -> None:
    estimate = Estimate("a", math.nan, "s", None, None, 2)
    found = cases.judgement(Verdict.INVALID, estimate=estimate)

    assert claim_picture(cases.report(cases.judged([found])).claims[0]) == ""


# Words.


def test_figures_read_as_people_write_them() -> None:
    assert estimate_words(Estimate("a", 380e12, "MAC/s", None, None, 1)) == "380 TMAC/s"
    assert estimate_words(Estimate("a", 0.0123, "s", 0.01, 0.02, 6)) == "12.3 ms"
    assert interval_words(Estimate("a", 0.0123, "s", 0.01, 0.02, 6)) == "10 to 20"
    assert interval_words(Estimate("a", 0.0123, "s", None, None, 2)) == ""
    assert estimate_words(None) == ""


@pytest.mark.parametrize(
    ("kind", "expectation", "words"),
    [
        (ClaimKind.VALUE, Expectation(figure=9.7, tolerance=0.1), "9.7 s ± 10 %"),
        (ClaimKind.BOUND, Expectation(minimum=8), "at least 8 s"),
        (ClaimKind.BOUND, Expectation(minimum=1, maximum=2), "at least 1 s at most 2 s"),
        (ClaimKind.EQUIVALENCE, Expectation(tolerance=0.03), "equal within 3 %"),
        (ClaimKind.TREND, Expectation(), "its direction"),
    ],
)
def test_expectations_in_words(kind: ClaimKind, expectation: Expectation, words: str) -> None:
    assert expectation_words(expectation, cases.claim(kind=kind), "s") == words


def test_expectations_that_differ_by_target_are_all_told() -> None:
    both = {"jetson": Expectation(figure=2.0, tolerance=0.1), "any": Expectation(minimum=1.0)}
    found = cases.judgement(Verdict.SKIPPED, claim=cases.claim(expected=both))

    assert paper_words(found) == "jetson: 2 ± 10 %; any: at least 1"


@pytest.mark.parametrize(
    ("labels", "short"),
    [
        (["a{p=fp16, b=1}", "a{p=int8, b=1}"], ("fp16", "int8")),
        (["a{p=fp16, b=1}", "a{p=int8, b=2}"], ("p=fp16, b=1", "p=int8, b=2")),
        (["before{p=x}", "after{p=x}"], ("before", "after")),
        (["a{p=x}", "a"], ("a{p=x}", "a")),
        (["a", "a"], ("a", "a")),
        ([], ()),
        # A value in quotes has commas of its own.
        (["a{r='0.5,0.6', b=1}", "a{r='0.7,0.9', b=1}"], ("'0.5,0.6'", "'0.7,0.9'")),
    ],
)
def test_labels_are_told_apart_by_what_differs(labels: list[str], short: tuple[str, ...]) -> None:
    assert told_apart(labels) == short


@pytest.mark.parametrize("moment", [None, math.nan, math.inf, 1e300, -1e300])
def test_a_moment_beyond_all_years_is_unknown(moment: float | None) -> None:
    assert when(moment) == ""


# Markdown's block.


def test_the_block_changes_with_the_verdicts_alone() -> None:
    later = cases.judged(made_utc=2e9, version="9", git=None)

    assert markdown_block(cases.report(later)) == markdown_block(cases.report())
    other = cases.judged([cases.judgement(Verdict.NOT_REPRODUCED)])
    assert markdown_block(cases.report(other)) != markdown_block(cases.report())


def test_a_page_is_filled_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "ARTIFACT.md"
    page.write_text(f"# Artifact\n\n{BEGIN}\nstale\n{END}\n\nrest \\1\n")
    block = markdown_block(cases.report())

    with pytest.raises(UsageError, match="not those of the records"):
        update_block(page, block, check=True)
    assert update_block(page, block, check=False)
    assert not update_block(page, block, check=True)
    text = page.read_text()
    assert text.startswith("# Artifact")
    assert text.endswith("rest \\1\n")
    assert "stale" not in text
    assert "| REPRODUCED | toy/toy-reproduced |" in text


@pytest.mark.parametrize("text", ["nothing", f"{BEGIN}\n{END}\n{BEGIN}\n{END}", f"{END}\n{BEGIN}"])
def test_a_page_without_one_place_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="one place"):
        fill_block(text, "x\n", "page")


def test_a_page_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        update_block(tmp_path / "none.md", "x\n", check=True)


# Tables.


def test_csv_has_a_line_per_claim_and_its_numbers_read_back(report: Report) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_report(report))))

    assert len(lines) == len(report.claims)
    assert tuple(lines[0]) == COLUMNS
    assert float(lines[0]["figure"]) == 1.505
    assert float(lines[0]["paper_tolerance"]) == 0.1
    skipped = next(line for line in lines if line["verdict"] == "SKIPPED")
    assert skipped["figure"] == skipped["device"] == ""


def test_json_holds_the_judgements_whole() -> None:
    found = cases.judged()
    body = json.loads(json_report(cases.report(found), found))

    assert decode(Judged, body["judged"]) == found
    assert body["counts"]["REPRODUCED"] == 2
    assert body["runs"][0]["device"] == "NVIDIA H200"
    assert body["missing_runs"][0]["why"] == "its record is not here"


def test_the_appendix_has_the_parts_that_chairs_ask_for(report: Report) -> None:
    text = latex_report(report)

    for part in (
        "Abstract", "Artifact check-list (meta-information)", "Description", "Installation",
        "Hardware dependencies", "Software dependencies", "Experiment workflow",
        "Evaluation and expected results", "Experiment customization", "Notes",
    ):  # fmt: skip
        assert f"section{{{part}}}" in text
    assert text.count(r"\begin{") == text.count(r"\end{")


# Hostile texts.


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Report:
    record = recorded(tmp_path_factory.mktemp("hostile")).record()
    cards = [(each, card_of(cases.hostile_record(record, each))) for each in cases.HOSTILE]
    return build(cases.hostile_judged(), cards)


def test_hostile_texts_are_inert_in_html(hostile: Report) -> None:
    text = html_report(hostile)
    page = _Page(text)

    test_the_page_asks_for_nothing(page)
    test_every_link_leads_to_a_place_of_the_page_and_no_id_is_taken_twice(page)
    assert "<script>alert(1)</script>" in "".join(page.text), "shown as it was written"
    assert "{{ 7*7 }} {% raw %} << 7*7 >>" in "".join(page.text), "no template of ours"
    assert not set(text) & set("\x1b\x07\u202e\u2066\u2028\x00\x9b")
    text.encode("utf-8")


def test_hostile_texts_are_inert_in_the_other_formats(hostile: Report) -> None:
    texts = {
        "markdown": markdown_report(hostile), "latex": latex_report(hostile),
        "csv": csv_report(hostile), "json": json_report(hostile, cases.hostile_judged()),
    }  # fmt: skip
    for name, text in texts.items():
        assert not set(text) & set("\x1b\x07\u202e\u2066\u2028\x00\x9b"), name
        text.encode("utf-8")
    shown = _Page(MarkdownIt("gfm-like", {"linkify": False}).render(texts["markdown"]))
    tags = {tag for tag, _ in shown.elements}
    assert tags <= {"h1", "h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li",
                    "pre", "code"}  # fmt: skip
    assert r"\input{" not in texts["latex"].replace(r"For \input", "")
    assert r"\write18" not in texts["latex"]
    assert texts["json"].isascii()


def test_no_text_becomes_a_path(tmp_path: Path) -> None:
    """A run's name from judgements is looked up among what is here; nothing is opened by it."""
    folder = recorded(tmp_path / "results")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "record.json").write_text(folder.record_path.read_text())
    names = ["../secret", str(tmp_path / "secret"), "toy/../../secret", folder.name]
    found = dict(find_cards(names, Store(tmp_path / "results"), None))

    assert [isinstance(found[name], str) for name in names] == [True, True, True, False]


@settings(max_examples=25)
@given(st.text(st.characters(), min_size=1, max_size=40))
def test_any_text_can_be_a_claims(text: str) -> None:
    found = cases.judgement(
        Verdict.UNSTABLE, reason=text, device=text, claim=cases.claim(text, text=text, paper=text)
    )
    report = cases.report(cases.judged([found], source=text))

    page = _Page(html_report(report))
    assert page.count("script") == 1
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(list(csv.reader(io.StringIO(csv_report(report))))) == 2
    markdown_report(report).encode("utf-8")
    latex_report(report).encode("utf-8")


# Cards.


def test_a_card_says_where_and_how_a_run_was_measured(tmp_path: Path) -> None:
    record = recorded(tmp_path).record()
    energy = Metric("energy_gross", "J", "nvml-counter", (1.0, 3.0, 2.0))
    rows = tuple(dataclasses.replace(r, metrics=(*r.metrics, energy)) for r in record.rows)
    card = card_of(dataclasses.replace(record, rows=rows))

    facts = dict(card.facts)
    assert facts["image"] == f"narrowgauge/cpu:local sha256:{'d' * 64}"
    assert facts["torch"] == "2.13.0"
    assert "digest unresolved" in facts["base"]
    assert card.device == "EPYC"
    assert [(e.metric, e.source, e.median, e.rows) for e in card.energy] == [
        ("energy_gross", "nvml-counter", "2 J", 6)
    ]


def test_cards_come_from_the_store_and_from_references(tmp_path: Path) -> None:
    stored = recorded(tmp_path / "results")
    place = (
        tmp_path / "experiments" / "toy" / "reference" / "epyc" / "20200101T000000Z-toy-ref.json.gz"
    )
    place.parent.mkdir(parents=True)
    place.write_bytes(gzip.compress(dumps(stored.record()).encode(), mtime=0))
    broken = recorded(tmp_path / "results", "20261121T110000Z-toy-bbbbbb")
    broken.record_path.chmod(0o644)
    broken.record_path.write_text('{"format": 1, "rows": [')
    names = [stored.name, "20200101T000000Z-toy-ref", broken.name, "none"]
    found = dict(find_cards(names, Store(tmp_path / "results"), tmp_path / "experiments"))

    assert not isinstance(found[names[0]], str)
    assert found[names[0]] == found[names[1]]
    assert "truncated" in str(found[broken.name])
    assert found["none"] == "its record is not here"


def test_a_lean_reading_gives_the_card_of_the_whole_record(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    (found,) = find_cards([folder.name], Store(tmp_path), None)

    assert found == (folder.name, card_of(folder.record()))


def test_records_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    found = cases.judged([cases.judgement(Verdict.REPRODUCED, runs=(folder.name,))])
    record = folder.record()
    store = Store(tmp_path)
    looked_up = assemble(found, store, None)
    assert assemble_page(found, store, None) == html_report(looked_up)
    folder.record_path.unlink()

    assert assemble(found, store, None, {"toy": (record,)}) == looked_up
    assert assemble(found, store, None).missing


@pytest.mark.parametrize("rows", [None, 3, [None], [{"metrics": 3}], [{"metrics": [3]}]])
def test_a_record_edited_by_hand_is_told_not_raised(tmp_path: Path, rows: object) -> None:
    folder = recorded(tmp_path)
    body = json.loads(folder.record_path.read_text())
    folder.record_path.chmod(0o644)
    folder.record_path.write_text(json.dumps({**body, "rows": rows}))
    ((_, card),) = find_cards([folder.name], Store(tmp_path), None)

    assert isinstance(card, str)


@pytest.mark.slow
def test_a_thousand_runs_take_ten_seconds(tmp_path: Path) -> None:
    first = recorded(tmp_path)
    names = [f"2026{n:04}T000000Z-toy-{n:06x}" for n in range(1000)]
    record = first.record()
    for name in names:
        folder = tmp_path / "toy" / name
        (folder / "out").mkdir(parents=True)
        text = dumps(dataclasses.replace(record, run_id=name))
        (folder / "record.json").write_text(text)
        (folder / "job.json").write_text(first.job_path.read_text())
    judgements = [
        cases.judgement(Verdict.REPRODUCED, f"claim-{n}", runs=tuple(names[n * 10 : n * 10 + 10]))
        for n in range(100)
    ]
    begin = time.process_time()  # others may share the machine
    found = cases.judged(judgements)
    text = html_report(build(found, find_cards(found.run_ids, Store(tmp_path), None)))

    assert time.process_time() - begin < 10
    assert text.count('class="card"') == 1000
