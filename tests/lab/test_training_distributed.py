"""Training in two processes on CPU: what one process would do, and one record however it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spread_cases import PlainNet, RowFailedError, Spread, gone
from toys import fold, request, run_toy, write_toy
from training_cases import CPU, SmallNet, recipe

from narrowgauge_contract.errors import (
    ExitCode,
    ExperimentFileError,
    NotApplicableError,
    SkippedError,
    UsageError,
)
from narrowgauge_contract.events import EVENTS_FILE, read_events
from narrowgauge_contract.outcome import Status
from narrowgauge_lab import distributed, facts, precision, session, training
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import Group
from narrowgauge_lab.errors import OutOfMemoryError
from narrowgauge_lab.ranks import RankError

_TIMED = {"images_per_second", "epoch_seconds"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Also because a process forked from one that has used several may use one only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _assert_close(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        difference = (tensor.double() - other[name].double()).abs().max().item()
        assert difference <= 1e-5, name


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(8, 2, [4, 4]), (7, 2, [4, 3]), (1, 3, [1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_a_batch_is_dealt_out_whole_and_evenly(count: int, size: int, sizes: list) -> None:
    indices = torch.arange(count)
    parts = [Group(rank, size, "gloo").shard(indices) for rank in range(size)]

    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), indices)


@pytest.mark.parametrize("images", [69, 65])
def test_two_processes_do_what_one_does_with_their_batches(tmp_path: Path, images: int) -> None:
    """The last update is of 5 images, 3 and 2 of them, or of 1, which leaves rank 1 nothing."""
    one, two = Spread(tmp_path / "one"), Spread(tmp_path / "two")
    one.train_by(1, recipe(epochs=3, batch_size=16), images)
    two.train_by(2, recipe(epochs=3, batch_size=8), images)

    (alone,), (first, second) = one.states, two.states
    _assert_equal(first, second)
    _assert_close(alone, first)
    moved = (alone["conv.weight"] - PlainNet().conv.weight).abs().max().item()
    assert moved > 1e-2, "or there would be nothing to compare"
    for metric in one.row().metrics:
        if metric.name not in _TIMED:
            assert two.values(metric.name) == pytest.approx(metric.values, rel=1e-5)
    row = two.row()
    assert row.validity.valid
    assert row.facts["world_size"] == 2
    assert row.facts["backend"] == "gloo"
    assert row.facts["rank_devices"] == ["cpu", "cpu"]
    assert one.row().facts["world_size"] == 1


def test_one_record_of_both_with_the_speed_of_both(tmp_path: Path) -> None:
    case = Spread(tmp_path)
    case.train_by(2, recipe(epochs=2, batch_size=8))

    events = list(read_events(tmp_path / EVENTS_FILE))
    assert sum(event.data.get("name") == "train_loss" for event in events) == 2
    (seconds, speed) = case.values("epoch_seconds")[0], case.values("images_per_second")[0]
    assert speed > 70 / seconds, "of all 70 images, in a part of the epoch"


def test_ranks_go_on_with_one_set_of_running_statistics(tmp_path: Path) -> None:
    case = Spread(tmp_path)
    case.train_by(2, recipe(epochs=2, batch_size=8), make=SmallNet)
    first, second = case.states
    _assert_equal(first, second)
    assert first["norm.running_mean"].abs().max().item() > 0


def test_each_epoch_and_rank_has_a_generator_of_its_own() -> None:
    """Or dropout would mask the same elements of both ranks' images."""
    seeds = [(3, 0, 0), (3, 0, 1), (3, 1, 0), (4, 0, 0)]

    assert len({training.rank_seed(*each) for each in seeds}) == len(seeds)
    assert training.rank_seed(3, 1, 1) == training.rank_seed(3, 1, 1)


