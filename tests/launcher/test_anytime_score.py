"""`narrowgauge anytime-score`, from recorded runs to its table, files and pictures."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anytime_score_cases import MACS, answers, latencies, recorded, with_samples
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from narrowgauge.anytime import picture
from narrowgauge.anytime.families import families_of
from narrowgauge.anytime.gather import gather
from narrowgauge.anytime.picture import draw_scoring
from narrowgauge.anytime.scoring import Scoring, score
from narrowgauge.anytime.showing import print_scoring, scoring_csv, scoring_json
from narrowgauge.cli.app import run_program
from narrowgauge.errors import UsageError
from narrowgauge.store import RunFolder
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_scores.scalars import area_of, range_of
from narrowgauge_scores.side_file import RunLogits


def _scored(*folders: RunFolder) -> Scoring:
    return score(gather(folders))


def _told(found: Scoring, width: int = 200) -> str:
    stream = io.StringIO()
    print_scoring(found, Console(file=stream, width=width))
    return stream.getvalue()


def _verdicts(found: Scoring) -> list[str]:
    """The last column of the table of pairs."""
    lines = _told(found).partition("told apart")[2].splitlines()[2:]
    return [line.split()[-1] for line in lines[: len(found.pairs)]]


def _strict(text: str) -> Any:
    """JSON as the standard has it, without NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_seeds_make_a_family_and_systems_make_several(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, answers("toynet", seed=seed), number=seed) for seed in (2, 0, 1)]
    folders.append(recorded(tmp_path, answers("other", 0.7), number=9))
    found = _scored(*folders)

    toynet, other = found.families
    assert (toynet.label, other.label) == ("toynet", "other")
    assert toynet.family.seeds == (0, 1, 2)
    runs = toynet.family.runs
    expected = np.mean([area_of(run, found.range) for run in runs])
    assert toynet.macs.area.value == pytest.approx(expected)
    assert toynet.figures["area"].mean == pytest.approx(expected)
    assert toynet.figures["area"].seeds == 3
    assert toynet.figures["area"].least <= toynet.figures["area"].mean
    assert toynet.macs.area.low < expected < toynet.macs.area.high
    assert toynet.macs.costs == MACS
    assert found.range == range_of(runs[0])


def test_two_families_are_told_apart_pairwise(tmp_path: Path) -> None:
    good, bad = answers("good", 1.2), answers("bad", 0.6)
    found = _scored(recorded(tmp_path, good, number=1), recorded(tmp_path, bad, number=2))

    (pair,) = found.pairs
    assert (pair.one, pair.other, pair.over) == ("good", "bad", "MACs")
    difference = found.families[0].macs.area.value - found.families[1].macs.area.value
    assert pair.difference.value == pytest.approx(difference)
    assert pair.difference.excludes_zero
    assert _verdicts(found) == ["yes"]


def test_a_family_is_not_told_apart_from_itself(tmp_path: Path) -> None:
    one, same = answers("one"), answers("same")
    found = _scored(recorded(tmp_path, one, number=1), recorded(tmp_path, same, number=2))

    assert not found.pairs[0].difference.excludes_zero
    assert _verdicts(found) == ["no"]


def test_nothing_is_told_apart_by_times(tmp_path: Path) -> None:
    """Two rows of one network take times that differ by more than their test images do."""
    slow, fast = (
        answers(name, latency=latencies(scale, 2 * scale, 4 * scale), device="a CPU")
        for name, scale in (("slow", 2.0), ("fast", 1.0))
    )
    found = _scored(recorded(tmp_path, slow, number=1), recorded(tmp_path, fast, number=2))

    by_macs, by_time = found.pairs
    assert (by_macs.over, by_time.over) == ("MACs", "latency")
    assert by_time.difference.excludes_zero
    assert by_time.told_apart is None
    assert _verdicts(found) == ["no", "–"]
    assert scoring_json(found)["pairs"][1]["told_apart"] is None


def test_eighty_columns_hold_the_tables_and_every_name_whole(tmp_path: Path) -> None:
    names = [f"family number {n} of a rather long name, by a recipe [of] its own" for n in range(4)]
    took = {"latency": latencies(1.0, 2.0, 4.0), "device": "a CPU"}
    folders = [recorded(tmp_path, answers(name, **took), number=n) for n, name in enumerate(names)]
    text = _told(_scored(*folders), 80)

    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(name in text for name in names)
    assert "\\" not in text
    assert "…" not in text
    for heading in ("seeds", "exits", "last exit (%)", "area over time", "own last", "AUROC"):
        assert heading in text


