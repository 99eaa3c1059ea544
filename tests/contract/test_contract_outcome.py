"""Folding events into rows, and composing the record from whatever a run left."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
from contract_cases import event, metric, row_end, row_start, run_start, spec

from narrowgauge_contract.agreement import disagreements
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, ExitCode, UsageError
from narrowgauge_contract.events import Event, EventKind
from narrowgauge_contract.job import Job, resolve
from narrowgauge_contract.outcome import (
    ErrorInfo,
    Fold,
    Status,
    fold_outcome,
    load_outcome,
)
from narrowgauge_contract.record import (
    GitFacts,
    HostFacts,
    ImageFacts,
    MachineFacts,
    compose,
    load_host_note,
    load_record,
    write_record,
)


def _job() -> Job:
    return resolve(spec(), {}, profile="short", target="cpu", seed=0, run_id="r-1")


def _host(status: Status = Status.COMPLETE, exit_code: int = 0) -> HostFacts:
    machine = MachineFacts("6.1", "x86_64", "Debian 12", "EPYC", 2, 1 << 34)
    image = ImageFacts("narrowgauge/cpu:local", "sha256:aa", "python", None, "tag")
    return HostFacts("docker", machine, exit_code, status, image)


WHOLE = [
    run_start(), row_start(0, 1.0), metric(0, 2.0, [90.0]), metric(0, 3.0, [91.0]),
    event(EventKind.FACT, 3.1, 0, name="precision", value="fp32"), row_end(0, 3.5),
    row_start(1, 4.0), metric(1, 5.0, [92.0]), row_end(1, 6.0),
    event(EventKind.RUN_END, 6.5, status="complete", exit_code=0),
]  # fmt: skip


class TestFold:
    def test_samples_of_a_metric_are_appended_in_order(self) -> None:
        rows = Fold().add_all(WHOLE).rows()

        assert [row.metric("accuracy").values for row in rows] == [(90.0, 91.0), (92.0,)]  # type: ignore[union-attr]
        assert rows[0].facts == {"precision": "fp32"}
        assert rows[0].seconds == 2.5
        assert all(row.validity.valid for row in rows)

    def test_time_is_monotonic_from_the_first_event(self) -> None:
        fold = Fold().add_all(WHOLE)

        assert (fold.started_utc, fold.last_utc, fold.seconds) == (1000.0, 1006.5, 6.5)

    def test_a_row_that_never_ended_is_unfinished_and_invalid(self) -> None:
        [row] = Fold().add_all([run_start(), row_start(0, 1.0), metric(0, 2.0, [5.0])]).rows()

        assert row.status is Status.UNFINISHED
        assert row.validity.reasons == ("the row did not complete: unfinished",)
        assert row.metrics[0].values == (5.0,)

    def test_reasons_are_kept_in_order_and_once(self) -> None:
        reasons = ["too hot", "wrong precision", "too hot"]
        events = [event(EventKind.INVALID, 2.0, 0, reason=reason) for reason in reasons]

        [row] = Fold().add_all([row_start(0, 1.0), *events, row_end(0, 3.0)]).rows()

        assert row.status is Status.COMPLETE
        assert (row.validity.valid, row.validity.reasons) == (False, ("too hot", "wrong precision"))

    def test_an_error_travels_with_its_row(self) -> None:
        error = {"kind": "ValueError", "what": "no", "why": "", "next_step": "", "trace": "t"}
        end = event(EventKind.ROW_END, 2.0, 0, status="failed", seconds=1.0, error=error)

        [row] = Fold().add_all([row_start(0, 1.0), end]).rows()

        assert row.error == ErrorInfo("ValueError", "no", trace="t")
        assert row.validity.reasons == ("the row did not complete: failed (ValueError: no)",)

    def test_a_reason_takes_one_line_of_an_error(self) -> None:
        error = {"kind": "NotApplicableError", "what": "no FP8 here\nand more", "why": "",
                 "next_step": "", "trace": ""}  # fmt: skip
        end = event(EventKind.ROW_END, 2.0, 0, status="failed", seconds=1.0, error=error)

        [row] = Fold().add_all([row_start(0, 1.0), end]).rows()

        (reason,) = row.validity.reasons
        assert reason.endswith("failed (NotApplicableError: no FP8 here)")

    def test_a_resumed_row_begins_anew(self) -> None:
        again = [row_start(0, 10.0), metric(0, 11.0, [7.0, 8.0]), row_end(0, 12.0)]

        [row] = Fold().add_all([row_start(0, 1.0), metric(0, 2.0, [1.0]), *again]).rows()

        assert row.metrics[0].values == (7.0, 8.0)
        assert row.status is Status.COMPLETE

    def test_a_complete_row_is_not_begun_anew(self) -> None:
        """`--resume` skips complete rows; a stray start must not throw their samples away."""
        fold = Fold().add_all([row_start(0, 1.0), metric(0, 2.0, [1.0]), row_end(0, 3.0)])
        fold.add(row_start(0, 9.0))

        assert fold.complete() == (0,)
        assert fold.rows()[0].metrics[0].values == (1.0,)

    def test_a_metric_cannot_change_its_unit(self) -> None:
        fold = Fold().add_all([row_start(0, 1.0), metric(0, 2.0, [1.0])])
        other = dataclasses.replace(metric(0, 3.0, [1.0]), data={
            "name": "accuracy", "unit": "s", "source": "count", "values": [1.0],
        })  # fmt: skip

        with pytest.raises(DamagedRecordError, match="changes its unit"):
            fold.add(other)

    def test_events_of_a_row_that_never_started_are_ignored(self) -> None:
        assert Fold().add_all([metric(5, 1.0, [1.0]), row_end(5, 2.0)]).rows() == ()

    def test_side_files_are_listed_once_by_path(self) -> None:
        files = [
            event(EventKind.SIDE_FILE, 2.0, 0, path="row-0/a", sha256=digest, bytes=3)
            for digest in ("old", "new")
        ]

        [row] = Fold().add_all([row_start(0, 1.0), *files]).rows()

        assert [(side.path, side.sha256) for side in row.side_files] == [("row-0/a", "new")]


class TestCompose:
    def test_with_and_without_an_outcome_the_rows_are_the_same(self) -> None:
        """Killed after its last row, a run loses nothing but the lab's own word on how it ended."""
        outcome = fold_outcome(_job(), Fold().add_all(WHOLE), Status.COMPLETE, 0)

        whole = compose(_job(), outcome, [], _host())
        killed = compose(_job(), None, WHOLE, _host(Status.UNFINISHED, 32))

        assert whole.rows == killed.rows
        assert whole.inside == killed.inside
        assert whole.hashes == killed.hashes
        assert (whole.status, whole.exit_code) == (Status.COMPLETE, 0)
        assert (killed.status, killed.exit_code) == (Status.UNFINISHED, 32)
        assert whole.hashes.image == "sha256:aa"

    def test_without_a_host_it_says_so(self) -> None:
        record = compose(_job(), None, WHOLE, None)

        assert record.host is None
        assert record.hashes.image is None
        assert record.status is Status.UNFINISHED

    @pytest.mark.parametrize("count", range(len(WHOLE) + 1))
    def test_killed_at_any_event_what_came_before_is_kept(self, count: int) -> None:
        record = compose(_job(), None, WHOLE[:count], _host(Status.UNFINISHED, 32))

        samples = sum(len(m.values) for row in record.rows for m in row.metrics)
        assert samples == sum(e.kind is EventKind.METRIC for e in WHOLE[:count])

    @pytest.mark.parametrize(
        "odd",
        [
            event(EventKind.METRIC, 2.5, 0, name="accuracy"),
            event(EventKind.METRIC, 2.5, 0, name="accuracy", unit="s", source="x", values=[1.0]),
            event(EventKind.ROW_START, 2.5, 7),
            event(EventKind.ROW_END, 2.5, 0, status="exploded"),
            event(EventKind.RUN_START, 2.5, inside=3),
            event(EventKind.FACT, 2.5, 0),
            event(EventKind.INVALID, 2.5, 0),
            event(EventKind.SIDE_FILE, 2.5, 0, path=3),
        ],
        ids=lambda e: e.kind.value,
    )
    def test_an_odd_event_costs_no_other(self, odd: Event) -> None:
        events: List[Event] = [*WHOLE[:3], odd, *WHOLE[3:]]

        assert compose(_job(), None, events, _host()).rows == Fold().add_all(WHOLE).rows()

    def test_without_a_word_from_anyone_it_was_killed(self) -> None:
        record = compose(_job(), None, WHOLE[:3], None)

        assert (record.status, record.exit_code) == (Status.UNFINISHED, ExitCode.KILLED)
        assert record.host is None

    def test_a_record_is_written_once(self, tmp_path: Path) -> None:
        record = compose(_job(), None, WHOLE, _host())
        path = tmp_path / "record.json"
        write_record(path, record)
        before = path.read_bytes()

        with pytest.raises(FileExistsError):
            write_record(path, dataclasses.replace(record, exit_code=1))

        assert path.read_bytes() == before
        assert load_record(path) == record

    def test_an_outcome_survives_its_file(self, tmp_path: Path) -> None:
        outcome = fold_outcome(_job(), Fold().add_all(WHOLE), Status.COMPLETE, 0)
        write_json_atomic(tmp_path / "outcome.json", outcome)

        assert load_outcome(tmp_path / "outcome.json") == outcome

    @pytest.mark.parametrize("text", ['{"format": 2}', "[]", '{"format": 1, "run_id": 3}', ""])
    def test_a_file_that_is_no_outcome_is_damage(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "outcome.json").write_text(text)

        with pytest.raises(DamagedRecordError):
            load_outcome(tmp_path / "outcome.json")


