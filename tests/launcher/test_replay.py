"""Judging what is stored: replay, explain, and records that are refused while the rest goes on."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from judge_cases import both, changed_sample
from result_cases import outcome_of
from rich.console import Console

from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import run_program
from narrowgauge.judge.gather import judge_references, judge_stored, load_judged, occasion_of
from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.show import REPLAY_LABEL, plain, print_verdicts
from narrowgauge.store import Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import decode, dumps, encode, write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, ExitCode, UnknownNameError
from narrowgauge_contract.record import Record, write_record

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
[experiment]
id = "race"
title = "A race"
summary = "For tests."
headline = ["time"]
[parameters.engine]
type = "choice"
choices = ["eager", "graph", "own"]
default = "eager"
axis = "row"
help = "What runs it."
[parameters.batch]
type = "int"
default = 1
axis = "row"
help = "Images at once."
[parameters.epochs]
type = "int"
default = 4
axis = "run"
help = "Passes."
[parameters.limit]
type = "float"
default = 2.0
unit = "s"
axis = "run"
help = "How long."
"""
CLAIMS = """
[[claim]]
id = "twice"
text = "Twice as fast."
paper = "Table 1"
kind = "ratio"
metric = { operator = "ratio", of = ["time{engine=eager}", "time{engine=own}"] }
expected = { any = { figure = 2.0, tolerance = 0.1 } }
profile = "short"
minutes = 1
disk_gb = 0.1
measured_on = "a workstation"

[[claim]]
id = "own-second"
text = "Ours takes a second."
paper = "Table 2"
kind = "value"
metric = { operator = "value", of = ["time{engine=own}"], statistic = "max" }
expected = { any = { figure = 1.0, tolerance = 0.1 } }
profile = "short"
minutes = 1
disk_gb = 0.1

[[claim]]
id = "never"
text = "Another protocol."
paper = "Table 3"
kind = "value"
metric = { operator = "value", of = ["time{engine=graph}"] }
expected = { any = { figure = 1.0, tolerance = 0.1 } }
not_comparable = "it is of another protocol"
profile = "short"
minutes = 1
disk_gb = 0.1
"""


