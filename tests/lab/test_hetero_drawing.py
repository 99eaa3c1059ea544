"""Seeds of a model's passes: of each by itself, and by its place in a step."""

from __future__ import annotations

from typing import List, Tuple

import torch

from narrowgauge_lab.layers.hetero.drawing import Draws
from narrowgauge_lab.layers.passes.seeds import SeedAt, seed_under

CPU = torch.device("cpu")


def test_without_steps_each_is_a_draw_of_the_generator() -> None:
    torch.manual_seed(3)
    draws = Draws(CPU)
    found = [draws.next(on_device=True) for _ in range(3)]

    torch.manual_seed(3)
    assert found == [int(torch.randint(0, 1 << 62, (1,))) for _ in range(3)]
    assert len(set(found)) == 3


def test_a_step_takes_one_draw_however_many_seeds_it_asks_for() -> None:
    def states(counts: Tuple[int, ...]) -> List[List[object]]:
        torch.manual_seed(5)
        draws, found = Draws(CPU), []
        for count in counts:
            draws.begin()
            found.append([draws.next(on_device=False) for _ in range(count)])
        return found

    replayed, launched = states((4, 0, 4)), states((4, 4, 4))
    assert replayed[2] == launched[2], "a replay asks for none and shifts none"
    assert len({each for step in launched for each in step}) == 12


def test_what_runs_aside_leaves_places_alone() -> None:
    torch.manual_seed(1)
    draws = Draws(CPU)
    draws.begin()
    first = draws.next(on_device=False)
    with torch.random.fork_rng(devices=[]), draws.aside():
        aside = draws.next(on_device=True)
    second = draws.next(on_device=False)

    torch.manual_seed(1)
    base = int(torch.randint(0, 1 << 62, (1,)))
    assert (first, second) == (seed_under(base, 0), seed_under(base, 1))
    assert aside == int(torch.randint(0, 1 << 62, (1,)))


def test_a_seed_on_the_device_is_the_one_of_the_host() -> None:
    for base in (0, 2**62 - 1, -5):
        at = SeedAt(torch.tensor([base]), 9)
        assert at.value() == seed_under(base, 9)
        assert (base + at.offset - at.value()) % 2**64 == 0
        assert -(2**63) <= at.value() < 2**63
