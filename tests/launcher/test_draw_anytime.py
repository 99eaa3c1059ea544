"""The picture of answers that cost more and more: of exits, and of a ladder's rungs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from anytime_score_cases import answers, latencies, recorded

from narrowgauge.draw_anytime import anytime_pictures
from narrowgauge_scores.side_file import RunLogits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALONE = (4_000_000, 5_000_000, 6_000_000)
#: What the lab says of rungs that go on with each other, and of alternatives.
CUMULATIVE: dict[str, Any] = {"rungs": 3, "cumulative": True, "seconds": "each alone"}
APART = {**CUMULATIVE, "cumulative": False}


def _ladder(**changes: Any) -> RunLogits:
    """Three networks, each of which starts anew: costs with the others before are sums."""
    run = answers(macs=tuple(np.cumsum(ALONE).tolist()), **changes)
    return dataclasses.replace(run, direct_macs=np.array(ALONE, np.int64))


def _drawn(tmp_path: Path, run: RunLogits, **facts: Any) -> Figure:
    from matplotlib.figure import Figure

    folder = recorded(tmp_path, run)
    record = folder.record()
    (row,) = record.rows
    record = dataclasses.replace(record, rows=(dataclasses.replace(row, facts=facts),))
    ((_, size, paint),) = anytime_pictures(record, folder)
    picture = Figure(figsize=size)
    paint(picture)
    return picture


def _lines(picture: Figure) -> dict[str, Any]:
    """The first panel's lines by what its legend calls them."""
    handles, labels = picture.axes[0].get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ["if it knew when to leave (oracle)", "leaving by entropy", "all leave at an exit"]),
        (
            {"ladder": CUMULATIVE},
            ["if it knew when to stop (oracle)", "stopping by entropy", "one rung for all images"],
        ),
        (
            {"ladder": APART},
            ["the cheapest rung that is right (oracle)", "one rung for all images"],
        ),
        ({"ladder": "none"}, [
            "if it knew when to leave (oracle)", "leaving by entropy", "all leave at an exit",
        ]),
    ],
)  # fmt: skip
def test_exits_are_left_and_rungs_are_run(
    tmp_path: Path, facts: dict[str, Any], words: list[str]
) -> None:
    assert list(_lines(_drawn(tmp_path, _ladder(), **facts))) == words


@pytest.mark.parametrize("each_image", [False, True])
def test_no_line_of_alternatives_adds_up_their_costs(tmp_path: Path, each_image: bool) -> None:
    run = _ladder()
    if each_image:
        macs = np.repeat(np.cumsum(ALONE)[:, np.newaxis], run.test.images, axis=1)
        test = dataclasses.replace(run.test, macs=macs.astype(np.float64))
        run = dataclasses.replace(run, test=test)

    lines = _lines(_drawn(tmp_path, run, ladder=APART))

    costs = [np.asarray(line.get_xdata()) for line in lines.values()]
    assert min(each.min() for each in costs) == 4.0
    assert max(each.max() for each in costs) == 6.0
    # Of images that a dearer rung alone gets right, the oracle pays for that one and no other.
    oracle = np.asarray(lines["the cheapest rung that is right (oracle)"].get_xdata())
    assert 4.0 < oracle[-1] < 6.0


def test_time_is_what_a_rung_may_take_and_what_exits_are_stopped_after(tmp_path: Path) -> None:
    run = _ladder(latency=latencies(1, 2, 4))

    def profile(name: str, **facts: Any) -> tuple[str, str]:
        panel = _drawn(tmp_path / name, run, **facts).axes[1]
        return panel.get_xlabel(), panel.get_title(loc="left")

    label, title = profile("exits")
    assert label.startswith("stopped after")
    assert title.startswith("performance profile on")
    label, title = profile("apart", ladder=APART)
    assert label.startswith("milliseconds that a rung may take")
    assert title.startswith("rung done in time, on")
