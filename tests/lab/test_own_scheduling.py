"""The order of launches on two streams, and which of them may begin while the one before runs."""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_lab.engines.own.gpu.scheduling import Queued, in_turn

STEPS = [("a",), ("b",), ("c",), ("d",), ("e",)]


def marked(steps: List[Tuple[str, ...]], waiting: Dict[int, int]) -> str:
    """Each launch after its marks: ~ follows, > joins, < forks; capitals are on the second."""
    return " ".join(
        "~" * each.follows + ">" * each.joins + "<" * each.forks
        + (each.launch.upper() if each.aside else each.launch)
        for each in in_turn(steps, waiting)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("waiting", "wanted"),
    [
        ({}, "~a ~b ~c ~d ~e"),
        ({1: 3}, "~a <B c >d ~e"),
        ({0: 4}, "<A b ~c ~d >e"),
        ({1: 3, 3: 5}, "~a <B c ><D e"),
        ({1: 4, 2: 4}, "~a <B <C d >e"),
        ({1: 3, 2: 4}, "~a <B <C >d ~e"),
        ({3: 5}, "~a ~b ~c <D e"),
    ],
)
def test_what_follows_another_waits_for_nothing_else(waiting: Dict[int, int], wanted: str) -> None:
    assert marked(STEPS, waiting) == wanted


def test_a_join_before_a_step_without_launches_is_of_the_next() -> None:
    assert marked([("a",), ("b",), ("c",), (), ("e", "f")], {1: 3}) == "~a <B c >e ~f"


def test_a_step_of_several_launches_forks_once() -> None:
    assert marked([("a",), ("b", "c"), ("d",)], {1: 3}) == "~a <B ~C d"


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.dictionaries(st.integers(0, 8), st.integers(1, 4), max_size=5),
)
def test_streams_wait_for_each_other_as_often_as_they_must(
    sizes: List[int], after: Dict[int, int]
) -> None:
    """Played on two streams, every launch comes after all that it has to."""
    steps = [tuple(f"{place}.{number}" for number in range(n)) for place, n in enumerate(sizes)]
    waiting = {place: place + 1 + far for place, far in after.items() if place < len(sizes)}
    done: Dict[bool, List[str]] = {False: [], True: []}
    seen: Dict[bool, List[str]] = {False: [], True: []}
    queue: List[Queued[str]] = in_turn(steps, waiting)
    known: Dict[str, List[str]] = {}
    for each in queue:
        if each.joins:
            seen[False] += done[True]
        if each.forks:
            seen[True] += done[False] + seen[False]
        known[each.launch] = [*done[each.aside], *seen[each.aside]]
        done[each.aside].append(each.launch)

    assert [each.launch for each in queue] == [name for step in steps for name in step]
    for each in queue:
        place = int(each.launch.split(".")[0])
        for before in range(place):
            if waiting.get(before, before + 1) <= place or (each.aside and before not in waiting):
                assert set(steps[before]) <= set(known[each.launch])
    for before, each in zip(queue, queue[1:]):
        assert each.follows <= (before.aside == each.aside and not (each.joins or each.forks))