def test_images_in_another_order_are_paired_by_their_numbers(tmp_path: Path) -> None:
    plain = answers("plain")
    order = np.random.default_rng(0).permutation(plain.test.images)
    test = plain.test
    shuffled = dataclasses.replace(
        plain,
        family="shuffled",
        test=dataclasses.replace(
            test,
            logits=test.logits[:, order],
            labels=test.labels[order],
            samples=test.samples[order],
        ),
    )
    found = _scored(recorded(tmp_path, plain, number=1), recorded(tmp_path, shuffled, number=2))

    assert found.pairs[0].difference.low == found.pairs[0].difference.high == 0.0


_OTHERS: dict[str, dict[str, Any]] = {
    "mnist": {"data": "mnist"},
    "cifar10 (made up)": {"synthetic": True},
    "200 test images": {"images": 200},
}


@pytest.mark.parametrize("words", list(_OTHERS))
def test_runs_of_different_tests_go_on_no_common_axis(tmp_path: Path, words: str) -> None:
    other = answers("other", **_OTHERS[words])
    folders = recorded(tmp_path, answers(), number=1), recorded(tmp_path, other, number=2)
    with pytest.raises(UsageError, match="no common axis") as told:
        gather(folders)

    assert words in told.value.why
    assert folders[1].name in told.value.why
    assert "300 test images of cifar10" in told.value.why
    assert told.value.next_step


def test_other_images_of_the_same_set_are_another_test(tmp_path: Path) -> None:
    plain = answers()
    other = with_samples(plain, np.arange(100, 400))
    folders = recorded(tmp_path, plain, number=1), recorded(tmp_path, other, number=2)
    with pytest.raises(UsageError) as told:
        gather(folders)

    assert "200 are the same" in told.value.why


def test_other_labels_of_the_same_images_are_another_test(tmp_path: Path) -> None:
    plain = answers()
    labels = (plain.test.labels + 1) % 4
    other = dataclasses.replace(plain, test=dataclasses.replace(plain.test, labels=labels))
    folders = recorded(tmp_path, plain, number=1), recorded(tmp_path, other, number=2)
    with pytest.raises(UsageError) as told:
        gather(folders)

    assert "other labels" in told.value.why


def test_rows_without_answers_are_named_and_left_out(tmp_path: Path) -> None:
    folder = recorded(tmp_path, answers(), None, number=1)
    invalid = recorded(tmp_path, answers(), number=2, reasons=("it diverged",))
    found = _scored(folder, invalid)

    assert len(found.families) == 1
    assert any("row 1: it kept no logits.npz" in note for note in found.notes)
    assert any("not valid: it diverged" in note for note in found.notes)


def test_no_answers_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no row of these runs") as told:
        gather([recorded(tmp_path, None)])

    assert "kept no logits.npz" in told.value.why


def test_a_changed_side_file_is_an_error(tmp_path: Path) -> None:
    folder = recorded(tmp_path, answers())
    path = folder.out / "row-0" / "logits.npz"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(DamagedRecordError, match="missing or was changed"):
        gather([folder])


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    folder = recorded(tmp_path, answers())

    assert len(gather([folder, RunFolder(folder.path)]).answered) == 1


def test_a_seed_that_ran_twice_counts_once_and_is_said(tmp_path: Path) -> None:
    first, again = (recorded(tmp_path, answers(), number=number) for number in (1, 2))
    families, dropped = families_of(gather([first, again]).answered)

    assert [row.run_id for row in families[0].rows] == [again.name]
    assert first.name in dropped[0]


def test_what_differs_in_a_parameter_is_another_family_called_by_it(tmp_path: Path) -> None:
    found = _scored(recorded(tmp_path, answers(), answers(seed=1)))

    assert [each.label for each in found.families] == ["toynet, system=a", "toynet, system=b"]


def test_what_costs_differently_is_another_family_with_a_number(tmp_path: Path) -> None:
    dear = answers(macs=(500_000, 2_000_000, 9_000_000))
    found = _scored(recorded(tmp_path, answers(), number=1), recorded(tmp_path, dear, number=2))

    assert [each.label for each in found.families] == ["toynet (1)", "toynet (2)"]


def test_one_seed_is_said_to_be_one(tmp_path: Path) -> None:
    found = _scored(recorded(tmp_path, answers()))

    assert any("one seed only" in note for note in found.notes)
    assert found.pairs == ()


