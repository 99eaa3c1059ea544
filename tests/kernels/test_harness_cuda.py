"""The compiled timing loop on CUDA: events, holds, graphs, cold caches. Needs a GPU and a build
for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

import time

import pytest
import torch

from narrowgauge_kernels import harness
from narrowgauge_kernels.errors import GraphRefusedError
from narrowgauge_kernels.harness import time_bare, time_kernel, time_operator

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("kernels")]

LIMIT_S = 2.0


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def buffer(device):
    """64 MB: enough for every calibration kernel, and for a copy that outlasts its launch."""
    return torch.zeros(1 << 24, device=device)


def median(samples):
    return samples[0].median().item()


def test_copy_and_add_do_what_they_say(buffer):
    half = buffer.numel() // 2
    buffer[:half] = torch.arange(half, device=buffer.device) % 1000
    harness.launch("copy", buffer, 1)
    assert torch.equal(buffer[half:], buffer[:half])
    harness.launch("add", buffer, 2)
    assert torch.equal(buffer[half:], 3 * buffer[:half])


def test_a_chain_is_as_long_as_it_is_told(buffer):
    short, long = (
        median(time_kernel("multiply-add", buffer, repeats, 20, 4, None, LIMIT_S))
        for repeats in (100_000, 200_000)
    )
    assert long / short == pytest.approx(2.0, rel=0.03)


def test_a_chain_computes(buffer):
    """x -> 0.999 x + 0.001 goes to 1, from wherever a thread began."""
    harness.launch("multiply-add", buffer, 20_000)
    assert buffer[:256].tolist() == pytest.approx([1.0] * 256, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "elements", "said"),
    [("nonesuch", 64, "no calibration kernel"), ("multiply-add", 1, "needs"), ("copy", 4, "needs")],
)
def test_a_wrong_calibration_is_refused(kind, elements, said, device):
    with pytest.raises(RuntimeError, match=said):
        harness.launch(kind, torch.zeros(elements, device=device), 1)


def test_held_samples_are_the_work_alone(buffer):
    """50 kernels of 2 us: held, they follow each other; not held, each waits for its launch."""
    held = median(time_kernel("nothing", buffer, 1, 30, 50, None, LIMIT_S))
    loose = median(time_kernel("nothing", buffer, 1, 30, 50))
    assert held < loose
    assert held < 10e-6


def test_operators_and_kernels_agree_with_the_bare_loop(device, buffer):
    """The same copy, by the dispatcher and directly, held so that launches do not show."""
    half = buffer.numel() // 2
    direct = median(time_kernel("copy", buffer, 1, 50, 8, None, LIMIT_S))
    arguments = [buffer[half:], buffer[:half]]
    dispatched = median(time_operator("aten::copy_", arguments, device, 50, 8, None, LIMIT_S))
    assert direct == pytest.approx(dispatched, rel=0.5)
    bare = median(time_bare(device, 200, 1))
    assert median(time_kernel("nothing", buffer, 1, 200, 1)) - bare < 1e-6


def test_a_graph_is_launched_as_often_as_asked(device):
    counter = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        counter.add_(1)
    torch.cuda.synchronize(device)
    if not hasattr(torch.cuda, "CUDAGraph") or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        with pytest.raises(GraphRefusedError):
            harness.Graph(object(), device)
        return
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        for _ in range(10):
            counter.add_(1)
    counter.zero_()
    with harness.Graph(captured, device) as graph:
        samples = graph.time(5, 3, None, LIMIT_S)
    # Fifteen timed and one or more that nobody times, ten additions each.
    assert counter.item() % 10 == 0
    assert counter.item() >= 10 * 16
    assert (samples > 0).all()


def test_a_graph_that_was_not_kept_is_refused(device):
    if not hasattr(torch.cuda, "CUDAGraph") or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        pytest.skip("this torch gives no graph out at all")
    counter = torch.zeros(1, device=device)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        counter.add_(1)
    with pytest.raises(GraphRefusedError, match="keep_graph"):
        harness.Graph(captured, device)


def test_a_flushed_cache_is_slower_than_a_hot_one(device):
    """A copy that fits the L2 of every card since Volta."""
    buffer = torch.zeros(1 << 19, device=device)
    flush = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    hot = median(time_kernel("copy", buffer, 1, 100, 1, None, LIMIT_S))
    cold = median(time_kernel("copy", buffer, 1, 100, 1, flush, LIMIT_S))
    assert cold > 1.05 * hot


def test_work_that_waits_for_the_device_ends_the_hold_and_says_so(device):
    """`_local_scalar_dense` copies to the host: behind a hold it waits for its own release."""
    one = torch.ones(1, device=device)
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="still not queued"):
        time_operator("aten::_local_scalar_dense", [one], device, 1, 1, None, 0.2)
    assert 0.15 < time.perf_counter() - began < 5.0
    # And the loop is as good as before.
    assert (time_operator("aten::relu", [one], device, 3, 1, None, LIMIT_S) > 0).all()


def test_an_error_of_the_work_is_its_own_and_leaves_no_hold(device):
    x, y = torch.ones(2, 2, device=device), torch.ones(3, 3, device=device)
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"size|shape"):
        time_operator("aten::mm", [x, y], device, 1, 1, None, LIMIT_S)
    torch.cuda.synchronize(device)
    assert time.perf_counter() - began < LIMIT_S


def test_a_hold_lasts_until_it_is_released(device):
    x = torch.zeros(1, device=device)
    x.add_(1)  # loads the kernel: loading may wait for the device
    torch.cuda.synchronize(device)
    done = torch.cuda.Event()
    harness.hold(device.index, LIMIT_S)
    x.add_(1)
    done.record()
    time.sleep(0.05)
    assert not done.query()
    assert harness.release(device.index) is True
    torch.cuda.synchronize(device)
    assert x.item() == 2


def test_a_hold_that_nobody_releases_ends_by_itself(device):
    began = time.perf_counter()
    harness.hold(device.index, 0.2)
    torch.cuda.synchronize(device)
    assert 0.15 < time.perf_counter() - began < 5.0
    assert harness.release(device.index) is False
    harness.hold(device.index, LIMIT_S)
    assert harness.release(device.index) is True
