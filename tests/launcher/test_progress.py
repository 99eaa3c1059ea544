"""Progress and its ETA come from events alone."""

from __future__ import annotations

import io

import pytest
from launching import tiny_job

from narrowgauge.progress import LineReporter, LiveReporter, Progress, SilentReporter, duration
from narrowgauge_contract.events import Event, EventKind


def event(kind: EventKind, t: float, row: int = 0, **data: object) -> Event:
    return Event(kind, t, 0.0, row, dict(data))


def half_way() -> Progress:
    progress = Progress(tiny_job("precision=fp32,bf16"))
    progress.add(event(EventKind.ROW_START, 100.0, parameters={"precision": "fp32"}))
    progress.add(event(EventKind.ROW_END, 110.0, status="complete"))
    progress.add(event(EventKind.ROW_START, 110.0, 1, parameters={"precision": "bf16"}))
    progress.add(event(EventKind.PROGRESS, 115.0, 1, done=1, total=2, unit="epochs"))
    progress.add(event(EventKind.METRIC, 115.0, 1, name="loss", unit="", values=[2.5]))
    progress.add(event(EventKind.METRIC, 115.0, 1, name="accuracy", unit="%", values=[97.0, 98.5]))
    return progress


def test_the_part_counts_rows_and_what_is_done_of_one() -> None:
    assert half_way().part == 0.75


def test_the_eta_goes_on_as_it_went() -> None:
    assert half_way().eta_s(115.0) == pytest.approx(5.0)
    assert Progress(tiny_job()).eta_s(1.0) is None


def test_no_eta_is_guessed_from_the_first_steps() -> None:
    progress = Progress(tiny_job())
    progress.add(Event(EventKind.RUN_START, 100.0, 0.0, None, {}))
    progress.add(Event(EventKind.ROW_START, 100.0, 0.0, 0, {"parameters": {}}))
    progress.add(Event(EventKind.PROGRESS, 101.0, 0.0, 0, {"done": 1, "total": 10_000}))

    assert progress.eta_s(101.0) is None
    assert progress.eta_s(110.0) is not None


def test_the_line_says_row_axis_figures_and_time() -> None:
    line = half_way().line(115.0)

    assert line.startswith("row 2/2 · precision=bf16 · 1/2 epochs · accuracy 98.50 % · loss 2.5")
    assert line.endswith("75% · about 5 s left")


def test_the_line_has_figures_of_the_row_that_it_names_alone() -> None:
    progress = Progress(tiny_job("precision=fp32,bf16"))
    progress.add(event(EventKind.ROW_START, 100.0, parameters={"precision": "fp32"}))
    progress.add(event(EventKind.PROGRESS, 105.0, done=1, total=1, unit="epochs"))
    progress.add(event(EventKind.METRIC, 105.0, name="accuracy", unit="%", values=[97.0]))
    progress.add(event(EventKind.ROW_END, 110.0, status="complete"))
    between = progress.line(110.0)
    progress.add(event(EventKind.ROW_START, 110.0, 1, parameters={"precision": "bf16"}))
    begun = progress.line(110.0)

    assert between.startswith("row 1/2 · precision=fp32 · 1/1 epochs · accuracy 97.00 % · ")
    assert begun.startswith("row 2/2 · precision=bf16 ·  50% · ")


def _train_and_cut(progress: Progress, row: int, begin: float) -> None:
    """Ten seconds: six of training, and four of cuts that count from nothing."""
    progress.add(event(EventKind.ROW_START, begin, row, parameters={}))
    for second, done in ((3.0, 1), (6.0, 2)):
        progress.add(event(EventKind.PROGRESS, begin + second, row, done=done, total=2))
    progress.add(event(EventKind.PROGRESS, begin + 7.0, row, done=1, total=16, unit="cut"))


