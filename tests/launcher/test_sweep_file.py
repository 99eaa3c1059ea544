"""A sweep's file: what it may say, and what each slip is told."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import tiny_spec

from narrowgauge.errors import (
    BadValueError,
    ExitCode,
    NarrowgaugeError,
    UnknownNameError,
    UsageError,
)
from narrowgauge.sweep.file import Choice, Range, SweepSpec, _domain, check, read_sweep
from narrowgauge.sweep.points import (
    MOST,
    _draw,
    count_of,
    job_of,
    point_of,
    points_of,
    values_of,
    varied,
)
from narrowgauge_contract.parameters import Parameter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GRID = """
[sweep]
experiment = "tiny"
profile = "smoke"
seed = 3

[vary]
width = [4, 8, 16]
precision = ["fp32", "bf16"]

[fixed]
epochs = 2

[slurm]
partition = "gpu"
time = "1:30:00"
exclusive = false
"""


def sweep_of(tmp_path: Path, text: str) -> SweepSpec:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return check(read_sweep(path), tiny_spec())


def test_a_grid_is_read_and_every_point_is_one_job(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, GRID)
    points = points_of(sweep)
    jobs = [job_of(sweep, tiny_spec(), point, "cpu") for point in points]

    assert sweep.file.name == "mine"
    assert (sweep.file.slurm.partition, sweep.file.slurm.time) == ("gpu", 90)
    assert not sweep.file.slurm.exclusive
    assert len({point.key for point in points}) == 6
    got = {(job.parameters["width"], job.parameters["precision"]) for job in jobs}
    assert got == {(w, p) for w in (4, 8, 16) for p in ("fp32", "bf16")}
    assert {job.parameters["epochs"] for job in jobs} == {2}
    assert {job.seed for job in jobs} == {3}
    assert len({job.run_id for job in jobs}) == 6


def test_the_order_is_shuffled_by_the_seed_and_the_same_again(tmp_path: Path) -> None:
    wide = GRID.replace("[4, 8, 16]", str(list(range(1, 30))))
    one, again = points_of(sweep_of(tmp_path, wide)), points_of(sweep_of(tmp_path, wide))
    other = points_of(sweep_of(tmp_path, wide.replace("seed = 3", "seed = 4")))

    assert one == again
    assert [p.values for p in one] != sorted(p.values for p in one)
    assert {p.values for p in one} == {p.values for p in other}


def test_a_grid_that_grew_keeps_the_keys_of_its_points(tmp_path: Path) -> None:
    before = {p.key for p in points_of(sweep_of(tmp_path, GRID))}
    after = {p.key for p in points_of(sweep_of(tmp_path, GRID.replace("[4, 8,", "[2, 4, 8,")))}
    other = {p.key for p in points_of(sweep_of(tmp_path, GRID.replace("epochs = 2", "epochs = 3")))}

    assert before < after
    assert not before & other


RANDOM = """
[sweep]
experiment = "tiny"
method = "random"
runs = 40

[vary]
width = {{ low = 1, high = 64{more} }}
precision = ["fp32", "bf16"]
"""


@pytest.mark.parametrize("more", ["", ", log = true", ", step = 3"])
def test_random_points_are_distinct_within_bounds_and_a_longer_sweep_goes_on(
    tmp_path: Path, more: str
) -> None:
    text = RANDOM.format(more=more)
    sweep = sweep_of(tmp_path, text)
    points = points_of(sweep)
    longer = points_of(sweep_of(tmp_path, text.replace("runs = 40", "runs = 60")))

    assert len({p.values for p in points}) == len(points)
    assert longer[: len(points)] == points
    for point in points:
        values = dict(varied(sweep, point))
        assert 1 <= int(values["width"]) <= 64
        assert isinstance(values["width"], int)
        assert point_of(sweep, values) == point


def test_random_gives_no_more_points_than_there_are(tmp_path: Path) -> None:
    text = RANDOM.format(more="").replace("high = 64", "high = 3")
    assert len(points_of(sweep_of(tmp_path, text))) == 6


def test_a_range_with_a_step_is_its_values() -> None:
    assert list(values_of(Range(1, 2, False, step=0.25))) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert list(values_of(Range(2, 9, True, step=3))) == [2, 5, 8]
    assert list(values_of(Choice(("a", "b")))) == ["a", "b"]


def test_ten_thousand_runs_are_planned_in_two_seconds_and_200_megabytes(tmp_path: Path) -> None:
    """The stated figures, of processor time and of what the plan holds; every Job is resolved."""
    text = f"""
