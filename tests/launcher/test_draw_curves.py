"""Curves along an index: what its places are called, and how curves are told apart and scaled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from result_cases import SPEC, job, record_of

from narrowgauge import draw
from narrowgauge.catalog import experiment_names, load_experiment
from narrowgauge.draw_style import COLOURS
from narrowgauge.store import Store
from narrowgauge_contract.outcome import Metric
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
BLOCKS = ["stem", "body", "head"]


def _record(tmp_path: Path, values: tuple[float, ...] = (3.0, 2.0, 1.0), **facts: Any) -> Record:
    """The toy's, whose rows all have one metric, `loss`, and these facts."""
    record = record_of(Store(tmp_path).new_run(job()))
    metrics = (Metric("loss", "nat", "computed", values, "block"),)
    rows = [dataclasses.replace(row, metrics=metrics, facts=facts) for row in record.rows]
    return dataclasses.replace(record, rows=tuple(rows))


def _drawn(record: Record, **more: Any) -> Figure:
    drawing = {"name": "d", "kind": "curve", "title": "D", "metrics": ["loss"], **more}
    spec = parse_spec({**SPEC, "draw": [drawing]})
    ((_, picture),) = draw._curves(spec.drawings[0], record)
    return picture


def _ticks(panel: Axes) -> tuple[list[float], list[str]]:
    return list(panel.get_xticks()), [tick.get_text() for tick in panel.get_xticklabels()]


def test_places_have_the_names_that_rows_give_them(tmp_path: Path) -> None:
    record = _record(tmp_path, blocks=BLOCKS)

    (panel,) = _drawn(record, x="block", ticks={"fact": "blocks"}).axes

    assert _ticks(panel) == ([1, 2, 3], BLOCKS)
    assert panel.get_xlabel() == "block"
    (panel,) = _drawn(record, x="block").axes
    assert "stem" not in _ticks(panel)[1]


@pytest.mark.parametrize("unlike", ["two names", "fewer", "none"])
def test_places_are_counted_where_rows_do_not_agree_on_their_names(
    tmp_path: Path, unlike: str
) -> None:
    record = _record(tmp_path, blocks=BLOCKS[:2] if unlike == "fewer" else BLOCKS)
    facts = {"two names": {"blocks": BLOCKS[::-1]}, "none": {}}.get(unlike)
    if facts is not None:
        changed = dataclasses.replace(record.rows[-1], facts=facts)
        record = dataclasses.replace(record, rows=(*record.rows[:-1], changed))

    (panel,) = _drawn(record, x="block", ticks={"fact": "blocks"}).axes

    assert "stem" not in _ticks(panel)[1]
    assert panel.get_xlabel() == "block, counted from the first"


def test_long_names_stand_upright_and_of_many_some_are_left_out(tmp_path: Path) -> None:
    def panel_of(names: list[str]) -> Axes:
        values = tuple(map(float, range(len(names))))
        record = _record(tmp_path / str(len(names)), values, blocks=names)
        (panel,) = _drawn(record, ticks={"fact": "blocks"}).axes
        return panel

    few, some, many = (
        panel_of([f"{name}{number}" for number in range(count)])
        for name, count in (("b", 5), ("layer", 8), ("layer", 90))
    )

    assert [label.get_rotation() for label in few.get_xticklabels()] == [0] * 5
    assert [label.get_rotation() for label in some.get_xticklabels()] == [90] * 8
    assert _ticks(many)[0] == list(range(1, 91, 3))
    assert _ticks(many)[1][-1] == "layer87"


def test_lines_that_coincide_do_not_hide_each_other(tmp_path: Path) -> None:
    """Each has a marker of its own that lets those below be seen, which are larger."""
    (panel,) = _drawn(_record(tmp_path, (2.0, 1.0))).axes

    below, above = [line for line in panel.get_lines() if line.get_label() in _legend(panel)]
    assert (below.get_marker(), above.get_marker()) == ("o", "s")
    assert below.get_markerfacecolor() == above.get_markerfacecolor() == "none"
    assert below.get_markersize() > above.get_markersize()