def test_latencies_of_one_device_make_a_second_axis(tmp_path: Path) -> None:
    fast = answers("fast", latency=latencies(1, 2, 4), device="board")
    slow = answers("slow", latency=latencies(2, 4, 8), device="board")
    untimed = answers("untimed")
    folders = [recorded(tmp_path, run, number=n) for n, run in enumerate((fast, slow, untimed))]
    found = _scored(*folders)

    assert found.device == "board"
    assert found.latency_range is not None
    assert found.latency_range.low == pytest.approx(0.001, rel=0.11)
    assert found.latency_range.high == pytest.approx(0.008, rel=0.11)
    over = {(p.one, p.other): p.difference for p in found.pairs if p.over == "latency"}
    assert over[("fast", "slow")].low > 0
    assert len(over) == 1
    assert any("without latencies: untimed" in note for note in found.notes)


def test_latencies_of_two_devices_go_on_no_common_axis(tmp_path: Path) -> None:
    one = answers("one", latency=latencies(1, 2, 4), device="board")
    # "cpu" is named by the record.
    other = answers("other", latency=latencies(1, 2, 4), device="cpu")
    found = _scored(recorded(tmp_path, one, number=1), recorded(tmp_path, other, number=2))

    assert found.latency_range is None
    assert any("EPYC, 2 threads, board" in note for note in found.notes)
    assert all(pair.over == "MACs" for pair in found.pairs)


def test_made_up_data_is_scored_on_what_its_runs_span_and_says_so(tmp_path: Path) -> None:
    found = _scored(recorded(tmp_path, answers(synthetic=True, data="synthetic")))

    assert (found.range.low, found.range.high) == (MACS[0], MACS[-1])
    assert "made up" in _told(found)


def test_a_static_network_is_what_others_are_held_against(tmp_path: Path) -> None:
    plain = answers("plain", 0.5, exits=1, macs=(5_000_000,))
    found = _scored(recorded(tmp_path, answers(), number=1), recorded(tmp_path, plain, number=2))
    gains = {each.label: each.static_gain for each in found.families}

    assert gains["plain"] is None
    best = max(e.value for e in found.families[0].macs.accuracies)
    static = found.families[1].macs.accuracies[0].value
    assert gains["toynet"] is not None
    assert gains["toynet"] >= best - static


def test_json_has_everything_and_no_nan(tmp_path: Path) -> None:
    timed = answers(latency=latencies(1, 2, 4), device="board")
    # Its first exit is always right: of those that were wrong there, nothing can be said.
    right = np.zeros_like(timed.test.logits)
    np.put_along_axis(right, timed.test.labels[np.newaxis, :, np.newaxis], 9.0, axis=2)
    perfect = answers("perfect", test=dataclasses.replace(timed.test, logits=right))
    found = _scored(recorded(tmp_path, timed, number=1), recorded(tmp_path, perfect, number=2))
    body = _strict(json.dumps(scoring_json(found)))

    toynet, sure = body["families"]
    assert {"area", "area_own", "hypervolume", "ece_exit2"} <= set(toynet["figures"])
    seed = toynet["seeds"][0]
    assert seed["oracle"][-1]["accuracy"] >= toynet["macs"]["accuracies"][-1]["value"]
    profile = seed["profile"]
    assert profile["accuracy"] == sorted(profile["accuracy"])
    assert profile["accuracy"][0] == pytest.approx(0.25)
    assert sure["seeds"][0]["conditional"]["mended"] == [None, None, None]
    assert sure["seeds"][0]["profile"] is None
    assert body["pairs"][0]["told_apart"] in (True, False)


def test_csv_has_a_line_for_each_figure(tmp_path: Path) -> None:
    found = _scored(recorded(tmp_path, answers()))
    rows = list(csv.DictReader(io.StringIO(scoring_csv(found))))

    named = {row["figure"]: row for row in rows}
    assert len(named) == len(rows) == len(found.families[0].figures)
    assert float(named["area"]["low"]) < float(named["area"]["mean"]) < float(named["area"]["high"])
    accuracy = named["exit0_accuracy"]
    assert float(accuracy["low"]) < float(accuracy["mean"]) < float(accuracy["high"]) <= 100
    assert named["monotonicity"]["low"] == ""


def test_a_name_with_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    hostile = [answers("[bold]a[/bold]", 1.1), answers("[/]", 0.9)]
    folders = [recorded(tmp_path, run, number=n) for n, run in enumerate(hostile)]

    text = _told(_scored(*folders))
    assert "[bold]a[/bold]" in text
    assert "[/]" in text


