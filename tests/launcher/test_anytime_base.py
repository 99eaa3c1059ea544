"""`anytime-score --base`: what families cost within a point of a plain network, and how surely."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anytime_score_cases import MACS, answers, recorded
from rich.console import Console

from narrowgauge.anytime.bases import LESS, AtBase
from narrowgauge.anytime.gather import gather
from narrowgauge.anytime.scoring import Scoring, score
from narrowgauge.anytime.showing import print_scoring, scoring_csv, scoring_json
from narrowgauge.cli.app import run_program
from narrowgauge.errors import UsageError
from narrowgauge.store import RunFolder
from narrowgauge_scores.resampling import DRAWS
from narrowgauge_scores.side_file import RunLogits

IMAGES = 300
PLAIN = 5_000_000


def _run(family: str, right: Any, seed: int = 0, **changes: Any) -> RunLogits:
    """A run whose exits are right where `right` [exits, images] says so."""
    flags = np.asarray(right, bool)
    run = answers(family, exits=len(flags), images=flags.shape[1], seed=seed, **changes)
    test = run.test
    named = np.where(flags, test.labels, (test.labels + 1) % test.classes)
    logits = np.eye(test.classes, dtype=np.float32)[named]
    return dataclasses.replace(run, test=dataclasses.replace(test, logits=logits), val=None)


def _first(*counts: int) -> np.ndarray:
    """[exits, images]: right for the first so many images."""
    return np.arange(IMAGES)[np.newaxis, :] < np.asarray(counts)[:, np.newaxis]


def _plain(count: int = 240, seed: int = 0) -> RunLogits:
    return _run("plain", _first(count), seed, macs=(PLAIN,))


def _recorded(root: Path, *runs: RunLogits) -> list[RunFolder]:
    return [recorded(root, run, number=number) for number, run in enumerate(runs)]


def _scored(root: Path, *runs: RunLogits, base: str = "plain") -> Scoring:
    return score(gather(_recorded(root, *runs)), base)


def _of(found: Scoring, label: str) -> AtBase:
    assert found.base is not None
    (held,) = (each for each in found.base.families if each.label == label)
    return held


def test_the_cheapest_exit_within_a_point_is_what_a_family_costs(tmp_path: Path) -> None:
    # 80 %: a point below are 79 %, 237 images; 236 are too few.
    found = _scored(tmp_path, _run("toynet", _first(236, 237, 250)), _plain())

    assert found.base is not None
    assert (found.base.label, found.base.macs) == ("plain", PLAIN)
    assert found.base.accuracy == pytest.approx(0.8)
    assert [each.label for each in found.base.families] == ["toynet"]
    held = _of(found, "toynet")
    assert held.macs == MACS[1]
    assert held.reached == 1.0
    # What it lacks to the plain network are the same 3 images in each draw, or none, or more.
    assert held.low == MACS[0]
    assert held.high == MACS[2]


def test_a_family_that_is_never_within_a_point_says_so(tmp_path: Path) -> None:
    held = _of(_scored(tmp_path, _run("toynet", _first(100, 110, 120)), _plain()), "toynet")

    assert held == AtBase("toynet", math.inf, math.inf, math.inf, 0.0)


def test_draws_are_paired_image_by_image(tmp_path: Path) -> None:
    """Of the very same answers no draw is a point below, however few images there are; of as many
    right answers about other images some are."""
    same, other = _first(30), _first(30)[:, ::-1]
    found = _scored(
        tmp_path, _run("same", same, macs=(1_000_000,)), _run("other", other, macs=(1_000_000,)),
        _run("plain", same, macs=(PLAIN,)),
    )  # fmt: skip

    assert _of(found, "same") == AtBase("same", 1e6, 1e6, 1e6, 1.0)
    unsure = _of(found, "other")
    assert (unsure.macs, unsure.low, unsure.high) == (1e6, 1e6, math.inf)
    assert 0.4 < unsure.reached < 0.8


def test_the_interval_is_that_of_draws_written_out(tmp_path: Path) -> None:
    """By draws of another generator: what share of them each exit is enough in."""
    rng = np.random.default_rng(5)
    right = rng.random((3, IMAGES)) < np.array([[0.76], [0.79], [0.83]])
    base = rng.random((1, IMAGES)) < 0.8
    found = _scored(
        tmp_path, _run("toynet", right), _run("plain", base, macs=(PLAIN,))
    )  # fmt: skip
    held = _of(found, "toynet")

    drawn = rng.integers(IMAGES, size=(DRAWS, IMAGES))
    enough = right[:, drawn].mean(2) >= base[0][drawn].mean(1) - LESS - 1e-12
    spent = np.where(enough, np.array(MACS, float)[:, np.newaxis], np.inf).min(0)
    assert held.reached == pytest.approx(np.isfinite(spent).mean(), abs=0.04)
    assert held.low == np.sort(spent)[int(0.025 * DRAWS)]
    assert held.high == np.sort(spent)[int(0.975 * DRAWS)]


def test_means_are_over_seeds(tmp_path: Path) -> None:
    runs = [_run("toynet", _first(*counts), seed) for seed, counts in
            enumerate(((200, 240, 240), (280, 240, 240)))]  # fmt: skip
    found = _scored(tmp_path, *runs, _plain(230, 0), _plain(250, 1))

    assert found.base is not None
    assert found.base.accuracy == pytest.approx(0.8)
    held = _of(found, "toynet")
    assert held.macs == MACS[0], "240 of 300 in the mean, though one seed has 200"
    assert held.low == MACS[0]
    assert held.high > MACS[0]


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("nothing", "none of the plain networks"),
        ("toynet", "none of the plain networks"),
        ("pla", "names 2"),
        ("", ""),
    ],
)
def test_a_base_is_one_family_of_one_exit(tmp_path: Path, base: str, says: str) -> None:
    runs = _run("toynet", _first(200, 210, 220)), _plain(), dataclasses.replace(
        _plain(200), family="plateau"
    )  # fmt: skip
    if not says:
        assert _scored(tmp_path, *runs, base=base).base is None
        return
    with pytest.raises(UsageError, match=says) as told:
        _scored(tmp_path, *runs, base=base)

    assert "plain; plateau" in (told.value.why or "")


def test_without_any_plain_network_it_is_said_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as told:
        _scored(tmp_path, _run("toynet", _first(200, 210, 220)))

    assert "several exits" in (told.value.why or "")
    assert "kind=plain" in (told.value.next_step or "")


def _with_trunk(run: RunLogits, right: Any) -> RunLogits:
    test = dataclasses.replace(run.test, base_correct=np.asarray(right, np.uint8))
    return dataclasses.replace(run, test=test, base_macs=PLAIN, base_accuracy=80.0)


def test_the_plain_network_that_runs_name_is_one_too(tmp_path: Path) -> None:
    trunk = _first(240)[0]
    branchy = [_with_trunk(_run("branchy", _first(200, 237, 250), seed), trunk) for seed in (0, 1)]
    found = _scored(tmp_path, *branchy, _run("toynet", _first(230, 239, 240)), base="plain")

    assert found.base is not None
    assert (found.base.label, found.base.macs) == ("plain network of branchy", PLAIN)
    assert found.base.accuracy == pytest.approx(0.8)
    assert [each.label for each in found.base.families] == ["branchy", "toynet"]
    assert [each.macs for each in found.base.families] == [MACS[1], MACS[1]]


def test_it_is_none_where_a_seed_does_not_know_it(tmp_path: Path) -> None:
    known = _with_trunk(_run("branchy", _first(200, 237, 250)), _first(240)[0])
    other = dataclasses.replace(_run("branchy", _first(200, 237, 250), 1), base_macs=PLAIN)
    with pytest.raises(UsageError, match="none of the plain networks"):
        _scored(tmp_path, known, other)


def test_its_answers_are_sorted_with_the_images(tmp_path: Path) -> None:
    run = _with_trunk(_run("branchy", _first(200, 237, 250)), _first(240)[0])
    order = np.random.default_rng(0).permutation(IMAGES)
    test = run.test
    assert test.base_correct is not None
    mixed = dataclasses.replace(
        test,
        logits=test.logits[:, order],
        labels=test.labels[order],
        samples=test.samples[order],
        base_correct=test.base_correct[order],
    )
    (row,) = gather(_recorded(tmp_path, dataclasses.replace(run, test=mixed))).answered

    assert row.logits.test.base_correct is not None
    assert np.array_equal(row.logits.test.base_correct, _first(240)[0])


def test_table_json_and_csv_have_it(tmp_path: Path) -> None:
    bad = dataclasses.replace(_run("bad", _first(90, 90, 90)), seed=0)
    found = _scored(tmp_path, _run("toynet", _first(236, 237, 250)), bad, _plain())
    stream = io.StringIO()
    print_scoring(found, Console(file=stream, width=200))

    assert "within a point of plain: 80.00 %, 5 M" in stream.getvalue()
    assert "30.0 %" in stream.getvalue()  # of the base's MACs
    assert "never" in stream.getvalue()
    body = json.loads(json.dumps(scoring_json(found), allow_nan=False))["base"]
    held = {each["label"]: each for each in body["families"]}
    assert held["toynet"]["macs"] == MACS[1]
    assert held["bad"]["macs"] is None
    lines = [
        row for row in csv.DictReader(io.StringIO(scoring_csv(found)))
        if row["figure"] == "macs_at_given_base_less_1"
    ]  # fmt: skip
    assert [(row["family"], float(row["mean"])) for row in lines] == [
        ("toynet", MACS[1]), ("bad", math.inf),
    ]  # fmt: skip
    assert float(lines[0]["low"]) == MACS[0]


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = _recorded(tmp_path / "results", _run("toynet", _first(236, 237, 250)), _plain())
    words = ["anytime-score", *(folder.name for folder in folders), "--json"]
    words += ["--results", str(tmp_path / "results")]

    assert run_program([*words, "--base", "plain"], {}, io.StringIO()) == 0
    assert json.loads(capsys.readouterr().out)["base"]["label"] == "plain"
    errors = io.StringIO()
    assert run_program([*words, "--base", "other"], {}, errors) == 2
    assert "--base 'other'" in errors.getvalue()
