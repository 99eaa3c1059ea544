"""The experiment `ddnn`: a row from end to end, its bytes and outages, its archive, bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Tuple

import numpy as np
import pytest
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData, synthetic_data
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

ROWS = Rows(
    "ddnn",
    (
        "data=synthetic", "width=0.15", "epochs=1", "batch_size=64", "train_limit=256",
        "validation=100", "test_limit=60", "lr=0.05",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Row]:
    out = tmp_path_factory.mktemp("ddnn")
    return out, ROWS.run(out, "save_weights=true")


def _values(row: Row, name: str) -> Tuple[float, ...]:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values


def test_a_row_is_trained_and_scored(tiles: Tuple[Path, Row]) -> None:
    out, row = tiles
    names = {metric.name for metric in row.metrics}

    assert row.validity.valid
    assert row.facts["synthetic"] is True
    assert set(ROWS.spec().headline) <= names
    for drawing in ROWS.spec().drawings:
        assert set(drawing.metrics) <= names
    assert "twin of width 0.15" in row.facts["variant"]
    assert "1-bit uplink" in row.facts["variant"]
    run = read_logits(out / "row-0" / "logits.npz")
    assert run.exit_names == ("local", "cloud")
    assert (run.family, run.test.images) == ("ddnn", 60)


def test_bytes_follow_from_the_share_that_stays_local(tiles: Tuple[Path, Row]) -> None:
    row = tiles[1]
    (share,), (maps,) = _values(row, "exit0_share"), _values(row, "map_bytes")
    (sent,), (raw,) = _values(row, "device_bytes"), _values(row, "raw_bytes")

    assert maps == 2 * 160 / 8, "two maps of 16×10 bits"
    assert raw == 160
    assert sent == pytest.approx(40 + (1 - share / 100) * maps)
    assert _values(row, "bytes_gain")[0] == pytest.approx(raw / sent)
    curve = _values(row, "threshold_local_share")
    assert list(curve) == sorted(curve), "a higher threshold keeps no fewer samples local"
    assert len(curve) == 8
    for part, each in zip(_values(row, "threshold_bytes"), curve):
        assert part == pytest.approx(40 + (1 - each / 100) * maps)
    latency = row.metric("simulated_latency")
    assert latency is not None
    assert latency.source == "simulated"
    assert latency.values[0] > 8 * sent / 250e3


def test_outages_are_of_each_view_of_the_last_ones_and_of_the_worst(
    tiles: Tuple[Path, Row],
) -> None:
    row = tiles[1]
    each = _values(row, "outage_cloud_accuracy")

    assert len(each) == len(_values(row, "outage_local_accuracy")) == 6
    for view in range(6):
        assert _values(row, f"cloud_without_{view}") == (each[view],)
    assert {metric.name for metric in row.metrics} >= {
        f"cloud_without_{first}_to_5" for first in (1, 2, 3, 4)
    }
    own = _values(row, "view_accuracy")
    assert row.facts["views_worst_first"] == sorted(range(6), key=lambda view: own[view])
    # With all six it is the network as it is; with the worst one alone, that view alone.
    assert _values(row, "cameras_cloud_accuracy")[-1] == _values(row, "exit1_accuracy")[0]
    assert _values(row, "cameras_local_accuracy")[0] == pytest.approx(min(own)), "max of one is it"


def test_a_row_has_every_metric_that_claims_name(tiles: Tuple[Path, Row]) -> None:
    names = {metric.name for metric in tiles[1].metrics}
    claims = load_claims(EXPERIMENTS / "ddnn" / "claims.toml", ROWS.spec())

    assert {selection.metric for claim in claims for selection in claim.selections} <= names


def _archive(folder: Path) -> Path:
    random = np.random.RandomState(0)
    classes = random.randint(0, 3, 60)
    present = random.random_sample((60, 6)) < 0.7
    present[:, 0] |= ~present.any(1)
    images = random.random_sample((60, 6, 3, 32, 32)) * 0.3
    images[np.arange(60), :, classes] += 0.6
    images *= present[:, :, None, None, None]
    path = folder / "own.npz"
    np.savez(path, X=images.astype(np.float32), y=np.where(present, classes[:, None], 3))
    return path


def test_the_papers_network_trains_on_an_archive_of_the_users_own(tmp_path: Path) -> None:
    words = (
        "data=file", f"archive={_archive(tmp_path)}", "device=binary", "optimizer=adam",
        "lr=0.01", "validation=8", "epochs=6", "batch_size=16", "train_limit=0", "test_limit=0",
    )  # fmt: skip
    row = ROWS.run(tmp_path / "out", *words)

    assert "synthetic" not in row.facts
    assert row.validity.valid
    assert row.facts["split"]["test"] == 12
    assert row.facts["variant"] == "binary devices on MVMC, MP-CC, 1-bit uplink"
    assert _values(row, "map_bytes") == (32.0 * 4,)
    losses = _values(row, "train_loss")
    assert losses[-1] < losses[0]


def _like_cifar10() -> FlatData:
    """Colour images of 32×32 in ten classes, as CIFAR-10 has them: 120 to train on and 24."""
    made = synthetic_data(0, channels=3, size=32, classes=10, train=120, test=24)
    return dataclasses.replace(
        made, declaration=dataclasses.replace(made.declaration, name="cifar10")
    )


@pytest.mark.parametrize("local", ["ap", "cc"])
@pytest.mark.parametrize(
    ("views", "pixels"), [("tiles", 16 * 10), ("cameras", 32 * 32)], ids=lambda given: str(given)
)
def test_the_papers_devices_train_on_colour_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: str, pixels: int, local: str
) -> None:
    monkeypatch.setattr(RowContext, "data", lambda ctx, name: _like_cifar10())
    words = (
        "data=cifar10", f"views={views}", f"local={local}", "device=binary", "bits=1", "filters=2",
        "width=1", "train_limit=64", "validation=24", "test_limit=20", "batch_size=32",
    )  # fmt: skip
    row = ROWS.run(tmp_path, *words, "optimizer=adam", "lr=0.01")

    assert row.validity.valid
    assert row.facts["variant"] == f"binary devices on {views}, {local.upper()}-CC, 1-bit uplink"
    assert row.facts["split"]["training"] == 64
    assert all(np.isfinite(_values(row, name)[-1]) for name in ("train_loss", "devices_train_loss"))
    # A convolution and a pool of stride 2: a quarter of the pixels, two maps of a bit each.
    assert _values(row, "map_bytes") == (2 * pixels / 4 / 8,)
    assert _values(row, "raw_bytes") == (3 * pixels,)
    run = read_logits(tmp_path / "row-0" / "logits.npz")
    assert run.data == {"tiles": "cifar10", "cameras": "cifar10-cameras"}[views]
    assert run.test.logits.shape == (2, 20, 10)
    assert len(_values(row, "outage_cloud_accuracy")) == 6


def test_weights_of_a_row_serve_another_one(tiles: Tuple[Path, Row], tmp_path: Path) -> None:
    out, row = tiles
    again = ROWS.run(tmp_path, f"weights={out / 'row-0' / 'weights.pt'}", "outages=false")

    assert again.metric("train_loss") is None
    for name in ("exit0_accuracy", "exit1_accuracy"):
        assert _values(again, name) == _values(row, name)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("width=0.2", "size mismatch for "),
        ("local=cc", 'Missing key(s) in state_dict: "local_head.weight"'),
        ("cloud=mp", "size mismatch for "),
        ("bits=32", "Unexpected key(s) in state_dict: "),
        ("device=binary", "Missing key(s) in state_dict: "),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(
    tiles: Tuple[Path, Row], tmp_path: Path, word: str, why: str
) -> None:
    weights = tiles[0] / "row-0" / "weights.pt"
    with pytest.raises(DataCorruptError) as caught:
        ROWS.run(tmp_path, f"weights={weights}", word)

    assert caught.value.what == f"{weights} does not hold weights of this DDNN"
    assert caught.value.why.startswith(f"Error(s) in loading state_dict for DDNN: {why}")
    assert len(caught.value.why) < 310
    assert "state dict of the same network" in caught.value.next_step
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_a_diverged_training_stops_and_is_said(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "lr=100", "epochs=3")

    (reason,) = row.validity.reasons
    assert reason.startswith("diverged: loss is NaN/inf at epoch ")
    assert row.metric("train_loss") is not None, "what was measured until then is kept"
    for name in ("exit0_accuracy", "bytes_gain", "threshold_accuracy", "outage_cloud_accuracy"):
        assert row.metric(name) is None, name
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"MVMC\.npz") as caught:
        ROWS.run(tmp_path, "data=file", "archive=nowhere/MVMC.npz")
    assert "experiments/ddnn/" in caught.value.next_step
    assert ROWS.job("data=file").data_sets == ()
    assert not ROWS.job("data=file").synthetic


def test_cameras_that_miss_objects_train_too(tmp_path: Path) -> None:
    words = (
        "views=cameras", "train_limit=32", "validation=20", "test_limit=20", "view_dropout=0.3",
        "local=attention", "cloud=mp",
    )  # fmt: skip
    row = ROWS.run(tmp_path, *words, "outages=false", "policy=entropy-normalised:1")

    assert row.validity.valid
    assert "cameras, ATTENTION-MP" in row.facts["variant"]
    assert row.facts["policy_ran"] == "entropy-normalised:1"
    assert row.metric("outage_cloud_accuracy") is None
    assert row.facts["split"]["test"] == 20
    assert row.facts["split"]["test_whole"] is False, "the set has 300"
    for limit in ("300", "0"):
        whole = ROWS.run(tmp_path / limit, *words, "outages=false", f"test_limit={limit}")
        assert whole.facts["split"]["test_whole"] is True


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bits=16",), "bits"),
        (("device=binary", "bits=2"), "binary devices"),
        (("policy=entropy:0.1,0.2",), "thresholds"),
        (("loss_weights=1,2,3",), "weights"),
        (("data=file", "archive="), "without a file"),
    ],
)
def test_what_there_is_not_is_refused(words: Tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=says):
        ROWS.run(tmp_path, *words)


def test_claims_follow_the_schema() -> None:
    claims = {
        claim.id: claim for claim in load_claims(EXPERIMENTS / "ddnn" / "claims.toml", ROWS.spec())
    }

    assert claims["tiles-all"].expected["any"].figure == 99.17
    published = [claims[f"tiles-without-{view}"].expected["any"].figure for view in range(6)]
    assert published == [98.52, 99.15, 78.70, 86.90, 87.06, 98.61]
    for claim in claims.values():
        for selection in claim.selections:
            assert selection.where["device"] == ("binary" if "mvmc" in claim.id else "residual")


def test_the_paper_profile_has_the_published_recipe_with_and_without_dropout() -> None:
    job = ROWS.job(profile="paper")
    rows = {(row.parameters["bits"], row.parameters["view_dropout"]) for row in job.rows}

    assert rows == {(32, 0.0), (32, 0.25), (1, 0.0), (1, 0.25)}
    wanted = {"epochs": 50, "batch_size": 32, "lr": 0.1, "optimizer": "sgd", "cloud": "cc"}
    assert {key: job.rows[0].parameters[key] for key in wanted} == wanted