def test_names_are_no_emoji_either(tmp_path: Path) -> None:
    run = answers("a :warning: b", device=":bug:", latency=latencies(1, 2, 4))
    text = _told(_scored(recorded(tmp_path, run)))

    assert "a :warning: b" in text
    assert ":bug:" in text


def test_a_formula_is_none_in_a_spreadsheet(tmp_path: Path) -> None:
    found = _scored(recorded(tmp_path, answers('=HYPERLINK("https://x","y")')))
    rows = list(csv.reader(io.StringIO(scoring_csv(found))))

    assert {row[0] for row in rows[1:]} == {'\'=HYPERLINK("https://x","y")'}


def test_a_parameter_that_acts_on_a_terminal_is_shown_and_does_not(tmp_path: Path) -> None:
    folder = recorded(tmp_path, answers(), answers(seed=1))
    first, second = gather([folder]).answered
    hostile = {"system": "\x1b[2J\ud800" + "x" * 300}
    rows = [
        dataclasses.replace(first, row=dataclasses.replace(first.row, parameters=hostile)),
        second,
    ]
    families, _ = families_of(rows)

    label = families[0].label
    assert label.isprintable()
    assert "\N{REPLACEMENT CHARACTER}" in label
    assert len(label) <= 160


@pytest.mark.parametrize("name", [r"$\frac$", "$x_", r"\$a$ $"])
def test_a_name_with_mathematics_is_drawn_as_it_is(tmp_path: Path, name: str) -> None:
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    run = answers(name, variant=name, device=name, latency=latencies(1, 2, 4))
    folder = recorded(tmp_path, run)
    (tmp_path / "out").mkdir()

    assert len(draw_scoring(_scored(folder), tmp_path / "out")) == 4
    assert any(path.name.startswith("exits") for path in draw_run(folder, Floors.none()))


_VERSIONS: list[tuple[str, dict[str, Any]]] = [
    ("source", {"source": "d" * 64}),
    ("torch", {"torch": "2.8.0"}),
    ("device", {"accelerator": "H200"}),
    ("kernels_build", {"kernels_build": "abc"}),
]


@pytest.mark.parametrize(("fact", "changes"), _VERSIONS)
def test_seeds_of_other_code_or_machines_are_not_averaged(
    tmp_path: Path, fact: str, changes: dict[str, Any]
) -> None:
    one = recorded(tmp_path, answers(seed=0), number=1)
    other = recorded(tmp_path, answers(seed=1), number=2, **changes)
    found = _scored(one, other)

    assert [len(each.family.rows) for each in found.families] == [1, 1]
    assert all(f"{fact}=" in each.label for each in found.families)
    assert any(f"since {fact} differ" in note for note in found.notes)


def test_a_record_that_was_edited_is_not_scored(tmp_path: Path) -> None:
    folder = recorded(tmp_path, answers())
    text = folder.record_path.read_text(encoding="utf-8")
    assert text.count("2.13.0") == 1
    folder.record_path.write_text(text.replace("2.13.0", "2.12.0"), encoding="utf-8")

    with pytest.raises(DamagedRecordError, match="was edited"):
        gather([folder])


def _of_right(run: RunLogits, right: Any) -> RunLogits:
    """The same run with answers that are right where `right` [exits, images] says so."""
    test, flags = run.test, np.asarray(right, bool)
    named = np.where(flags, test.labels, (test.labels + 1) % test.classes)
    logits = np.eye(test.classes, dtype=np.float32)[named]
    return dataclasses.replace(run, test=dataclasses.replace(test, logits=logits), val=None)


def test_a_mean_of_some_seeds_says_so(tmp_path: Path) -> None:
    high, low, images = np.ones((3, 300)), np.zeros((3, 300)), np.arange(300)
    low[:, images % 2 == 0] = 1
    base = {"base_accuracy": 90.0, "base_macs": 7_000_000}
    folders = [
        recorded(tmp_path, _of_right(answers(seed=seed, **base), right), number=seed)
        for seed, right in enumerate((high, low, low))
    ]
    found = _scored(*folders)
    (family,) = found.families
    mean, auroc = family.figures["macs_at_base_less_1"], family.figures["auroc_exit2"]

    assert (mean.seeds, mean.of, mean.mean) == (1, 3, MACS[0])
    assert (auroc.seeds, auroc.of) == (2, 3)  # nothing to tell apart where all is right
    text = _told(found)
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "0.4 M" in line)
    assert "(1 of 3 seeds)" in lines[at + 1]
    assert "(2 of 3 seeds)" in lines[at + 1]
    lines = {row["figure"]: row for row in csv.DictReader(io.StringIO(scoring_csv(found)))}
    assert (lines["macs_at_base_less_1"]["seeds"], lines["macs_at_base_less_1"]["of"]) == ("1", "3")


