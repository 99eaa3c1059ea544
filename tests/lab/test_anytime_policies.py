"""Who leaves where: the rules, their replay, and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from exit_cases import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import BadValueError, NarrowgaugeError
from narrowgauge_contract.spec import load_spec
from narrowgauge_lab.anytime.policies import (
    POLICIES,
    Entropy,
    Margin,
    MaxProbability,
    Memory,
    Patience,
    parse,
    simulate,
)

NAN, INF = float("nan"), float("inf")


def test_entropy_is_of_the_softmax_in_nats_and_zero_where_one_class_has_it_all() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, -100.0, 0.0, 0.0], [INF, 0, 0, 0]])
    nats = Entropy([1.0]).measure(logits)
    assert nats[0].item() == pytest.approx(math.log(4))
    assert nats[1].item() == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(nats[2])
    assert Entropy([1.0], normalised=True).measure(logits)[0].item() == pytest.approx(1.0)


def test_a_class_that_is_impossible_adds_nothing_to_the_entropy() -> None:
    nats = Entropy([1.0]).measure(torch.tensor([[0.0, 0.0, -INF]]))
    assert nats.item() == pytest.approx(math.log(2))


def test_probability_and_margin_are_of_the_largest_classes() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    assert MaxProbability([0.5]).measure(logits).item() == pytest.approx(0.6)
    assert Margin([0.5]).measure(logits).item() == pytest.approx(0.3)
    assert Margin([0.5]).measure(logits[:, :1]).item() == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["entropy:0", "max-probability:inf", "margin:1.5", "patience:9"])
def test_thresholds_that_nobody_meets_leave_all_to_the_last_exit(text: str) -> None:
    logits = torch.randn(3, 20, 4)
    assert simulate(parse(text), logits).tolist() == [2] * 20


@pytest.mark.parametrize("text", ["entropy:inf", "entropy:10", "max-probability:0", "margin:0"])
def test_thresholds_that_all_meet_let_everybody_leave_at_the_first(text: str) -> None:
    assert simulate(parse(text), torch.randn(3, 20, 4)).tolist() == [0] * 20


def test_each_exit_has_its_own_threshold_or_one_serves_all() -> None:
    sure = logits_of([3.0, 0.0, 0.0], [3.0, 3.0, 0.0], [3.0, 3.0, 3.0])
    assert simulate(parse("max-probability:0.9"), sure).tolist() == [0, 1, 2]
    assert simulate(parse("max-probability:0.99,0.9"), sure).tolist() == [1, 1, 2]
    assert simulate(parse("max-probability:0.9,0.99"), sure).tolist() == [0, 2, 2]


@pytest.mark.parametrize("text", ["entropy:0.1,0.2,0.3", "margin:0.1,0.2,0.3,0.4"])
def test_a_wrong_number_of_thresholds_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(BadValueError, match="thresholds for a network of 3 exits") as error:
        parse(text, exits=3)
    assert "1 or 2" in error.value.next_step
    with pytest.raises(BadValueError):
        simulate(parse(text), torch.zeros(3, 1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "entropy", "entropy:", "entropy:x", "entropy:nan", "entropy:-1", "entropy:0.5,",
        "max-probability:nan", "margin:-0.1", "patience:0", "patience:-1", "patience:1.5",
        "patience:", "sureness:1", "", ":", "entropy-normalised:",
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(NarrowgaugeError) as error:
        parse(text)
    assert error.value.exit_code == 2
    assert str(error.value)


@given(
    st.text("entropy:0.5,-ainfmgx |\n²", max_size=20)
    | st.sampled_from(sorted(POLICIES)).map(lambda name: f"{name}:1,e")
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_parsed_is_a_policy_or_an_error_of_ours(text: str) -> None:
    try:
        policy = parse(text)
    except NarrowgaugeError:
        return
    assert str(parse(str(policy))) == str(policy)


@given(
    st.sampled_from(["entropy", "entropy-normalised", "max-probability", "margin"]),
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_a_policy_is_what_its_text_says(name: str, values: list) -> None:
    policy = parse(f"{name}:{','.join(map(repr, values))}")
    assert parse(str(policy)).thresholds == policy.thresholds == tuple(values)


@pytest.mark.parametrize("text", ["entropy:9", "max-probability:0", "margin:0", "patience:1"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_that_are_not_finite_are_never_confident(text: str, bad: float) -> None:
    logits = torch.zeros(3, 2, 3)
    logits[:2, 0, 1] = bad
    assert simulate(parse(text), logits).tolist() == [2, 1 if "patience" in text else 0]


def test_patience_counts_exits_in_a_row_that_agree_with_the_one_before() -> None:
    #        exit: 0   1   2   3
    answers = [
        [1, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 1, 0, 1],
        [1, 1, 0, 0],
    ]
    logits = torch.nn.functional.one_hot(torch.tensor(answers), 2).float().transpose(0, 1)
    assert simulate(Patience(1), logits).tolist() == [1, 2, 3, 1]
    assert simulate(Patience(2), logits).tolist() == [2, 3, 3, 3]


def test_memory_follows_the_samples_that_go_on() -> None:
    memory, patience = Memory(), Patience(1)
    first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert not patience.leaves(0, first, memory).any()
    memory.select(torch.tensor([2, 1]))
    leaves = patience.leaves(1, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), memory)
    assert leaves.tolist() == [True, False]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_stored_logits_of_any_type_are_replayed(kind: type) -> None:
    stored = np.array([[[2.0, 0.0]], [[0.0, 0.0]]], dtype=kind)
    assert simulate(parse("max-probability:0.8"), stored).tolist() == [0]
    assert simulate(parse("max-probability:0.8"), list(torch.tensor(stored))).tolist() == [0]


@pytest.mark.parametrize("shape", [(2, 3), (0, 1, 2), (2, 1, 0)])
def test_logits_of_another_shape_are_refused(shape: tuple) -> None:
    with pytest.raises(BadValueError, match="logits of shape"):
        simulate(parse("entropy:1"), np.zeros(shape))


def test_no_samples_leave_nowhere() -> None:
    assert simulate(parse("entropy:1"), np.zeros((2, 0, 3))).tolist() == []


def test_one_exit_needs_no_threshold_and_takes_one() -> None:
    assert simulate(parse("entropy:9", exits=1), torch.zeros(1, 2, 3)).tolist() == [0, 0]


def test_half_precision_is_widened_before_it_is_measured() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    for kind in (torch.float16, torch.bfloat16):
        assert Entropy([1.0]).measure(logits.to(kind)).dtype == torch.float32


#: Experiments that declare how a policy is written, each anew: TOML shares nothing.
DECLARED = (
    "branchynet", "ddnn", "feature-pyramid", "iresnext", "nested-osgd", "resolution-ladder",
)  # fmt: skip


@pytest.mark.parametrize("experiment", DECLARED)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_experiments_declare_takes_every_policy(experiment: str, name: str) -> None:
    root = Path(__file__).parents[2] / "experiments"
    policy = load_spec(root / experiment / "experiment.toml").parameters["policy"]

    assert policy.pattern
    assert policy.parse(f"{name}:1") == f"{name}:1"
