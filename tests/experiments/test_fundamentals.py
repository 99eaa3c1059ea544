"""The experiment `fundamentals`: its studies, its network by hand and by autograd, its rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "scale=small", "epochs=2", "train_limit=60", "validation=50",
    "test_limit=40", "lr=0.05",
)  # fmt: skip
ROWS = Rows("fundamentals", QUICK)
STUDIES, NETWORK, BY_HAND, OBJECTIVE, EXPANSION = (
    ROWS.module(name) for name in ("studies", "network", "by_hand", "objective", "expansion")
)


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def test_a_row_has_costs_accuracies_and_the_gradient_of_every_layer(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "variant=depth-3", "epochs=3")

    assert row.validity.valid
    assert row.facts["study"] == "depth"
    assert row.facts["settings"]["hidden"] == [30, 30, 30]
    assert row.facts["settings"]["images"] == 60
    assert row.facts["variant"] == "depth-3, rate 0.05, 60 images, 3 epochs"
    for name in ("validation_cost", "validation_accuracy", "exit0_train_loss", "penalty"):
        assert len(_values(row, name)) == 3
    total = np.add(_values(row, "exit0_train_loss"), _values(row, "penalty"))
    assert np.allclose(_values(row, "train_loss"), total, rtol=1e-6)
    for kind in ("bias", "weight"):
        assert len(_values(row, f"{kind}_gradient_at_start")) == 4
        for layer in range(1, 5):
            assert all(norm > 0 for norm in _values(row, f"layer{layer}_{kind}_gradient"))
    assert row.metric("layer5_bias_gradient") is None
    at_start = _values(row, "bias_gradient_at_start")
    assert _values(row, "first_layer_gradient_at_start") == (at_start[0],)
    assert _values(row, "first_over_last_at_start") == (pytest.approx(at_start[0] / at_start[2]),)
    assert at_start[0] < at_start[1] < at_start[2]


def test_a_row_keeps_its_answers(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "variant=cost-quadratic")

    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert (run.family, run.exits, run.synthetic) == ("fundamentals", 1, True)
    assert run.variant.startswith("cost-quadratic")
    assert run.test.logits.shape == (1, 40, 10)
    assert _values(row, "exit0_accuracy")[0] == pytest.approx(_values(row, "test_accuracy")[-1])
    assert _values(row, "exit0_macs") == (784 * 30 + 30 * 10,)
    metric = row.metric("validation_cost")
    assert metric is not None
    assert metric.unit == "1"


@pytest.mark.parametrize("variant", STUDIES.VARIANTS)
def test_each_variant_is_a_choice_and_has_a_network(variant: str) -> None:
    settings, words = STUDIES.settings_of(_plain(f"variant={variant}"))

    assert settings == STUDIES.VARIANTS[variant]
    assert words == ()
    net = NETWORK.Network(settings, 10)
    assert net.layers == len(settings.hidden) + 1 + settings.convolution
    assert net.eval()(torch.rand(2, 1, 28, 28))[0].shape == (2, 10)


def _plain(*words: str, scale: str = "book") -> Dict[str, Any]:
    """Without what makes rows quick, nor what the profile has."""
    undone = ("epochs=0", "train_limit=0", f"scale={scale}", *words)
    return ROWS.parameters(*{word.partition("=")[0]: word for word in undone}.values())


def test_the_choices_are_the_variants() -> None:
    spec = ROWS.spec()
    assert list(spec.parameter("variant").choices) == list(STUDIES.VARIANTS)
    for name in ("short", "paper"):
        assert list(spec.profiles[name].values["variant"]) == list(STUDIES.VARIANTS)
    assert load_claims(EXPERIMENTS / "fundamentals" / "claims.toml", spec)


def test_a_variant_differs_from_the_first_of_its_study_in_what_it_is_called_after() -> None:
    """But for the quadratic cost, whose rate is the book's, and the exploding gradients."""
    free = {"cost-quadratic", "depth-4-relu", "depth-4-relu-large"}
    first: Dict[Any, Any] = {}
    for name, settings in STUDIES.VARIANTS.items():
        key = (settings.study, settings.convolution)
        base = dataclasses.asdict(first.setdefault(key, settings))
        differing = [
            key for key, value in dataclasses.asdict(settings).items() if value != base[key]
        ]
        assert name in free or key[0] == "cost" or len(differing) <= 1, (name, differing)


def test_scales_and_parameters_say_images_and_epochs() -> None:
    def size(*words: str, scale: str = "book") -> Any:
        return STUDIES.settings_of(_plain("variant=overfitting-l2", *words, scale=scale))[0].book

    assert size() == (1_000, 400)
    assert size(scale="small") == STUDIES.VARIANTS["overfitting-l2"].small
    assert size("epochs=7", "train_limit=9") == (9, 7)