def test_a_row_goes_not_back_where_its_next_stretch_begins() -> None:
    progress = Progress(tiny_job("precision=fp32,bf16"))
    _train_and_cut(progress, 0, 100.0)

    assert progress.part == 0.5
    assert progress.eta_s(107.0) is None, "nobody knows what cuts take beside training"
    assert progress.line(107.0).endswith(" 50%")


def test_a_later_row_of_several_stretches_goes_by_the_time_of_those_before() -> None:
    progress = Progress(tiny_job("precision=fp32,bf16"))
    _train_and_cut(progress, 0, 100.0)
    progress.add(event(EventKind.ROW_END, 110.0, status="complete"))
    _train_and_cut(progress, 1, 110.0)

    assert progress.part == pytest.approx(0.85)
    assert progress.eta_s(117.0) == pytest.approx(3.0)
    progress.add(event(EventKind.PROGRESS, 150.0, 1, done=2, total=16, unit="cut"))
    assert progress.part == pytest.approx(0.995), "late, and not done for that"


def test_a_failed_row_shows() -> None:
    progress = half_way()
    progress.add(event(EventKind.ROW_END, 116.0, 1, status="failed"))

    assert "1 failed" in progress.line(116.0)
    assert progress.part == 1.0


def test_a_row_that_failed_at_once_makes_no_other_row_shorter() -> None:
    progress = Progress(tiny_job("precision=fp32,bf16,fp16"))
    progress.add(event(EventKind.ROW_START, 100.0, 0, parameters={}))
    progress.add(event(EventKind.ROW_END, 101.0, 0, status="failed"))
    assert progress.eta_s(101.0) is None, "no row has worked yet"
    progress.add(event(EventKind.ROW_START, 101.0, 1, parameters={}))
    progress.add(event(EventKind.PROGRESS, 111.0, 1, done=1, total=4))

    assert progress.eta_s(111.0) == pytest.approx(30.0 + 40.0)


def test_a_skipped_row_has_not_failed() -> None:
    progress = half_way()
    progress.add(event(EventKind.ROW_END, 116.0, 1, status="skipped"))

    assert "1 skipped" in progress.line(116.0)
    assert "failed" not in progress.line(116.0)


def test_nothing_is_said_of_a_row_before_it_begins_nor_of_a_unit_that_is_none() -> None:
    progress = Progress(tiny_job("precision=fp32,bf16"))
    assert "precision" not in progress.line(0.0)

    progress.add(event(EventKind.ROW_START, 1.0, parameters={"precision": "fp32"}))
    progress.add(event(EventKind.METRIC, 2.0, name="error", unit="1", values=[0.25]))
    assert " · error 0.25 · " in progress.line(2.0)


def test_plain_lines_come_at_most_every_few_seconds() -> None:
    now = [0.0]
    stream = io.StringIO()
    reporter = LineReporter(stream, clock=lambda: now[0])
    reporter.begin(tiny_job())
    reporter.event(event(EventKind.ROW_START, 0.0, parameters={}))
    for tenth in range(200):
        now[0] = tenth / 10
        reporter.event(event(EventKind.PROGRESS, now[0], done=tenth, total=200))
        reporter.tick()

    assert len(stream.getvalue().splitlines()) == 3


def test_the_live_bar_draws_and_ends() -> None:
    stream = io.StringIO()
    reporter = LiveReporter(stream, clock=lambda: 1.0)
    reporter.begin(tiny_job())
    reporter.event(event(EventKind.ROW_START, 0.0, parameters={}))
    reporter.tick()
    reporter.note("a [bold]note[/bold]")
    reporter.end()
    reporter.end()

    assert "a [bold]note[/bold]" in stream.getvalue()


def test_silence_keeps_the_notes() -> None:
    stream = io.StringIO()
    reporter = SilentReporter(stream)
    reporter.begin(tiny_job())
    reporter.tick()
    reporter.note("said")
    reporter.end()

    assert stream.getvalue() == "said\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.6, "5 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")]
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert duration(seconds) == words