[sweep]
experiment = "tiny"
profile = "smoke"
[vary]
width = {list(range(1, 101))}
epochs = {list(range(1, 101))}
"""
    sweep = sweep_of(tmp_path, text)
    began = time.process_time()
    points = points_of(sweep)
    spec = tiny_spec()
    assert sum(len(job_of(sweep, spec, point, "cpu").rows) for point in points) == 10_000
    seconds = time.process_time() - began
    tracemalloc.start()
    assert len(points_of(sweep)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert seconds <= 2.0
    assert peak <= 200e6


@pytest.mark.parametrize(
    ("before", "after", "kind", "said"),
    [
        ("[vary]", "[very]", UnknownNameError, "unknown key 'very'"),
        ("width = [", "widht = [", UnknownNameError, "widht"),
        ('experiment = "tiny"', "", UsageError, "names no experiment"),
        ("[4, 8, 16]", "[4, 8.5]", BadValueError, "does not take '8.5'"),
        ("[4, 8, 16]", "{ low = 1, high = 9 }", BadValueError, "a grid needs one"),
        ("[4, 8, 16]", "{ low = 9, high = 1, step = 1 }", BadValueError, "no range"),
        ("[4, 8, 16]", "{ low = 1 }", BadValueError, "has no 'high'"),
        ("[4, 8, 16]", "{ low = 1, high = 9, lgo = true }", UnknownNameError, "lgo"),
        (
            "[4, 8, 16]",
            "{ low = 1, high = 9, step = 0.5 }",
            BadValueError,
            "step = 1, or a greater",
        ),
        ("[4, 8, 16]", "{ low = 1, high = 9, step = inf }", BadValueError, "step is not a finite"),
        ("[4, 8, 16]", "{ low = 1, high = 9, step = nan }", BadValueError, "step is not a finite"),
        ("[4, 8, 16]", "{ low = 1, high = 9, step = -1 }", BadValueError, "not a positive number"),
        ("[4, 8, 16]", "{ low = 1, high = 9, step = true }", BadValueError, "not a positive"),
        ("[4, 8, 16]", "{ low = 1, high = 9, log = 1 }", BadValueError, "neither true nor false"),
        ("[4, 8, 16]", f"{{ low = 1, high = {10**400}, step = 1 }}", BadValueError, "not a finite"),
        ("[4, 8, 16]", "4", BadValueError, "neither a list nor a range"),
        ("[4, 8, 16]", "[]", BadValueError, "neither a list nor a range"),
        ('["fp32", "bf16"]', "{ low = 1, high = 2, step = 1 }", BadValueError, "of type choice"),
        ("epochs = 2", "width = 2", UsageError, "both varies and is fixed"),
        ("seed = 3", "seed = -1", BadValueError, "seed"),
        ("seed = 3", 'method = "gird"', UnknownNameError, "gird"),
        ("seed = 3", 'method = "random"', BadValueError, "needs one: runs"),
        ("seed = 3", 'method = "optuna"\nruns = 3', UsageError, "what Optuna is to seek"),
        ("seed = 3", "profile = 3", UsageError, "not TOML"),
        ('partition = "gpu"', 'partitoin = "gpu"', UnknownNameError, "Slurm setting"),
        ("exclusive = false", "exclusive = 3", BadValueError, "neither yes nor no"),
        ("[sweep]", "[sweep", UsageError, "not TOML"),
        ("[vary]", "vary = 3\n[x]", UsageError, "x"),
    ],
)
def test_each_slip_is_named(
    tmp_path: Path, before: str, after: str, kind: type[NarrowgaugeError], said: str
) -> None:
    assert before in GRID
    with pytest.raises(kind) as caught:
        sweep_of(tmp_path, GRID.replace(before, after, 1))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("range_", "said"),
    [
        ("{ low = 0.0, high = inf, step = 1 }", "high is not a finite number"),
        ("{ low = -inf, high = 1.0, step = 1 }", "low is not a finite number"),
        ("{ low = -1e308, high = 1e308 }", "more than can be counted"),
        ("{ low = 0.0, high = 1e300, step = 1e-300 }", "more than can be counted"),
    ],
)
def test_a_range_without_an_end_is_refused(range_: str, said: str) -> None:
    parameter = Parameter(name="rate", type="float", default=0.0, axis="row", help="A number.")
    with pytest.raises(BadValueError, match=said) as caught:
        _domain(parameter, tomllib.loads(f"v = {range_}")["v"], "random")
    assert caught.value.next_step
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_tiny_step_is_counted_and_not_listed() -> None:
    fine = Range(0.0, 1e6, False, step=1e-9)
    assert count_of(fine) > 9e14
    assert 0.0 <= _draw(fine, random.Random(0)) <= 1e6  # type: ignore[operator]


def test_a_grid_beyond_reason_is_refused(tmp_path: Path) -> None:
    text = GRID.replace("[4, 8, 16]", "{ low = 1, high = 6000, step = 1 }")
    text = text.replace("epochs = 2", "")
    text = text.replace("[vary]", "[vary]\nepochs = { low = 1, high = 100, step = 1 }")
    assert MOST == 1_000_000
    with pytest.raises(UsageError, match="1200000 points"):
        points_of(sweep_of(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_sweep(tmp_path / "none.toml")


@settings(max_examples=30)
@given(st.text(max_size=120))
def test_whatever_it_says_it_is_read_or_refused(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "s.toml"
    path.write_text(f'[sweep]\nexperiment = "tiny"\n[vary]\n{text}', encoding="utf-8")
    try:
        points_of(check(read_sweep(path), tiny_spec()))
    except NarrowgaugeError:
        return