def test_parameters_change_a_variant_and_its_name() -> None:
    words = (
        "variant=depth-1", "cost=quadratic", "hidden=8-4", "activation=relu", "lr=0",
        "initialisation=large", "dropout=0.25", "expansion=all", "momentum=0.5",
        "batch_size=3", "gradients=written-out", "l1=0", "l2=0.5",
    )  # fmt: skip

    found, told = STUDIES.settings_of(_plain(*words))

    assert found == dataclasses.replace(
        STUDIES.VARIANTS["depth-1"],
        cost="quadratic", hidden=(8, 4), activation="relu", rate=0.0, start="large", dropout=0.25,
        expansion="all", momentum=0.5, batch_size=3, gradients="written-out", l1=0.0, l2=0.5,
    )  # fmt: skip
    assert len(told) == 12
    assert "cost quadratic" in told


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hidden=30-x", "does not take"),
        ("hidden=0", "is no list of layers"),
        ("hidden=30-", "does not take"),
        ("dropout=1", "dropout of 1"),
        ("dropout=-0.5", "dropout of -0.5"),
        ("l1=-0.5", "l1 is too small"),
        ("l2=-0.1", "l2 is too small"),
        ("momentum=-0.5", "momentum is too small"),
        ("lr=-0.5", "lr is too small"),
        ("batch_size=0", "batch_size is too small"),
        ("validation=1500", "1500 images for validation"),
        ("cost=hinge", "hinge"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, word)


#: Every cost, activation, and what else changes the way back.
WAYS: List[Dict[str, Any]] = [
    {"cost": "quadratic"},
    {"cost": "cross-entropy", "activation": "tanh", "hidden": (5, 4)},
    {"cost": "log-likelihood", "activation": "relu", "hidden": (7,), "dropout": 0.5},
    {"cost": "cross-entropy", "convolution": True, "hidden": (6, 5), "dropout": 0.5},
    {"cost": "log-likelihood", "convolution": True, "activation": "relu", "hidden": (4,)},
    {"cost": "quadratic", "convolution": True, "activation": "tanh", "hidden": (4,)},
]