class TestAgreement:
    def test_a_record_agrees_with_itself_and_with_another_seed(self) -> None:
        record = compose(_job(), None, WHOLE, _host())

        assert disagreements(record, dataclasses.replace(record, seed=9, run_id="r-2")) == []

    def test_each_difference_is_named_with_both_values(self) -> None:
        record = compose(_job(), None, WHOLE, _host())
        assert record.inside is not None
        inside = dataclasses.replace(record.inside, torch="1.8.0", accelerator="H200")

        other = dataclasses.replace(record, inside=inside, target="desktop", synthetic=True)

        assert disagreements(record, other) == [
            "target: cpu / desktop",
            "synthetic: False / True",
            "torch: 2.13.0 / 1.8.0",
            "device: None / H200",
        ]

    @pytest.mark.parametrize("name", ["THP_MEM_ALLOC_ENABLE", "MALLOC_MMAP_MAX_", "LD_PRELOAD"])
    def test_where_memory_comes_from_has_to_agree(self, name: str) -> None:
        record = compose(_job(), None, WHOLE, _host())
        assert record.inside is not None
        environment = {**record.inside.environment, name: "1"}
        inside = dataclasses.replace(record.inside, environment=environment)

        (line,) = disagreements(record, dataclasses.replace(record, inside=inside))

        assert line == f"allocator: {{}} / {{'{name}': '1'}}"


