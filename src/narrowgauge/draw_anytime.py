"""The picture of a network that answers more than once: its exits, and what could be had of them.

Drawn from the answers that the run kept (`logits.npz`), one picture for each configuration. A
ladder's answers are kept as those of exits are; its picture speaks of rungs, and of networks of
which one is run, where the fact `ladder` says that none goes on with what another has done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from narrowgauge import statistics
from narrowgauge.draw_style import COLOURS, foot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from narrowgauge.store import RunFolder
    from narrowgauge_contract.outcome import Row
    from narrowgauge_contract.record import Record
    from narrowgauge_scores.side_file import RunLogits

__all__ = ["anytime_pictures"]

#: More configurations go undrawn; `narrowgauge anytime-score` has them on one axis.
_MOST = 8
_EXITS, _BUDGETED, _ORACLE, _PLAIN = COLOURS[0], COLOURS[1], COLOURS[2], "#303030"


@dataclasses.dataclass(frozen=True)
class _Words:
    """What the lines are called. `apart`: answers are alternatives, each of which starts anew; the
    sums of their costs, which whoever asks one after another pays, are then in no line."""

    each: str
    oracle: str
    budgeted: str
    stopped: str
    profile: str
    apart: bool = False


_OF_EXITS = _Words(
    each="all leave at an exit",
    oracle="if it knew when to leave (oracle)",
    budgeted="leaving by entropy",
    stopped="stopped after so many milliseconds (logarithmic)",
    profile="performance profile on",
)
#: Rungs of which each goes on with what the one before has done, as a further member does.
_OF_RUNGS = dataclasses.replace(
    _OF_EXITS,
    each="one rung for all images",
    oracle="if it knew when to stop (oracle)",
    budgeted="stopping by entropy",
)
_OF_ALTERNATIVES = dataclasses.replace(
    _OF_RUNGS,
    oracle="the cheapest rung that is right (oracle)",
    budgeted="",
    stopped="milliseconds that a rung may take (logarithmic)",
    profile="rung done in time, on",
    apart=True,
)


def anytime_pictures(
    record: Record, folder: RunFolder
) -> Iterator[tuple[str, tuple[float, float], Callable[[Figure], None]]]:
    """For each configuration its label, the picture's inches, and what paints it: from its first
    valid repeat that kept its answers. Raises DamagedRecordError."""
    found = [each for each in statistics.configurations(record.rows) if each.valid]
    names = statistics.varying(found)
    drawn = 0
    for each in found:
        first = _first(each, record, folder)
        if first is not None and drawn < _MOST:
            drawn += 1
            run, words = first
            panels = 1 if run.latency is None else 2
            yield each.label(names), (1.6 + 5.6 * panels, 4.6), _painter(run, words)


def _first(
    found: statistics.Configuration, record: Record, folder: RunFolder
) -> tuple[RunLogits, _Words] | None:
    from narrowgauge.anytime.gather import answers_of

    for row in found.valid:
        answered, _ = answers_of(record, row, folder)
        if answered is not None:
            return answered.logits, _words_for(row)
    return None


def _words_for(row: Row) -> _Words:
    ladder: Any = row.facts.get("ladder")
    if not isinstance(ladder, Mapping):
        return _OF_EXITS
    return _OF_ALTERNATIVES if ladder.get("cumulative") is False else _OF_RUNGS


def _each_alone(run: RunLogits) -> RunLogits:
    """Alternatives at what each costs by itself, where the file has sums up to it."""
    import numpy as np

    summed = run.test.macs
    own = None if summed is None else np.diff(summed, axis=0, prepend=0.0)
    test = dataclasses.replace(run.test, macs=own)
    return dataclasses.replace(run, test=test, cumulative_macs=run.direct_macs)


def _painter(run: RunLogits, called: _Words) -> Callable[[Figure], None]:
    def paint(picture: Figure) -> None:
        panels = picture.subplots(1, 1 if run.latency is None else 2, squeeze=False)[0]
        _against_macs(panels[0], run, called)
        if run.latency is not None:
            _profile(panels[1], run, called)
        words = [" ".join(filter(None, (run.family, run.variant))), f"seed {run.seed}"]
        words.append(f"{run.test.images:,} test images of {run.data}")
        foot(picture, " · ".join(words))

    return paint


def _against_macs(panel: Axes, run: RunLogits, called: _Words) -> None:
    from narrowgauge.anytime.picture import plain_ticks
    from narrowgauge_scores.points import budgeted_points, exit_points, oracle_points

    exits = exit_points(run)
    oracle = oracle_points(_each_alone(run) if called.apart else run)
    # Of alternatives it pays for every rung before, and goes far beyond the dearest of them.
    budgeted = () if called.apart else budgeted_points(run)
    x, y = [p.macs / 1e6 for p in exits], [100 * p.accuracy for p in exits]
    panel.plot([p.macs / 1e6 for p in oracle], [100 * p.accuracy for p in oracle], "--",
               color=_ORACLE, marker="^", markersize=4, linewidth=1.0,
               label=called.oracle)  # fmt: skip
    if budgeted:
        panel.plot([p.macs / 1e6 for p in budgeted], [100 * p.accuracy for p in budgeted], ":",
                   color=_BUDGETED, marker=".", markersize=4, linewidth=1.0,
                   label=called.budgeted)  # fmt: skip
    panel.step(x, y, where="post", color=_EXITS, linewidth=1.8)
    panel.plot(x, y, "o", color=_EXITS, markersize=6, label=called.each)
    if run.base_macs is not None and run.base_accuracy is not None:
        panel.plot([run.base_macs / 1e6], [run.base_accuracy], "*", color=_PLAIN, markersize=11,
                   label="plain network")  # fmt: skip
    panel.set_xscale("log")
    panel.margins(x=0.08, y=0.1)
    plain_ticks(panel.xaxis)
    panel.set_xlabel("million multiply-accumulates per image (logarithmic)")
    panel.set_ylabel("test accuracy (%)")
    # Above the axes: no corner of them is empty in every run.
    panel.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=8)


def _profile(panel: Axes, run: RunLogits, called: _Words) -> None:
    """Q(t): what somebody has who stops it at a time, or has that much for one of alternatives."""
    import numpy as np

    from narrowgauge.anytime.picture import plain_ticks
    from narrowgauge_scores.answers import accuracies
    from narrowgauge_scores.quality import performance_profile
    from narrowgauge_scores.scalars import chance_of

    assert run.latency is not None
    times = np.geomspace(run.latency.min() / 1.5, run.latency.max() * 1.5, 400)
    expected = performance_profile(run.latency, accuracies(run.test), times, chance=chance_of(run))
    panel.plot(1e3 * times, 100 * expected, color=_EXITS, linewidth=1.8)
    panel.set_xscale("log")
    plain_ticks(panel.xaxis)
    panel.set_xlabel(called.stopped)
    panel.set_ylabel("expected test accuracy (%)")
    panel.set_title(f"{called.profile} {run.device or 'an unnamed device'}", fontsize=10,
                    loc="left")  # fmt: skip