class Replay:
    """Command lines on a checkout with one experiment and two runs of it."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.checkout = Checkout(root)
        self._capture = capture

    @property
    def store(self) -> Store:
        return Store(self.checkout.results)

    def keep(self, record: Record) -> Path:
        path = self.checkout.results / "race" / record.run_id / "record.json"
        (path.parent / "out").mkdir(parents=True)
        write_json_atomic(path.parent / "out" / "outcome.json", outcome_of(record))
        write_record(path, record)
        return path

    def __call__(self, *words: str) -> tuple[int, str, str]:
        errors = io.StringIO()
        self._capture.readouterr()
        code = run_program([*words, "--project", str(self.checkout.root)], os.environ, errors)
        said = self._capture.readouterr()
        return code, said.out, said.err + errors.getvalue()


@pytest.fixture
def ng(tiny_checkout: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    folder = tiny_checkout / "experiments" / "race"
    folder.mkdir()
    (folder / "experiment.toml").write_text(EXPERIMENT)
    (folder / "claims.toml").write_text(CLAIMS)
    found = Replay(tiny_checkout, capsys)
    found.keep(both(run_id="20261121T100000Z-race-aaaaaa"))
    return found


def verdicts(judged: Judged) -> dict[str, Verdict]:
    return {each.claim.id: each.verdict for each in judged.judgements}


def test_replay_is_labelled_as_no_reproduction(ng: Replay) -> None:
    code, out, _ = ng("replay")

    assert code == ExitCode.OK
    assert out.startswith(REPLAY_LABEL)
    assert "race/twice" in out
    assert "3 claims: 2 REPRODUCED, 1 NOT-APPLICABLE" in out
    assert "race/never" not in out
    assert "race/never" in ng("replay", "--every")[1]


def test_a_judgement_names_no_home(
    ng: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluator's own name would stand in the report that authors are given."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    told = {
        ng.checkout.root / "results": "results",
        tmp_path / "home/runs": "~/runs",
        Path("/srv/runs"): "/srv/runs",
        Path("references"): "references",
    }

    for source, expected in told.items():
        assert occasion_of(ng.checkout, str(source), 0.0, replay=True).source == expected


def test_replay_as_json_and_into_a_file_reads_back(ng: Replay, tmp_path: Path) -> None:
    code, out, _ = ng("replay", "twice", "--json", "--out", str(tmp_path / "judged.json"))

    assert code == ExitCode.OK
    judged = load_judged(tmp_path / "judged.json")
    assert decode(Judged, json.loads(out), "out") == judged
    assert judged.occasion.replay
    assert [each.claim.id for each in judged.judgements] == ["twice"]
    assert judged.run_ids == ("20261121T100000Z-race-aaaaaa",)
    assert ng("replay", "--out", str(tmp_path / "no" / "x.json"))[0] == ExitCode.USAGE


def test_a_claim_that_is_not_here_is_named(ng: Replay) -> None:
    code, _, told = ng("replay", "twise")

    assert code == ExitCode.USAGE
    assert "did you mean 'twice'" in told
    with pytest.raises(UnknownNameError):
        judge_stored(ng.checkout, ng.store, ["nothing"])


def test_explain_says_what_how_found_and_what_would_change_it(ng: Replay) -> None:
    code, out, _ = ng("explain", "twice")

    assert code == ExitCode.OK
    for part in (
        "claimed   Twice as fast.", "Table 1", "measured on a workstation",
        "tested by ratio, median",
        "time{engine=own}", "on any: 2 within 10 %", "at least 3 valid repeats, profile short",
        "verdict   REPRODUCED", "time{engine=eager}: 2 s", "noise floor unknown",
        "20261121T100000Z-race-aaaaaa on EPYC", "to change", "makes it UNSTABLE",
        "command   narrowgauge reproduce race/twice",
    ):  # fmt: skip
        assert part in out, part
    *lines, command = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert command.startswith("  command")  # whole, however long, to be copied
    assert json.loads(ng("explain", "twice", "--json")[1])["judgements"][0]["verdict"] == (
        "REPRODUCED"
    )


def test_explain_has_the_command_once_where_a_run_is_what_would_change_it(ng: Replay) -> None:
    shutil.rmtree(ng.checkout.results / "race")

    out = ng("explain", "twice")[1]

    assert "  to change a run of it\n  command   narrowgauge reproduce race/twice\n" in out
    assert out.count("narrowgauge reproduce") == 1


def test_what_nothing_here_measures_has_no_command(ng: Replay) -> None:
    out = ng("explain", "never")[1]

    assert "tested by value, median" in out
    assert "another experiment" in out
    assert "command" not in out


def test_explain_by_references_is_labelled(ng: Replay) -> None:
    assert ng("explain", "twice", "--references")[1].startswith(REPLAY_LABEL)


def test_changing_one_stored_sample_flips_the_verdict_that_it_should_and_no_other(
    ng: Replay,
) -> None:
    before = judge_stored(ng.checkout, ng.store)
    path = ng.checkout.results / "race" / "20261121T100000Z-race-aaaaaa" / "record.json"
    shutil.rmtree(path.parent)
    ng.keep(changed_sample(both(run_id=path.parent.name), 1, 1.105))
    (ng.checkout.results / ".index.sqlite").unlink()  # which knows the first bytes

    after = judge_stored(ng.checkout, ng.store)

    assert verdicts(before)["own-second"] is Verdict.REPRODUCED
    assert verdicts(after) == {**verdicts(before), "own-second": Verdict.NOT_REPRODUCED}


def test_an_edited_record_is_refused_by_name_and_the_rest_goes_on(ng: Replay) -> None:
    second = ng.keep(both(run_id="20261122T100000Z-race-bbbbbb"))
    judge_stored(ng.checkout, ng.store)
    second.write_text(second.read_text().replace("2.03", "9.03", 1))

    judged = judge_stored(ng.checkout, ng.store)

    (refused,) = judged.refused
    assert refused.path == str(second)
    assert "edited" in refused.why
    assert verdicts(judged)["twice"] is Verdict.REPRODUCED
    assert judged.run_ids == ("20261121T100000Z-race-aaaaaa",)
    assert "refused:" in ng("replay")[1]


def test_a_foreign_record_is_refused_and_the_rest_goes_on(ng: Replay) -> None:
    folder = ng.checkout.results / "race" / "20261123T100000Z-race-cccccc"
    folder.mkdir()
    (folder / "record.json").write_text('{"format": 1}')

    judged = judge_stored(ng.checkout, ng.store)

    assert len(judged.refused) == 1
    assert verdicts(judged)["twice"] is Verdict.REPRODUCED


def test_hostile_words_do_not_steer_a_terminal(ng: Replay) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07<b>$(id)\r\n\u202e"
    ng.keep(both(run_id="20261124T100000Z-race-dddddd", device=hostile))

    _, out, _ = ng("explain", "twice")
    judged = judge_stored(ng.checkout, ng.store)
    stream = io.StringIO()
    print_verdicts(judged, Console(file=stream, width=120), all_=True)

    for text in (out, stream.getvalue()):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
    assert plain(hostile).startswith("\\x1b[2J")


def _table(judged: Judged, width: int) -> str:
    stream = io.StringIO()
    print_verdicts(judged, Console(file=stream, width=width, force_terminal=True), all_=True)
    return re.sub("\x1b[^m]*m", "", stream.getvalue())


def test_a_claims_name_is_whole_where_there_is_room_and_nothing_is_cut(ng: Replay) -> None:
    judged = judge_stored(ng.checkout, ng.store)
    wide = _table(judged, 100)

    assert all(f"{each.experiment}/{each.claim.id}" in wide for each in judged.judgements)
    assert all(word in wide for each in judged.judgements for word in each.reason.split())
    assert all(len(line) <= 44 for line in _table(judged, 44).splitlines()[:-1])


def test_what_was_judged_is_read_strictly(tmp_path: Path, ng: Replay) -> None:
    judged = judge_stored(ng.checkout, ng.store, clock=lambda: 1.5)
    path = tmp_path / "judged.json"
    path.write_text(dumps(judged))

    assert load_judged(path) == judged
    assert judged.occasion.made_utc == 1.5
    for broken in ("{", json.dumps({**encode(judged), "format": 2}), '{"format": 1}'):
        path.write_text(broken)
        with pytest.raises(DamagedRecordError, match=r"judged\.json"):
            load_judged(path)
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        load_judged(tmp_path / "nothing.json")


def test_the_references_of_this_checkout_come_to_verdicts() -> None:
    """These were measured without the launcher, so none may say REPRODUCED."""
    judged = judge_references(Checkout(ROOT), ["ceilings"])

    assert judged.occasion.replay
    assert judged.refused == ()
    found = set(verdicts(judged).values())
    assert Verdict.REPRODUCED_TREND in found
    assert Verdict.REPRODUCED not in found
