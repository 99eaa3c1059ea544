"""A scoring in a page of Markdown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from anytime_score_cases import answers, latencies, recorded

from narrowgauge.anytime.gather import gather
from narrowgauge.anytime.page import scoring_block, update_page
from narrowgauge.anytime.scoring import Scoring, score
from narrowgauge.cli.app import run_program
from narrowgauge.errors import UsageError

PAGE = "before\n<!-- scores -->\nold\n<!-- /scores -->\nafter\n"


def _scored(root: Path) -> Scoring:
    folders = [
        recorded(root, answers("bad|net", 0.6), number=1),
        recorded(root, answers("good", 1.2), number=2),
    ]
    return score(gather(folders))


def test_the_largest_area_stands_first_and_runs_are_named(tmp_path: Path) -> None:
    found = _scored(tmp_path)
    lines = scoring_block(found).splitlines()

    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| good", r"| bad\|net"]
    good = max(found.families, key=lambda each: each.macs.area.value)
    assert f"{good.macs.area.value:.3f} ({good.macs.area.low:.3f} to" in lines[2]
    assert f"{100 * good.macs.accuracies[-1].value:.1f} (" in lines[2]
    assert "area over time" not in lines[0]
    for each in found.families:
        assert f"`{each.family.rows[0].run_id}`" in lines[-1]


def test_time_has_a_column_where_somebody_measured_it(tmp_path: Path) -> None:
    timed = recorded(
        tmp_path, answers("timed", 1.2, latency=latencies(1, 2, 3), device="a CPU"), number=1
    )
    untimed = recorded(tmp_path, answers("untimed", 0.6), number=2)

    lines = scoring_block(score(gather([timed, untimed]))).splitlines()

    assert lines[0].endswith("| area over time |")
    assert lines[3].startswith("| untimed |")
    assert lines[3].endswith("| – |")


def test_what_keeps_up_with_a_plain_network_has_a_column(tmp_path: Path) -> None:
    plain = answers("plain", 1.0, exits=1)
    folders = [recorded(tmp_path, plain, number=1)]
    folders += [
        recorded(tmp_path, answers(name, strength), number=number)
        for number, (name, strength) in enumerate([("good", 3.0), ("bad", 0.1)], 2)
    ]
    found = score(gather(folders), "plain")
    base = found.base
    assert base is not None

    lines = scoring_block(found).splitlines()

    at = [head.strip() for head in lines[0].split("|")].index(
        "MMAC within a point of the plain network"
    )
    cells = {line.split("|")[1].strip(): line.split("|")[at].strip() for line in lines[2:5]}
    good = next(each for each in base.families if each.label == "good")
    assert cells["plain"] == "the plain network"
    assert cells["good"].split(" ")[0] == f"{1e-6 * good.macs:.3g}"
    assert cells["bad"] == "never"
    assert any(
        line == f"The plain network is plain: {100 * base.accuracy:.1f} % at "
        f"{1e-6 * base.macs:.3g} MMAC."
        for line in lines
    )


def test_a_page_is_filled_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = _scored(tmp_path)

    assert update_page(page, found)
    assert not update_page(page, found)

    text = page.read_text()
    assert text.startswith("before\n<!-- scores -->\n| family |")
    assert text.endswith("<!-- /scores -->\nafter\n")
    assert "old" not in text


def test_a_page_without_a_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")

    with pytest.raises(UsageError, match="one place for the scores"):
        update_page(page, _scored(tmp_path))
    assert page.read_text() == "nothing\n"


def test_the_command_fills_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = io.StringIO()
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    folder = recorded(tmp_path / "results", answers("good", 1.2), number=1)

    words = ["anytime-score", folder.name, "--results", str(tmp_path / "results")]
    assert run_program([*words, "--into", str(page)], {}, errors) == 0

    assert "| good |" in page.read_text()
    assert "brought up to date" in capsys.readouterr().err