def test_without_a_plain_network_nothing_is_held_against_one(tmp_path: Path) -> None:
    based = answers("based", base_accuracy=99.9, base_macs=7_000_000)
    alone = _told(_scored(recorded(tmp_path, answers(), number=1)))
    beside = _scored(recorded(tmp_path, answers(), number=2), recorded(tmp_path, based, number=3))

    assert "plain net-" not in alone
    assert "own last" in alone
    assert "macs_at_base_less_1" not in beside.families[0].figures
    text = _told(beside)
    assert "plain net-" in text
    assert "never" in text


def test_no_lucky_seed_makes_the_front(tmp_path: Path) -> None:
    half = np.zeros((3, 300))
    half[:, :150] = 1
    folders = [
        recorded(tmp_path, _of_right(answers(seed=seed), right), number=seed)
        for seed, right in enumerate((np.ones((3, 300)), half))
    ]
    plain = answers("plain", exits=1, macs=(300_000,))
    static = np.zeros((1, 300))
    static[:, :180] = 1
    folders.append(recorded(tmp_path, _of_right(plain, static), number=9))
    found = _scored(*folders)

    assert [(label, point.accuracy) for label, point in found.front] == [
        ("plain", pytest.approx(0.6)), ("toynet", pytest.approx(0.75)),
    ]  # fmt: skip
    assert found.hypervolume < 0.75
    assert found.families[0].static_gain == pytest.approx(0.15)
    assert [p.accuracy for p in found.families[0].points] == pytest.approx([0.75] * 3)


def test_budgets_are_of_one_range_where_a_data_set_has_none(tmp_path: Path) -> None:
    small = answers("small", synthetic=True, data="synthetic", macs=(100_000, 200_000, 400_000))
    large = answers("large", synthetic=True, data="synthetic")
    found = _scored(recorded(tmp_path, small, number=1), recorded(tmp_path, large, number=2))
    figures = {each.label: each.figures for each in found.families}

    # 25 % of 6 million: beyond all exits of the small one, the second of the large one.
    exits = {name: [100 * e.value for e in each.macs.accuracies]
             for name, each in zip(figures, found.families, strict=True)}  # fmt: skip
    assert figures["small"]["accuracy_at_25"].mean == pytest.approx(exits["small"][2])
    assert figures["large"]["accuracy_at_25"].mean == pytest.approx(exits["large"][1])
    assert figures["large"]["area"].mean == pytest.approx(found.families[1].macs.area.value)


def test_of_equal_areas_the_first_are_named_and_no_greater_one_is_lost(tmp_path: Path) -> None:
    equal = [answers(f"equal {number}", 0.7) for number in range(13)]
    runs = [*equal, answers("greatest", 1.3)]
    found = _scored(*(recorded(tmp_path, run, number=n) for n, run in enumerate(runs)))
    named, others = picture._drawn(found)

    assert [each.label for each, _ in named] == [*(f"equal {n}" for n in range(11)), "greatest"]
    assert [each.label for each, _ in others] == ["equal 11", "equal 12"]


def _many(tmp_path: Path, count: int) -> list[RunFolder]:
    return [
        recorded(
            tmp_path,
            answers(
                f"a family with quite a long name, number {number}",
                0.6 + 0.08 * number,
                latency=latencies(1 + number, 2 + number, 4 + number),
                device="board",
            ),
            number=number,
        )
        for number in range(count)
    ]


