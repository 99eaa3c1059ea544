"""The planner's integer program against every decision that there is."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.planner.instance import Choice, Cost, Decision, Group, Instance, Native, predict
from narrowgauge.planner.milp import solve
from narrowgauge_contract.placement import PASSES

_SECONDS = st.floats(min_value=0.0, max_value=1e-3)
_COSTS = st.builds(Cost, *[_SECONDS] * 5)
_WHOLE = st.integers(min_value=0, max_value=10_000_000)


def _decisions(group: Group) -> Iterator[Decision]:
    """All that one layer may have."""
    yield from (Decision(native, {}) for native in group.native)
    for chosen in itertools.product(*group.choices.values()):
        yield Decision(None, dict(zip(group.choices, chosen, strict=True)))


def _exhaustive(instance: Instance) -> float | None:
    """The fastest step of all decisions for all layers; None where no decision fits."""
    layers = [(layer, group) for group in instance.groups for layer in group.layers]
    best: float | None = None
    for combination in itertools.product(*(_decisions(group) for _, group in layers)):
        if len({each.native.precision for each in combination if each.native is not None}) > 1:
            continue
        decided = {layer: each for (layer, _), each in zip(layers, combination, strict=True)}
        found = predict(instance, decided)
        if instance.memory is not None and found.bytes > instance.memory:
            continue
        best = found.seconds if best is None else min(best, found.seconds)
    return best


@st.composite
def _groups(draw: st.DrawFn, name: str, layers: int, split: bool) -> Group:
    wanted = draw(st.booleans())
    home = "cpu" if split else "accelerator"
    choices = {}
    for pass_ in PASSES:
        if pass_ == "input_grad" and not wanted:
            continue
        choices[pass_] = (
            Choice("cpu", "fp32", draw(_COSTS)),
            Choice("accelerator", "fp32", draw(_COSTS), away=split),
        )
    native = [Native(home, "fp32", draw(_COSTS), draw(_COSTS))] if draw(st.booleans()) else []
    if not split and native and draw(st.booleans()):
        native.append(Native(home, "tf32", draw(_COSTS), draw(_COSTS)))
    return Group(
        tuple(f"{name}{at}" for at in range(layers)), choices, tuple(native), draw(_COSTS),
        draw(_COSTS), draw(_WHOLE), draw(_WHOLE),
    )  # fmt: skip


@st.composite
def _instances(draw: st.DrawFn, sizes: tuple[int, ...], memory: bool = False) -> Instance:
    split = draw(st.booleans())
    groups = tuple(
        draw(_groups(letter, size, split)) for letter, size in zip("abcd", sizes, strict=False)
    )
    limit = draw(st.integers(min_value=0, max_value=50_000_000)) if memory else None
    return Instance(
        groups, split, draw(_COSTS), draw(_COSTS), draw(_COSTS), draw(_SECONDS),
        draw(st.floats(min_value=0.0, max_value=1e-10)), draw(st.booleans()), draw(_WHOLE),
        draw(_WHOLE), limit,
    )  # fmt: skip


def _agree(instance: Instance) -> None:
    solved, best = solve(instance), _exhaustive(instance)

    assert (solved is None) == (best is None)
    if solved is None or best is None:
        return
    found = predict(instance, solved.decisions)
    # The program's tolerances: 1e-6 us, and as much for each row.
    assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-11)
    assert solved.seconds == pytest.approx(found.seconds, rel=1e-6, abs=1e-11)
    # HiGHS' 1e-6 of a MiB.
    assert instance.memory is None or found.bytes <= instance.memory + 2


@settings(max_examples=4, deadline=None, derandomize=True)
@given(_instances((1, 1, 1, 1)))
def test_of_four_layers_no_decision_is_faster(instance: Instance) -> None:
    _agree(instance)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(_instances((3,)))
def test_of_layers_alike_no_decision_is_faster(instance: Instance) -> None:
    _agree(instance)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_instances((1, 2)))
def test_of_mixed_layers_no_decision_is_faster(instance: Instance) -> None:
    _agree(instance)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(_instances((2, 1), memory=True))
def test_within_a_memory_no_decision_is_faster(instance: Instance) -> None:
    _agree(instance)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(_instances((2, 1)))
def test_the_least_memory_is_what_all_decisions_take_at_least(instance: Instance) -> None:
    solved = solve(instance, least_memory=True)
    layers = [(layer, group) for group in instance.groups for layer in group.layers]
    every = [
        predict(
            instance, {layer: each for (layer, _), each in zip(layers, combination, strict=True)}
        ).bytes
        for combination in itertools.product(*(_decisions(group) for _, group in layers))
    ]

    assert solved is not None
    assert solved.seconds == pytest.approx(min(every), abs=2.0)


def test_what_the_solver_prints_by_itself_does_not_reach_standard_output() -> None:
    """As a process of its own, whose standard output is a pipe."""
    script = """
import ctypes
from narrowgauge.planner.milp import _quiet
print("before")
with _quiet():
    ctypes.CDLL(None).puts(b"chatter")
print("after")
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert found.stdout == "before\nafter\n"