@pytest.mark.parametrize("fail_at", [8, 13])
def test_killed_and_resumed_is_bitwise_the_same(tmp_path: Path, fail_at: int) -> None:
    """Five updates an epoch, with dropout and batch normalisation on each rank's own part."""
    whole, case = Spread(tmp_path / "whole"), Spread(tmp_path / "killed")
    given = recipe(epochs=4, batch_size=8)
    whole.train_by(2, given, make=SmallNet)
    with pytest.raises(RowFailedError, match="of 2: KeyboardInterrupt"):
        case.train_by(2, given, fail_at=fail_at)

    case.train_by(2, given, resume=True, make=SmallNet)

    for expected, state in zip(whole.states, case.states):
        _assert_equal(expected, state)
    assert case.row().facts["resumed_after_epoch"] == (fail_at - 1) // 5
    for metric in whole.row().metrics:
        if metric.name not in _TIMED:
            assert case.values(metric.name) == metric.values


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_row_goes_on_in_another_number_of_processes(
    tmp_path: Path, before: int, after: int
) -> None:
    """16 images make an update throughout."""
    whole = Spread(tmp_path / "whole", {"lr": 1, "nproc": 1})
    whole.train_by(1, recipe(epochs=4, batch_size=16))
    cut = Spread(tmp_path / "cut", {"lr": 1, "nproc": before})
    with pytest.raises(RowFailedError, match="KeyboardInterrupt"):
        cut.train_by(before, recipe(epochs=4, batch_size=16 // before), stop_after=2)
    again = Spread(tmp_path / "cut", {"lr": 1, "nproc": after})
    again.train_by(after, recipe(epochs=4, batch_size=16 // after), resume=True)

    _assert_close(whole.states[0], again.states[0])
    assert again.values("train_loss") == pytest.approx(whole.values("train_loss"), rel=1e-5)
    assert again.row().facts["world_size_before_resume"] == before
    assert again.row().facts["world_size"] == after


def test_the_loss_scale_is_one(tmp_path: Path) -> None:
    if "fp16" not in precision.available(CPU):
        pytest.skip("this torch has no fp16 autocast on CPU")
    case = Spread(tmp_path)
    # A rate at which a float16 gradient overflows now and then, on one rank or the other.
    case.train_by(2, recipe(epochs=4, batch_size=4, precision="fp16", rate=0.5))

    first, second = case.states
    _assert_equal(first, second)
    assert first["skipped"].item() >= 1 or first["good_steps"].item() > 0


def test_a_killed_rank_fails_the_row_and_leaves_no_process(tmp_path: Path) -> None:
    case = Spread(tmp_path)

    def body(ctx: RowContext, group: Group) -> None:
        (tmp_path / f"pid-{group.rank}").write_text(str(os.getpid()))
        group.wait()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # as one does that waits for the other inside a library

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        case.spread(2, body)

    assert "rank 1 of 2 was killed by SIGKILL" in caught.value.what
    assert caught.value.exit_code in (ExitCode.RUN_FAILED, ExitCode.OUT_OF_MEMORY)
    assert time.monotonic() - began < 60, "nobody waited for the one that slept"
    assert all(gone(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2))


def test_a_rank_that_raises_is_named_with_its_words_and_its_log(tmp_path: Path) -> None:
    case = Spread(tmp_path)

    def body(ctx: RowContext, group: Group) -> None:
        group.wait()
        if group.rank == 0:
            group.all_reduce_(torch.zeros(4))  # fails too, when the other is gone
        print("looked at the batch", flush=True)
        raise OutOfMemoryError("no room for the batch", why="large", next_step="a smaller one")

    with pytest.raises(RankError, match="rank 1 of 2: OutOfMemoryError: no room") as caught:
        case.spread(2, body)

    assert (caught.value.why, caught.value.next_step) == ("large", "a smaller one")
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert "in body" in str(caught.value.__cause__)
    assert "looked at the batch" in str(caught.value.__cause__)
    (log,) = [each for each in case.row().side_files if each.path.endswith("rank-1.log")]
    assert (tmp_path / log.path).read_text() == "looked at the batch\n"


def test_what_crashes_in_native_code_leaves_its_trace(tmp_path: Path) -> None:
    case = Spread(tmp_path)

    def body(ctx: RowContext, group: Group) -> None:
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(600)

    with pytest.raises(RankError, match="rank 0 of 2 crashed with SIGSEGV") as caught:
        case.spread(2, body)

    assert "in body" in str(caught.value.__cause__)


def test_a_row_that_has_to_be_skipped_is_skipped(tmp_path: Path) -> None:
    def body(ctx: RowContext, group: Group) -> None:
        raise SkippedError("no such unit here")

    with pytest.raises(SkippedError, match="no such unit here"):
        Spread(tmp_path).spread(2, body)


_TOY = """
from pathlib import Path
from narrowgauge_lab import distributed
def body(ctx, group):
    (Path({out!r}) / f"pid-{{group.rank}}").write_text(str(os.getpid()))
    ctx.metric("y", group.rank + 1, unit="1", source="computed")
    group.wait()
    if group.rank == 1:
        os.kill({victim}, signal.{signal})
    time.sleep(600)
lab = os.getppid()
row = os.getpid()
distributed.spread(ctx, 2, body)
"""


@pytest.mark.parametrize(
    ("victim", "number", "status"),
    [("lab", "SIGTERM", Status.INTERRUPTED), ("row", "SIGKILL", Status.FAILED)],
)
def test_a_killed_row_leaves_a_record_and_no_process(
    tmp_path: Path, quick_facts: None, victim: str, number: str, status: Status
) -> None:
    toy = _TOY.format(out=str(tmp_path), victim=victim, signal=number)
    outcome, out = run_toy(tmp_path, toy)

    assert outcome.status is status
    (row,) = fold(out).rows()
    assert row.status is status
    assert row.metric("y").values == (1.0,), "what rank 0 had said by then, and only that"
    assert all(gone(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2))


def test_a_profiler_watches_one_process(tmp_path: Path) -> None:
    case = Spread(tmp_path, {"profile": "cprofile"})
    with pytest.raises(UsageError, match="profile=cprofile and -p nproc=2"):
        case.spread(2, lambda ctx, group: None)


def test_a_torch_without_it_is_not_applicable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(NotApplicableError, match="this torch has no gloo"):
        Spread(tmp_path).spread(2, lambda ctx, group: None)
    seen = []
    Spread(tmp_path / "one").spread(1, lambda ctx, group: seen.append(group.sum([2.0])))
    assert seen == [[2.0]], "one process needs none of it"


def spread_over_gpus(case: Spread, nproc: int) -> None:
    """As a row on a GPU would."""

    def spread(ctx: RowContext, group: Group) -> None:
        ctx.device = torch.device("cuda")
        distributed.spread(ctx, nproc, lambda ctx, group: ctx.fact("size_seen", group.size))

    case.spread(1, spread)


@pytest.mark.parametrize(("asked", "gpus"), [(3, 2), (2, 0)])
def test_each_process_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, gpus: int
) -> None:
    monkeypatch.setattr(facts, "in_child", lambda question: ["a card"] * gpus)
    with pytest.raises(NotApplicableError, match=f"nproc={asked} needs a GPU for each") as caught:
        spread_over_gpus(Spread(tmp_path), asked)
    assert "-p nproc=0" in caught.value.next_step


def test_a_process_that_has_counted_its_gpus_cannot_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in what is forked from a process that has asked torch.cuda.is_available().
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ExperimentFileError, match="used the GPU before it spread") as caught:
        spread_over_gpus(Spread(tmp_path), 2)
    assert "has begun to use CUDA or counted GPUs" in caught.value.why


def test_several_processes_do_not_share_their_gpus_with_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "in_child", lambda question: ["a card"] * 2)
    monkeypatch.setenv("NARROWGAUGE_TURNS", str(tmp_path / "turns"))
    with pytest.raises(UsageError, match="2 processes cannot share its GPUs") as caught:
        spread_over_gpus(Spread(tmp_path), 2)
    assert "unset NARROWGAUGE_TURNS" in caught.value.next_step


def test_nproc_0_is_every_gpu_and_one_process_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Spread(tmp_path)
    case.spread(0, lambda ctx, group: None)
    assert case.row().facts["world_size"] == 1
    monkeypatch.setattr(facts, "in_child", lambda question: ["one card"])
    spread_over_gpus(case, 0)
    assert case.row().facts["size_seen"] == 1


def test_torchrun_is_refused_with_the_way_that_works(tmp_path: Path) -> None:
    write_toy(tmp_path / "experiments", "pass")
    wanted = request(tmp_path)
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match="torchrun started 2 labs") as caught:
        session.run(dataclasses.replace(wanted, env=given))

    assert "-p nproc=2" in caught.value.next_step
    assert not (tmp_path / "out").exists()