def test_long_lines_have_no_markers_and_one_alone_is_of_dots(tmp_path: Path) -> None:
    (long,) = _drawn(_record(tmp_path / "long", (1.0,) * 13)).axes
    one = {"parameter": "precision", "values": ["bf16"]}
    (alone,) = _drawn(_record(tmp_path / "alone", (2.0, 1.0)), **one).axes

    assert {line.get_marker() for line in long.get_lines()} == {""}
    assert [line.get_markerfacecolor() for line in alone.get_lines() if line.get_marker()] == [
        COLOURS[0]
    ]


def test_one_of_a_runs_configurations_is_named_in_the_title(tmp_path: Path) -> None:
    record = _record(tmp_path)
    one = {"parameter": "precision", "values": ["bf16"]}

    assert _drawn(record, **one).get_suptitle() == "D · precision=bf16"
    assert _drawn(record).get_suptitle() == "D"
    only = dataclasses.replace(
        record, rows=tuple(row for row in record.rows if row.parameters["precision"] == "bf16")
    )
    assert _drawn(only, **one).get_suptitle() == "D"


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((0.002, 0.01, 1.4), "log"),
        ((0.02, 0.1, 1.4), "linear"),
        ((0.0, 0.01, 1.4), "linear"),
        ((-0.002, 0.01, 1.4), "linear"),
        ((float("nan"), 0.001, 1.4), "log"),
        ((float("inf"), 0.1, 1.4), "linear"),
        ((float("nan"),), "linear"),
    ],
)
def test_an_axis_is_logarithmic_where_small_values_would_look_like_none(
    tmp_path: Path, values: tuple[float, ...], scale: str
) -> None:
    picture = _drawn(_record(tmp_path, values))
    picture.draw_without_rendering()
    (panel,) = picture.axes

    assert panel.get_yscale() == scale
    assert panel.get_ylabel().endswith(", logarithmic") == (scale == "log")
    # No formulas, which are written out as they stand.
    assert not any("$" in tick.get_text() for tick in panel.get_yticklabels())


def test_logarithmic_axes_are_shared_by_what_is_seen_of_curves_on_them(tmp_path: Path) -> None:
    def measured(**metrics: tuple[float, ...]) -> list[tuple[str, tuple[float, float]]]:
        record = _record(tmp_path / "-".join(metrics))
        listed = tuple(Metric(n, "1", "computed", v, "block") for n, v in metrics.items())
        rows = tuple(dataclasses.replace(row, metrics=listed) for row in record.rows)
        record = dataclasses.replace(record, rows=rows)
        panels = _drawn(record, metrics=list(metrics)).axes
        return [(panel.get_yscale(), panel.get_ylim()) for panel in panels]

    (wide, limits), (other, others) = measured(first=(1e-5, 1.0), last=(1e-4, 0.1))
    assert (wide, other, limits) == ("log", "log", others)
    (wide, limits), (other, others) = measured(first=(1e-5, 1.0), flat=(0.5, 0.9))
    assert (wide, other) == ("log", "linear")
    assert others[0] > limits[0]


def _legend(panel: Axes) -> list[str]:
    return panel.get_legend_handles_labels()[1]


@pytest.mark.parametrize("name", experiment_names(EXPERIMENTS))
def test_a_fact_that_names_places_is_written_by_its_experiment(name: str) -> None:
    spec = load_experiment(EXPERIMENTS, name)
    facts = {each.ticks.fact for each in spec.drawings if each.ticks and each.ticks.fact}
    code = "".join(path.read_text() for path in (EXPERIMENTS / name).glob("*.py"))

    assert all(f'ctx.fact("{fact}", ' in code for fact in facts)


@pytest.mark.parametrize("name", experiment_names(EXPERIMENTS))
def test_units_stand_in_round_brackets_as_on_axes_without_words_of_their_own(name: str) -> None:
    drawings = load_experiment(EXPERIMENTS, name).drawings

    assert not [each.name for each in drawings if "[" in each.x + each.y]
