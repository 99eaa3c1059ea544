"""How OpenMP's threads wait, by what the environment says and the processors there are."""

from __future__ import annotations

from typing import Dict

import pytest

from narrowgauge_lab.waiting import processors, waiting

ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
SPINNING = {**ASLEEP, "GOMP_SPINCOUNT": "100000"}


@pytest.mark.parametrize(
    ("env", "available", "added"),
    [
        ({}, 16, ASLEEP),  # as many threads as processors, of which others may want some
        ({"OMP_NUM_THREADS": "8"}, 16, SPINNING),
        ({"OMP_NUM_THREADS": "9"}, 16, ASLEEP),
        ({"OMP_NUM_THREADS": "2"}, 2, ASLEEP),
        ({"OMP_NUM_THREADS": "1"}, 16, ASLEEP),  # which waits for nobody
        ({"OMP_NUM_THREADS": "8,2"}, 64, ASLEEP),  # of nested regions
        ({"OMP_NUM_THREADS": "many"}, 64, ASLEEP),
        ({"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "ACTIVE"}, 16, {}),
        ({"OMP_NUM_THREADS": "8", "GOMP_SPINCOUNT": "0"}, 16, {}),
    ],
)
def test_threads_spin_where_as_many_processors_are_left(
    env: Dict[str, str], available: int, added: Dict[str, str]
) -> None:
    assert waiting(env, available) == added


def test_this_process_has_a_processor() -> None:
    assert processors() >= 1