class TestHostNote:
    """What a script on the host writes down for the lab."""

    def note(self) -> Dict[str, Any]:
        machine = {
            "kernel": "5.10.104-tegra", "machine": "aarch64", "system": "Ubuntu 20.04.5 LTS",
            "cpu": "ARMv8", "cpu_count": 8, "memory_bytes": 32 << 30, "docker": "20.10.21",
            "driver": None, "l4t": "# R35 (release), REVISION: 2.1", "power_mode": "MAXN 0",
            "clocks": {"cpu_scaling_governor": "schedutil"}, "gpus": [],
        }  # fmt: skip
        image = {"name": "narrowgauge/jetson:local", "digest": "sha256:1", "base": "l4t-ml",
                 "base_digest": None, "content_tag": "0123", "stand_in": False}  # fmt: skip
        git = {"commit": "abc", "dirty": False}
        return {"format": 1, "executor": "script", "machine": machine, "image": image, "git": git}

    def test_it_becomes_the_hosts_part_of_a_record(self, tmp_path: Path) -> None:
        (tmp_path / "host.json").write_text(json.dumps(self.note()))

        facts = load_host_note(tmp_path / "host.json").host_facts(30, Status.FAILED)
        record = compose(_job(), None, WHOLE, facts)

        assert record.host == facts
        assert (facts.executor, facts.exit_code, facts.status) == ("script", 30, Status.FAILED)
        assert facts.machine.power_mode == "MAXN 0"
        assert facts.git == GitFacts("abc", False)
        assert (facts.exceptions, facts.log_tail) == ((), "")
        assert record.hashes.image == "sha256:1"

    def test_image_and_commit_may_be_unknown(self, tmp_path: Path) -> None:
        note = {**self.note(), "image": None, "git": None}
        (tmp_path / "host.json").write_text(json.dumps(note))

        facts = load_host_note(tmp_path / "host.json").host_facts(0, Status.COMPLETE)

        assert (facts.image, facts.git) == (None, None)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"format": 2}', "has format 2"),
            ('{"format": 1, "executor"', "truncated or not JSON"),
            ('{"format": 1, "executor": "script"}', "lacks the field 'machine'"),
        ],
    )
    def test_a_damaged_one_is_named(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "host.json").write_text(text)

        with pytest.raises(DamagedRecordError, match=said) as caught:
            load_host_note(tmp_path / "host.json")
        assert "attach" not in caught.value.next_step

    def test_none_there_is_a_mistake_of_usage(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot read the host's facts"):
            load_host_note(tmp_path / "host.json")
