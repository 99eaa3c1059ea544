"""OpenMP threads for one call: set, set back, and nobody else's business."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import List

import pytest
import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.own.cpu import threads

X = torch.zeros(1)

pytestmark = pytest.mark.skipif(
    not torch_compat.threads_may_change(), reason="this torch's convolutions do not bear it"
)


def _other_than(count: int) -> int:
    return 1 if count > 1 else 2


def test_the_runtime_that_torch_uses_is_found() -> None:
    assert threads.find_openmp() is not None


def test_a_call_has_its_threads_and_leaves_those_that_were() -> None:
    before = torch.get_num_threads()
    wanted = _other_than(before)
    seen: List[int] = []

    call = threads.with_threads(lambda x: seen.append(torch.get_num_threads()), wanted)
    call(X)

    assert seen == [wanted]
    assert torch.get_num_threads() == before


def test_an_error_leaves_the_threads_that_were() -> None:
    before = torch.get_num_threads()

    def fail(_: torch.Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        threads.with_threads(fail, _other_than(before))(X)
    assert torch.get_num_threads() == before


def test_other_threads_of_the_process_keep_theirs_meanwhile() -> None:
    before = torch.get_num_threads()
    seen: List[int] = []

    def look(_: torch.Tensor) -> None:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()

    threads.with_threads(look, _other_than(before))(X)

    assert seen == [before]


def test_a_thread_that_begins_with_such_a_call_has_its_threads_too() -> None:
    """torch initialises each thread at its first parallel loop, which must not write over them."""
    before = torch.get_num_threads()
    wanted = _other_than(before)
    seen: List[int] = []

    def work() -> None:
        def call(_: torch.Tensor) -> None:
            torch.ones(1 << 20).sum()
            seen.append(torch.get_num_threads())

        threads.with_threads(call, wanted)(X)
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()

    assert seen == [wanted, before]


def test_mkl_follows_too_where_set_num_threads_told_it_a_number() -> None:
    """It follows OpenMP by itself, until torch.set_num_threads tells it a number of its own."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    mkl = ctypes.CDLL(str(library)) if library.is_file() else None
    if not hasattr(mkl, "MKL_Set_Num_Threads_Local"):
        pytest.skip("this torch shows no MKL function for one thread's number")
    before = torch.get_num_threads()
    wanted = _other_than(before)
    torch.set_num_threads(before)

    def call(_: torch.Tensor) -> int:
        return int(mkl.MKL_Get_Max_Threads())

    assert threads.with_threads(call, wanted)(X) == wanted
    assert call(X) == before


def test_zero_is_the_caller_s_number() -> None:
    def call(_: torch.Tensor) -> int:
        return torch.get_num_threads()

    assert threads.with_threads(call, 0) is call


@pytest.mark.parametrize(
    ("usable", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_the_numbers_to_try(usable: int, counts: object) -> None:
    assert threads.thread_counts(usable) == counts


def test_without_a_runtime_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "find_openmp", lambda: None)

    def call(_: torch.Tensor) -> int:
        return torch.get_num_threads()

    assert threads.thread_counts() == ()
    assert threads.with_threads(call, 1)(X) == torch.get_num_threads()
