"""The experiment `class-maps`, on made-up images: what each network's row records and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.anytime import class_maps
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_scores.side_file import read_logits

QUICK = (
    "data=synthetic", "width=0.25", "units=2", "epochs=1", "validation=12", "train_limit=32",
    "test_limit=12", "batch_size=16", "images=6", "steps=2", "pictures=3",
)  # fmt: skip
ROWS = Rows("class-maps", QUICK)
EXITS = {"nested": 4, "sact": 1, "b-alexnet": 3}


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values[-1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Tuple[Row, Path]]:
    found = {}
    for net in EXITS:
        out = tmp_path_factory.mktemp(net)
        found[net] = ROWS.run(out, f"net={net}", "lr=0.02"), out / "row-0"
    return found


@pytest.mark.parametrize("net", list(EXITS))
def test_a_row_scores_the_maps_of_every_exit(rows: Any, net: str) -> None:
    row, folder = rows[net]

    assert row.validity.valid, row.validity.reasons
    assert row.facts["mapped_images"] == 6
    for exit in range(EXITS[net]):
        assert 0 <= _value(row, f"exit{exit}_flat_maps") <= 100
        for name in ("deletion", "deletion_shuffled", "insertion", "insertion_shuffled"):
            assert 0 <= _value(row, f"exit{exit}_{name}") <= 1
    assert read_logits(folder / "logits.npz").exits == EXITS[net]


def test_claims_ask_for_what_rows_record(rows: Any) -> None:
    claims = load_claims(EXPERIMENTS / "class-maps" / "claims.toml", ROWS.spec())

    for claim in claims:
        for each in claim.selections:
            assert rows[each.where["net"]][0].metric(each.metric) is not None, each.metric
    assert set(ROWS.spec().headline) <= {metric.name for metric in rows["sact"][0].metrics}


def test_cam_is_grad_cam_where_there_is_one(rows: Any) -> None:
    assert _value(rows["nested"][0], "cam_difference") < 1e-3
    assert rows["sact"][0].metric("cam_difference") is None
    assert rows["b-alexnet"][0].metric("cam_difference") is None


def test_exits_are_compared_in_a_table(rows: Any) -> None:
    row, folder = rows["nested"]
    table = json.loads((folder / "agreement.json").read_text())

    values = np.array(table["values"])
    assert values.shape == (4, 4)
    assert (values == values.T).all()
    assert (np.diag(values) == 1).all()
    assert values[0, 3] == pytest.approx(_value(row, "overlap_0_3"), abs=1e-6)
    assert table["rows"] == [f"exit {k}" for k in range(4)]
    assert not (rows["sact"][1] / "agreement.json").exists()  # one exit agrees with nobody


@pytest.mark.parametrize("net", list(EXITS))
def test_maps_are_kept_for_pictures(rows: Any, net: str) -> None:
    kept = json.loads((rows[net][1] / "maps.json").read_text())

    columns = [f"exit {k}" for k in range(EXITS[net])]
    assert kept["columns"] == columns + (["pondering"] if net == "sact" else [])
    assert len(kept["rows"]) == len(kept["images"]) == len(kept["maps"]) == 3
    assert np.array(kept["images"]).shape == (3, 32, 32, 3)
    for line in kept["maps"]:
        assert len(line) == len(kept["columns"])
        for one in line:
            values = np.array(one)
            assert ((values >= 0) & (values <= 1)).all()
    if net == "nested":
        assert np.array(kept["maps"][0][0]).shape == (8, 8)


def test_pondering_is_held_against_its_area(rows: Any) -> None:
    row = rows["sact"][0]

    assert row.facts["pondered_images"] > 0
    assert 0 < _value(row, "ponder_area") < 100
    assert 0 <= _value(row, "ponder_energy") <= 100
    assert rows["nested"][0].metric("ponder_area") is None


def test_images_whose_maps_are_flat_have_no_score(monkeypatch: Any, tmp_path: Path) -> None:
    """Half of the images get a map of nothing: means are over the others, and nothing is NaN."""
    real = class_maps.grad_cam

    def half(head: Any, classes: Any) -> Any:
        maps = real(head, classes)
        maps[::2] = 0.25
        return maps

    monkeypatch.setattr(class_maps, "grad_cam", half)
    row = ROWS.run(tmp_path, "net=b-alexnet", "lr=0.02")

    for metric in row.metrics:
        if "deletion" in metric.name or "overlap" in metric.name:
            assert np.isfinite(metric.values).all()
    assert _value(row, "exit0_flat_maps") >= 50

    monkeypatch.setattr(class_maps, "grad_cam", lambda *given: torch.zeros_like(real(*given)))
    row = ROWS.run(tmp_path / "all", "net=b-alexnet", "lr=0.02")

    assert row.validity.valid
    assert _value(row, "exit0_flat_maps") == 100
    assert row.metric("exit0_deletion") is None
    assert row.metric("overlap_0_1") is None
    assert not (tmp_path / "all" / "row-0" / "agreement.json").exists()
    assert not np.array(json.loads((tmp_path / "all" / "row-0" / "maps.json").read_text())[
        "maps"][0][0]).any()  # fmt: skip


def test_a_flat_map_does_not_disagree_with_another(monkeypatch: Any, tmp_path: Path) -> None:
    """All exits have the same map, but for images of which the first has none."""
    asked = []

    def alike(head: Any, classes: Any) -> Any:
        maps = torch.arange(16.0).view(1, 4, 4).repeat(len(classes), 1, 1)
        if len(asked) % 3 == 0:
            maps[::2] = 0.0
        asked.append(head)
        return maps

    monkeypatch.setattr(class_maps, "grad_cam", alike)
    row = ROWS.run(tmp_path, "net=b-alexnet", "lr=0.02")

    assert _value(row, "exit0_flat_maps") == 50
    assert _value(row, "exit1_flat_maps") == 0
    assert _value(row, "overlap_0_1") == _value(row, "overlap_1_2") == 1


def test_weights_of_another_row_are_taken(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.save(NestedNet(10, channels=4).state_dict(), tmp_path / "w.pt")

    row = ROWS.run(tmp_path, f"weights={tmp_path / 'w.pt'}", "pictures=0")

    assert row.facts["weights_from"] == "the file w.pt"
    assert row.metric("train_loss") is None
    assert row.metric("exit0_deletion") is not None
    assert not (tmp_path / "row-0" / "maps.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(("images=2", "pictures=3"), "3 pictures of 2 images"), (("steps=1025",), "steps"),
     (("net=resnet",), "net"), (("images=0",), "images")],
)  # fmt: skip
def test_what_cannot_be_is_said_before_training(tmp_path: Path, words: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)


def test_a_training_that_diverges_has_no_maps(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "lr=100", "epochs=3", "weight_decay=1")

    assert not row.validity.valid
    assert not (tmp_path / "row-0" / "maps.json").exists()