@pytest.mark.parametrize("changes", WAYS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_gradient_by_hand_is_that_of_autograd(changes: Dict[str, Any], batch: int) -> None:
    torch.manual_seed(0)
    settings = dataclasses.replace(STUDIES.VARIANTS["depth-1"], **changes)
    net = NETWORK.Network(settings, 10, size=10).double().train()
    images = torch.rand(batch, 1, 10, 10, dtype=torch.float64)
    labels = torch.arange(batch) * 3
    wanted = [*net.weights, *net.biases]
    torch.manual_seed(1)
    expected = OBJECTIVE.cost_of(settings.cost, net(images)[0], labels)
    gradients = torch.autograd.grad(expected, wanted)

    torch.manual_seed(1)
    cost, outputs = BY_HAND.cost_and_outputs(net, settings.cost, images, labels)
    found = torch.autograd.grad(cost, wanted)

    assert not outputs.requires_grad
    assert abs(float(cost.detach() - expected.detach())) <= 1e-12
    for mine, its in zip(found, gradients):
        assert mine.shape == its.shape
        assert float((mine - its).abs().max()) <= 1e-12


def test_the_penalty_by_hand_is_that_of_autograd() -> None:
    net = NETWORK.Network(STUDIES.VARIANTS["depth-2"], 10).double()
    objectives = [
        OBJECTIVE.Cost(_settings(l1=0.2, l2=0.3, gradients=by), 3, None)
        for by in ("autograd", "written-out")
    ]

    found = [each._penalty(net) for each in objectives]

    gradients = [torch.autograd.grad(each, list(net.weights)) for each in found]
    assert abs(float((found[0] - found[1]).detach())) <= 1e-9
    for mine, its in zip(*gradients):
        assert float((mine - its).abs().max()) <= 1e-12


def _settings(**changes: Any) -> Any:
    return dataclasses.replace(STUDIES.VARIANTS["depth-2"], **changes)


@pytest.mark.parametrize(
    "words",
    [
        ("variant=by-hand-dense-autograd", "l1=0.001", "lr=0.1"),
        ("variant=dropout-half", "momentum=0.5"),
        ("variant=by-hand-convolution-autograd", "hidden=10", "train_limit=30", "lr=0.1"),
    ],
    ids=lambda words: words[0],
)
def test_the_same_seed_gives_the_same_losses_by_hand(tmp_path: Path, words: Any) -> None:
    given = ("data=synthetic", "test_limit=20", "validation=20", *words)
    rows = [
        ROWS.run(tmp_path / by, f"gradients={by}", *given) for by in ("autograd", "written-out")
    ]

    for name in ("train_loss", "validation_cost", "layer1_weight_gradient", "test_loss"):
        by_autograd, by_hand = (_values(row, name) for row in rows)
        assert len(by_hand) == 2
        assert by_hand == pytest.approx(by_autograd, rel=1e-4)
    assert rows[1].validity.valid
    assert rows[1].facts["precision_ran"] == "fp32"
    assert _values(rows[0], "train_loss")[1] < _values(rows[0], "train_loss")[0]


def test_first_weights_have_the_deviation_that_they_are_called_after() -> None:
    torch.manual_seed(0)
    large = NETWORK.Network(_settings(start="large", hidden=(200,)), 10)
    torch.manual_seed(0)
    scaled = NETWORK.Network(_settings(start="scaled", hidden=(200,), output_bias=5.0), 10)

    assert float(large.weights[0].detach().std()) == pytest.approx(1, rel=0.02)
    for before, after in zip(large.weights, scaled.weights):
        assert torch.allclose(before / math.sqrt(before.shape[1]), after)
    assert torch.equal(large.biases[0], scaled.biases[0])
    assert scaled.biases[1].tolist() == [5.0] * 10


def test_dropout_leaves_neurons_out_in_training_and_makes_up_for_them() -> None:
    torch.manual_seed(0)
    net = NETWORK.Network(_settings(hidden=(400, 50), dropout=0.25), 10)

    masks = net.train().masks(torch.rand(30, 1, 28, 28))

    assert [tuple(each.shape) for each in masks] == [(30, 400), (30, 50)]
    assert masks[0].unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert float(masks[0].mean()) == pytest.approx(1, abs=0.03)
    assert net.eval().masks(torch.rand(3, 1, 28, 28)) == []


def test_copies_show_what_they_say() -> None:
    images = np.random.RandomState(0).randint(0, 256, (3, 1, 7, 6)).astype(np.uint8)
    down, _, right, _ = EXPANSION.EXPANSIONS["shifts"]

    moved = EXPANSION.transformed(images, down)
    assert np.array_equal(moved[:, :, 1:], images[:, :, :-1])
    assert not moved[:, :, 0].any()
    moved = EXPANSION.transformed(images, right)
    assert np.array_equal(moved[..., 1:], images[..., :-1])
    assert not moved[..., 0].any()
    still = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    assert np.array_equal(EXPANSION.transformed(images, still), images)
    assert EXPANSION.transformed(images[:0], still).shape == (0, 1, 7, 6)


def test_a_quarter_turn_and_a_skew_move_pixels_where_they_should() -> None:
    image = np.zeros((1, 1, 5, 5), dtype=np.uint8)
    image[0, 0, 0, 2] = 200  # above the middle
    quarter = ((0.0, 1.0, 0.0), (-1.0, 0.0, 0.0))
    assert EXPANSION.transformed(image, quarter)[0, 0].nonzero()[0].tolist() == [2]
    skewed = EXPANSION.transformed(image, ((1.0, 0.0, 0.0), (0.25, 1.0, 0.0)))
    # The row two above the middle is read half a pixel to the left.
    assert skewed[0, 0, 0].tolist() == [0, 0, 100, 100, 0]


def test_an_epoch_shows_one_copy_of_each_image_and_another_epoch_another() -> None:
    images = np.full((400, 1, 4, 4), 10, dtype=np.uint8)
    labels = np.arange(400) % 10
    feed = EXPANSION.ExpandedFeed(
        images, labels, (0.0,), (1.0,), CPU, EXPANSION.EXPANSIONS["shifts"]
    )
    every = torch.arange(400)
    plain, found = feed.batch(every)
    assert torch.equal(plain, torch.full((400, 1, 4, 4), 10 / 255))
    assert torch.equal(found, feed.labels)

    generator = torch.Generator().manual_seed(0)
    feed.redraw(generator)
    first, found = feed.batch(every)
    feed.redraw(generator)
    second, _ = feed.batch(every)

    assert len(feed) == 400
    assert torch.equal(found, feed.labels)
    assert not torch.equal(first, second)
    # A fifth of them is as it was: a copy lacks the row or column that it was moved away from.
    whole = int((first > 0).flatten(1).all(1).sum())
    assert 50 < whole < 110


def test_copies_are_drawn_in_training(tmp_path: Path) -> None:
    rows = [
        ROWS.run(tmp_path / name, f"variant=overfitting-{name}") for name in ("plain", "all-copies")
    ]

    first, second = (_values(row, "train_loss") for row in rows)
    assert first != second
    assert rows[1].facts["split"]["training"] == 60
    assert rows[1].facts["settings"]["expansion"] == "all"
