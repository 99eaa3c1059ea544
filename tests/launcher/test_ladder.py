"""The attribution ladder: rungs, null rungs, what they explain, and its tables and picture."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from pathlib import Path

import pytest
from PIL import Image
from ratio_cases import LATENCIES, RUNGS, bench_run, noise_run

from narrowgauge.draw import draw_run
from narrowgauge.ladder import Climb, climbs_of, ladder_csv, ladder_markdown
from narrowgauge.noise import UNKNOWN, Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge.tables import markdown_table, summary_table
from narrowgauge_contract.drawing import Ladder
from narrowgauge_contract.spec import parse_spec


def _ladder(folder: RunFolder) -> Ladder:
    (drawing,) = parse_spec(folder.record().spec).drawings
    assert drawing.ladder is not None
    return drawing.ladder


def _climbs(folder: RunFolder, floors: Floors | None = None) -> tuple[Climb, ...]:
    return climbs_of(_ladder(folder), folder.record(), floors or Floors.none())


def _lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class TestClimb:
    def test_each_rung_is_a_ratio_to_the_one_before(self, tmp_path: Path) -> None:
        (climb,) = _climbs(bench_run(tmp_path))

        speedups = [rung.speedup.ratio for rung in climb.rungs if rung.speedup is not None]
        assert speedups == [pytest.approx(x, rel=0.01) for x in (2.0, 2.0, 1.0, 2.0)]
        assert [rung.verdict for rung in climb.rungs] == ["", "faster", "faster", "null", "faster"]
        assert [rung.name for rung in climb.rungs][:2] == ["fp32, strict", "tf32"]
        assert climb.end_to_end.ratio == pytest.approx(8.0, rel=0.01)
        assert climb.label == ""

    def test_what_the_rungs_explain_comes_from_rows_of_their_own(self, tmp_path: Path) -> None:
        (whole,) = _climbs(bench_run(tmp_path / "a"))
        (part,) = _climbs(bench_run(tmp_path / "b", latencies={**LATENCIES, "top": 0.005}))

        assert whole.explained == pytest.approx(1.0, abs=0.01)
        assert part.explained == pytest.approx(0.75, abs=0.01)  # 3 of 4 doublings
        assert whole.unexplained == ""

    def test_of_rates_more_is_faster(self, tmp_path: Path) -> None:
        (climb,) = _climbs(bench_run(tmp_path, unit="image/s"))

        assert climb.end_to_end.ratio == pytest.approx(8.0, rel=0.01)
        assert climb.rungs[1].verdict == "faster"

    def test_a_slower_rung_says_so(self, tmp_path: Path) -> None:
        (climb,) = _climbs(bench_run(tmp_path, latencies={**LATENCIES, "folded": 0.03}))

        assert climb.rungs[3].verdict == "slower"
        assert climb.explained == pytest.approx(1.0, abs=0.01)

    def test_a_rung_without_a_valid_row_is_passed_over_and_says_why(self, tmp_path: Path) -> None:
        (climb,) = _climbs(bench_run(tmp_path, invalid=("tf32",)))

        assert climb.rungs[1].missing == "no such unit"
        assert (climb.rungs[1].figure, climb.rungs[1].speedup) == (None, None)
        assert climb.rungs[2].speedup is not None
        assert climb.rungs[2].speedup.ratio == pytest.approx(4.0, rel=0.01)
        assert climb.explained == pytest.approx(1.0, abs=0.01)

    def test_a_rung_that_was_not_run_says_that(self, tmp_path: Path) -> None:
        modes = tuple(mode for mode in (*RUNGS, "bottom", "top") if mode != "folded")

        (climb,) = _climbs(bench_run(tmp_path, modes=modes))

        assert climb.rungs[3].missing == "not run"

    @pytest.mark.parametrize(
        ("modes", "latencies", "why"),
        [
            ((*RUNGS, "bottom"), None, "no ratio end to end: there are no samples"),
            (("strict", "bottom", "top"), None, "no rung has a ratio"),
            (
                ("strict", "tf32", "bottom", "top"), None,
                "the first or the last rung was not measured",
            ),
            ((*RUNGS, "bottom", "top"), {**LATENCIES, "top": 0.08}, "may be 1"),
        ],
    )  # fmt: skip
    def test_what_is_not_known_to_be_explained_says_why(
        self, tmp_path: Path, modes: tuple[str, ...], latencies: dict[str, float] | None, why: str
    ) -> None:
        (climb,) = _climbs(bench_run(tmp_path, modes=modes, latencies=latencies))

        assert climb.explained is None
        assert why in climb.unexplained

    def test_three_repeats_have_ratios_and_no_verdict(self, tmp_path: Path) -> None:
        (climb,) = _climbs(bench_run(tmp_path, repeats=3))

        assert climb.rungs[1].verdict == "no interval"
        assert climb.rungs[1].speedup is not None
        assert climb.rungs[1].speedup.ratio == pytest.approx(2.0, rel=0.02)

    def test_further_parameters_make_ladders_of_their_own(self, tmp_path: Path) -> None:
        climbs = _climbs(bench_run(tmp_path, batches=(1, 128)))

        assert [climb.label for climb in climbs] == ["batch=1", "batch=128"]

    def test_only_the_ends_are_no_ladder(self, tmp_path: Path) -> None:
        assert _climbs(bench_run(tmp_path, modes=("bottom", "top"))) == ()

    def test_the_noise_floor_stands_beside_every_rung(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        folder = bench_run(tmp_path)

        (climb,) = _climbs(folder, Floors.in_store(Store(tmp_path)))

        beside = [rung.detectable for rung in climb.rungs[1:]]
        assert [d is not None and d.within for d in beside] == [False, False, True, False]
        assert climb.detectable.least is not None


class TestTables:
    def test_csv_has_a_line_per_rung_and_the_ends(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        climbs = _climbs(bench_run(tmp_path, invalid=("tf32",)), Floors.in_store(Store(tmp_path)))

        lines = _lines(ladder_csv(climbs))

        assert [line["rung"] for line in lines] == [*RUNGS, "bottom/top"]
        assert lines[1]["note"] == "no such unit"
        assert (lines[1]["speedup"], lines[1]["detectable"]) == ("", "")
        assert float(lines[2]["low95"]) < 4.0 < float(lines[2]["high95"])
        assert (lines[3]["verdict"], lines[3]["within_detectable"]) == ("null", "yes")
        assert lines[5]["verdict"].startswith("explained ")

    def test_markdown_says_it_all(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        climbs = _climbs(bench_run(tmp_path), Floors.in_store(Store(tmp_path)))

        text = ladder_markdown("Title", climbs)

        assert text.startswith("# Title\n\n| rung | latency |")
        assert re.search(r"\| folded \| [12]\d(\.\d+)? ms \|", text)
        assert "| null |" in text
        assert "ratio within it" in text
        assert "% of the end-to-end log ratio." in text
        assert "Null, since their interval holds 1: folded." in text
        assert "20261121T090000Z-noise-floor-aaaaaa" in text

    def test_without_a_floor_it_says_how_to_get_one(self, tmp_path: Path) -> None:
        assert UNKNOWN in ladder_markdown("T", _climbs(bench_run(tmp_path)))

    def test_summary_tables_have_the_ratio_to_the_baseline(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        record = bench_run(tmp_path, batches=(1, 128), invalid=("int8",)).record()
        floors = Floors.in_store(Store(tmp_path))

        head, lines = summary_table(record, floors)
        text = markdown_table(record, floors)

        assert head[-5:] == [
            "× Float32", "ratio_low95", "ratio_high95", "detectable", "within_detectable",
        ]  # fmt: skip
        found = {(line[0], line[1]): line[-5:] for line in lines}
        assert found[128, "fp16"][0] == pytest.approx(4.0, rel=0.01)
        assert found[128, "fp16"][4] == "no"
        assert found[128, "bottom"][4] == "yes"
        assert found[1, "strict"] == [1.0, "", "", "", ""]
        rows = text.splitlines()
        assert rows[0].endswith("| × Float32 (95 %) | detectable | valid repeats |")
        invalid = next(row for row in rows if row.startswith("| 1 | int8"))
        assert invalid.endswith("| – | – | – | 0/10 |")
        assert rows[-1].startswith("detectable: the least effect")
        assert UNKNOWN in markdown_table(record, Floors.none())


class TestPicture:
    def test_it_is_drawn_with_its_tables_and_drawn_again_the_same(self, tmp_path: Path) -> None:
        noise_run(tmp_path)
        folder = bench_run(tmp_path, invalid=("tf32",))
        floors = Floors.in_store(Store(tmp_path))

        names = {path.name for path in draw_run(folder, floors)}
        first = _digests(folder)
        draw_run(folder, floors)

        assert {"ladder.png", "ladder.svg", "ladder.csv", "ladder.md"} <= names
        assert _digests(folder) == first
        with Image.open(folder.derived / "ladder.png") as picture:
            colours = picture.convert("RGB").getcolors(1 << 24)
            assert min(picture.size) > 400
        assert colours is not None
        shades = {colour for _, colour in colours}
        assert len(shades) > 20
        svg = (folder.derived / "ladder.svg").read_text(encoding="utf-8")
        for text in ("fp32, strict", "null", "no such unit", "end to end", "What each step brings"):
            assert text in svg

    @pytest.mark.parametrize(
        "latencies",
        [
            {**LATENCIES, "tf32": 0.16, "fp16": 0.3, "folded": 0.5, "int8": 1.0, "top": 1.0},
            dict.fromkeys(LATENCIES, 0.08),
        ],
    )
    def test_a_way_down_and_a_way_nowhere_are_drawn(
        self, tmp_path: Path, latencies: dict[str, float]
    ) -> None:
        folder = bench_run(tmp_path, latencies=latencies)

        assert "ladder.png" in {path.name for path in draw_run(folder, Floors.none())}

    def test_a_ladder_per_batch_has_a_picture_each_and_one_table(self, tmp_path: Path) -> None:
        folder = bench_run(tmp_path, batches=(1, 128), repeats=1)

        names = {path.name for path in draw_run(folder, Floors.none())}

        assert {"ladder-batch-1.png", "ladder-batch-128.svg", "ladder.csv"} <= names

    def test_without_a_rung_there_is_none(self, tmp_path: Path) -> None:
        folder = bench_run(tmp_path, modes=("bottom", "top"))

        assert not {p.name for p in draw_run(folder, Floors.none()) if p.stem == "ladder"}


def _digests(folder: RunFolder) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.derived.iterdir()
    }
