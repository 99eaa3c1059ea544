"""Maps over images: read strictly, and drawn from the record alone."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from result_cases import SPEC, job, record_of

from narrowgauge import draw_maps, notebook_cells
from narrowgauge.draw import draw_run
from narrowgauge.draw_maps import read_maps
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.drawing import _KEYS
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import Row, SideFile

GOOD: dict[str, Any] = {
    "rows": ["cat", "dog, called $cat"],
    "columns": ["exit 0", "exit 1", "pondering"],
    "images": [[[[0, 128, 255]] * 4] * 4, [[[9, 9, 9]] * 4] * 4],
    "maps": [[[[0.0, 1.0], [0.5, 0.25]], [[0.0]], [[1, 0, 1]]]] * 2,
}


def _run(tmp_path: Path, text: str | None) -> RunFolder:
    """A run of the toy whose spec draws maps alone, and whose first row has this file of them."""
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder)
    spec = copy.deepcopy(SPEC)
    spec["draw"] = [
        {"name": "maps", "kind": "maps", "title": "What exits see", "side_file": "maps.json"}
    ]
    rows = list(record.rows)
    if text is not None:
        side = folder.out / "row-0" / "maps.json"
        side.write_text(text, encoding="utf-8")
        file = SideFile("row-0/maps.json", sha256_file(side), side.stat().st_size)
        rows[0] = dataclasses.replace(rows[0], side_files=(*rows[0].side_files, file))
    folder.write_record(dataclasses.replace(record, spec=spec, rows=tuple(rows)))
    return folder


def _first(folder: RunFolder) -> Row:
    return folder.record().rows[0]


def test_maps_are_drawn_over_their_images(tmp_path: Path) -> None:
    folder = _run(tmp_path, json.dumps(GOOD))

    made = draw_run(folder, Floors.none())

    pictures = {path.name for path in made if path.suffix in (".png", ".svg")}
    assert pictures == {"maps-precision-fp32.png", "maps-precision-fp32.svg"}
    text = (folder.derived / "maps-precision-fp32.svg").read_text(encoding="utf-8")
    for word in ("dog, called $cat", "exit 1", "pondering", "What exits see"):
        assert f"<!-- {word}" in text
    with Image.open(folder.derived / "maps-precision-fp32.png") as picture:
        colours = picture.convert("RGB").getcolors(1 << 24)
        assert colours is not None
        assert (0, 128, 255) in {colour for _, colour in colours}


def test_a_run_without_maps_draws_none(tmp_path: Path) -> None:
    folder = _run(tmp_path, None)

    assert read_maps(_first(folder), "maps.json", folder) is None
    assert not [path for path in draw_run(folder, Floors.none()) if path.suffix == ".png"]


def _with(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "[" * 5000,
        _with(rows=["cat"]), _with(rows=[], images=[], maps=[]), _with(columns=["exit 0"]),
        _with(columns=[f"exit {k}" for k in range(17)]), _with(images=GOOD["images"][:1]),
        _with(images=[[[[0, 1]] * 4] * 4] * 2), _with(images=[[[[0, 0, 256]] * 4] * 4] * 2),
        _with(images=[[[[0, 0, 0]] * 513] * 4] * 2), _with(images=[[[[0, 0, 0]], []]] * 2),
        _with(images=[[], []]), _with(maps=[[[[0.5]], [[0.5]], [[1.5]]]] * 2),
        _with(maps=[[[[0.5]], [[0.5]], [[-0.1]]]] * 2), _with(maps=[[[[0.5]], [[0.5]], []]] * 2),
        _with(maps=[[[[0.5]], [[0.5]], [[0.5], [0.1, 0.2]]]] * 2),
        _with(maps=[[[[0.5]], [[0.5]], [["a"]]]] * 2), _with(maps=7),
        _with().replace("0.25", "NaN"), _with().replace("128", "Infinity"),
        _with(rows=["cat" * 50, "dog"]), _with(columns=["exit 0", "exit 1", "a\n" * 50]),
        _with(columns=["exit 0", "exit 1", "\x1b[2J"]), _with() + " " * (16 << 20),
    ],
    ids=range(27),
)  # fmt: skip
def test_what_holds_no_maps_is_refused(tmp_path: Path, text: str) -> None:
    folder = _run(tmp_path, text)

    with pytest.raises(DamagedRecordError, match="holds no maps over images"):
        read_maps(_first(folder), "maps.json", folder)


def test_a_changed_file_is_not_drawn(tmp_path: Path) -> None:
    folder = _run(tmp_path, json.dumps(GOOD))
    (folder.out / "row-0" / "maps.json").write_text(_with(rows=["a", "b"]))

    with pytest.raises(DamagedRecordError, match="missing or was changed"):
        draw_run(folder, Floors.none())


def test_every_kind_of_picture_has_a_cell_in_notebooks() -> None:
    assert set(notebook_cells.PICTURES) == set(_KEYS)


def test_the_cell_of_maps_draws_what_the_run_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell's own code, with the names that the cells before it define."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder = _run(tmp_path, json.dumps(GOOD))
    drawn: list[list[str]] = []

    def show() -> None:
        drawn.append([panel.get_title() for panel in plt.gcf().axes])
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    drawing = type("Drawing", (), {"side_file": "maps.json", "title": "Maps"})
    names = {"plt": plt, "drawing": drawing, "shown": {"toy": [_first(folder)]}, "RUN": folder.out}
    exec(notebook_cells.PICTURES["maps"], names)

    ((first, *others),) = drawn
    assert first == "cat"
    assert others[:3] == ["exit 0", "exit 1", "pondering"]
    assert draw_maps.maps_size(read_maps(_first(folder), "maps.json", folder)) > (5.0, 3.0)
