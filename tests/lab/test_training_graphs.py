"""When a captured step warms up, captures, replays or runs eagerly; a fake plays CUDA.

That a replay computes the right thing only a GPU can show: `test_training_gpu.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List

import pytest
import torch

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab.graphs import CaptureError, GraphedStep


class FakeCuda:
    """Records what is asked of it. `fail` is raised inside the capture."""

    def __init__(self) -> None:
        self.calls: List[str] = []
        self.fail: str = ""

    def wait_stream(self, other: Any) -> None:
        self.calls.append("wait")

    def replay(self) -> None:
        self.calls.append("replay")

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("side stream")
        yield

    @contextmanager
    def capture(self, graph: Any, stream: Any) -> Iterator[None]:
        self.calls.append("capture")
        yield
        if self.fail:
            raise RuntimeError(self.fail)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake)
    monkeypatch.setattr(torch.cuda, "stream", fake.on_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: fake, raising=False)
    monkeypatch.setattr(torch.cuda, "graph", fake.capture, raising=False)
    return fake


def _step(seen: List[List[int]], batch: int = 2) -> GraphedStep:
    return GraphedStep(lambda i: seen.append(i.tolist()), batch, torch.device("cpu"), warm_up=2)


def _take(step: GraphedStep, count: int) -> None:
    for _ in range(count):
        step(torch.tensor([0, 1]))


def test_it_warms_up_captures_once_and_replays(cuda: FakeCuda) -> None:
    seen: List[List[int]] = []
    step = _step(seen)
    for start in range(5):
        step(torch.tensor([start, start + 1]))

    warm_up = ["wait", "side stream", "wait"]
    assert cuda.calls == [*warm_up, *warm_up, "capture", "replay", "replay", "replay"]
    # Two real steps, and the one whose launches the capture wrote down.
    assert seen == [[0, 1], [1, 2], [2, 3]]


def test_each_replay_finds_its_own_batch_where_the_capture_reads(cuda: FakeCuda) -> None:
    places: List[torch.Tensor] = []
    step = GraphedStep(places.append, 2, torch.device("cpu"), warm_up=0)
    for start in range(3):
        step(torch.tensor([start, start + 1]))
        assert places[0].tolist() == [start, start + 1]

    assert len(places) == 1


def test_a_partial_batch_is_eager_before_and_after_the_capture(cuda: FakeCuda) -> None:
    seen: List[List[int]] = []
    step = _step(seen)
    for indices in ([7], [0, 1], [2, 3], [8], [4, 5], [9], [10, 11]):
        step(torch.tensor(indices))

    assert cuda.calls.count("capture") == 1
    assert cuda.calls.count("replay") == 2
    assert seen == [[7], [0, 1], [2, 3], [8], [4, 5], [9]]


def test_what_cannot_be_captured_is_an_error_with_the_way_out(cuda: FakeCuda) -> None:
    cuda.fail = "operation not permitted when stream is capturing\nmore lines"
    step = _step([])
    with pytest.raises(CaptureError, match="could not be captured") as caught:
        _take(step, 3)

    assert caught.value.why == "operation not permitted when stream is capturing"
    assert "-p graphs=off" in caught.value.next_step
    assert caught.value.exit_code is ExitCode.RUN_FAILED
    assert "replay" not in cuda.calls


def test_out_of_memory_during_capture_stays_what_it_is(cuda: FakeCuda) -> None:
    cuda.fail = "CUDA out of memory. Tried to allocate 2 GiB"
    step = _step([])
    with pytest.raises(RuntimeError, match="out of memory"):
        _take(step, 3)


def test_a_step_that_was_never_captured_does_not_say_so(cuda: FakeCuda) -> None:
    step = _step([])
    _take(step, 2)
    before = step.description
    _take(step, 1)

    assert (before, step.description) == ("off", "cuda-graph")