def test_pictures_hold_something_and_are_always_the_same(tmp_path: Path) -> None:
    found = _scored(*_many(tmp_path / "runs", 3))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        made = draw_scoring(found, folder)
        assert {path.name for path in made} == {
            f"anytime-{axis}.{suffix}" for axis in ("macs", "latency") for suffix in ("svg", "png")
        }
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
    with Image.open(folders[0] / "anytime-macs.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 100


@pytest.mark.parametrize("axis", [picture._against_macs, picture._against_latency])
def test_every_family_is_drawn_and_those_without_a_name_are_thin(
    tmp_path: Path, axis: Callable[[Scoring], Figure]
) -> None:
    found = _scored(*_many(tmp_path / "runs", 14))
    drawn = axis(found)
    panel = drawn.axes[0]

    foot = drawn.get_supxlabel().replace("\n", " ")
    assert "thin: 2 more, in the colour of the best of their experiment" in foot
    names = " ".join(text.get_text().replace("\n", " ") for text in panel.texts)
    assert "number 13" in names
    assert "number 2" in names
    assert "number 1 " not in names + " "
    steps = [line for line in panel.lines if line.get_drawstyle() == "steps-post"]
    assert len(steps) == 14
    (first, *_), others = picture._drawn(found)
    colour = first[1][0]
    assert [line.get_color() for line in steps if line.get_linewidth() < 1] == [colour, colour]
    assert [each.label[-2:] for each, _ in others] == [" 0", " 1"]


def test_a_picture_of_latencies_counts_the_families_that_were_not_timed(tmp_path: Path) -> None:
    runs = [*_many(tmp_path / "runs", 2), recorded(tmp_path, answers("untimed", 0.7), number=9)]
    found = _scored(*runs)

    assert "not timed: 1 of 3 families" in picture._against_latency(found).get_supxlabel()
    assert "not timed" not in picture._against_macs(found).get_supxlabel()


def test_the_best_of_each_experiment_is_named_before_variants_of_another(tmp_path: Path) -> None:
    """Ten bit widths of one network would be no picture of all systems."""
    runs = [answers(f"number {n}", 1.0 + 0.05 * n) for n in range(13)]
    folders = [
        recorded(tmp_path, run, number=n) for n, run in enumerate([*runs, answers("poor", 0.3)])
    ]
    gathered = gather(folders)
    *others, poor = gathered.answered
    alone = dataclasses.replace(poor, experiment="another")

    named, _ = picture._drawn(score(dataclasses.replace(gathered, answered=(*others, alone))))

    assert [each.label for each, _ in named] == [*(f"number {n}" for n in range(2, 13)), "poor"]
    assert "poor" not in [each.label for each, _ in picture._drawn(score(gathered))[0]]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        recorded(tmp_path / "results", answers(name), number=n).name
        for n, name in enumerate(("one", "two"))
    ]
    words = ["anytime-score", *names, "--results", str(tmp_path / "results")]
    errors = io.StringIO()
    assert run_program([*words, "--out", str(tmp_path / "out")], {}, errors) == 0
    assert "2 families on 300 test images of cifar10" in capsys.readouterr().out
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"anytime.json", "anytime.csv", "anytime-macs.svg", "anytime-macs.png"}

    assert run_program([*words, "--json"], {}, errors) == 0
    printed = _strict(capsys.readouterr().out)
    assert printed == _strict((tmp_path / "out" / "anytime.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 2, "RUN"),
        (["none-such"], 2, "unknown run 'none-such'"),
        (["latest", "--out", "{file}/in"], 23, "error"),
    ],
)
def test_bad_words_have_their_codes(tmp_path: Path, words: list[str], code: int, told: str) -> None:
    recorded(tmp_path / "results", answers())
    (tmp_path / "file").write_text("", encoding="utf-8")
    given = [word.format(file=tmp_path / "file") for word in words]
    errors = io.StringIO()
    command = ["anytime-score", *given, "--results", str(tmp_path / "results")]

    assert run_program(command, {}, errors) == code
    assert told in errors.getvalue()


def _variants() -> list[RunLogits]:
    base = {"base_accuracy": 60.0, "base_macs": 3_000_000}
    return [answers(latency=latencies(1, 2, 4), **base), answers(val=None)]


def test_a_run_draws_its_own_exits(tmp_path: Path) -> None:
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    folder = recorded(tmp_path, *_variants())
    made = {path.name for path in draw_run(folder, Floors.none())}

    expected = {f"exits-system-{name}.{suffix}" for name in "ab" for suffix in ("svg", "png")}
    assert expected <= made


def test_a_run_without_answers_draws_no_exits(tmp_path: Path) -> None:
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    made = draw_run(recorded(tmp_path, None), Floors.none())
    assert not [path for path in made if path.name.startswith("exits")]


def test_damaged_answers_are_told_when_drawn(tmp_path: Path) -> None:
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    folder = recorded(tmp_path, answers())
    (folder.out / "row-0" / "logits.npz").write_bytes(b"PK")
    with pytest.raises(DamagedRecordError):
        draw_run(folder, Floors.none())
