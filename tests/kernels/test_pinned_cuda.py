"""Page-locked CPU tensors on a GPU host. Needs a GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from narrowgauge_kernels.sources import CSRC

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

START = """
import os, torch
from narrowgauge_kernels import pinned, wire
MIB = 1 << 20
before = torch.ones(MIB)
assert not before.is_pinned()
pinned.install(64 * MIB)
assert pinned.is_installed()
"""

MEMORY = """
x = torch.randn(MIB)
assert x.is_pinned() and not torch.ones(8).is_pinned() and not before.is_pinned()
numbers = pinned.statistics()
assert (numbers.held, numbers.used, numbers.limit) == (4 * MIB, 4 * MIB, 64 * MIB), numbers
assert torch.equal(x.cuda().cpu(), x)
kept = [torch.empty(16 * MIB) for _ in range(3)]
numbers = pinned.statistics()
assert [each.is_pinned() for each in kept] == [False] * 3, numbers
assert (numbers.pageable_bytes, numbers.pageable_allocations) == (3 * 64 * MIB, 3), numbers
pinned.install(1024 * MIB)
assert torch.empty(16 * MIB).is_pinned()
"""

ASYNCHRONOUS = """
torch.cuda._sleep(1)  # loaded before it is timed
torch.cuda.synchronize()
stream = torch.cuda.Stream()
x = torch.full((4 * MIB,), 3.0)
address = x.data_ptr()
out = torch.empty(4 * MIB, device="cuda")
with torch.cuda.stream(stream):
    torch.cuda._sleep(1_000_000_000)
    out.copy_(x, non_blocking=True)
assert pinned.keep(x, stream)
del x
other = torch.zeros(4 * MIB)
assert other.data_ptr() != address
torch.cuda.synchronize()
assert bool((out == 3).all())
again = torch.zeros(4 * MIB)
assert again.data_ptr() == address
with torch.cuda.stream(stream):
    torch.cuda._sleep(1_000_000_000)
    wire.mapped_copy(out, again)  # keeps it by itself
del again
assert torch.ones(4 * MIB).data_ptr() != address
torch.cuda.synchronize()
assert bool((out == 0).all())
"""

GRAPH = """
if hasattr(torch.cuda, "CUDAGraph"):
    x = torch.full((MIB,), 2.0)
    out = torch.empty(MIB, device="cuda")
    wire.mapped_copy(out, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wire.mapped_copy(out, x)
        new = torch.empty(3 * MIB)  # the driver is asked while a stream is captured
    assert new.is_pinned()
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((out == 5).all())
    address = x.data_ptr()
    del x
    assert torch.empty(MIB).data_ptr() != address
"""

FORK = """
torch.set_num_threads(1)
x = torch.ones(MIB)
child = os.fork()
if child == 0:
    y = torch.ones(MIB)
    os._exit(0 if y.sum().item() == MIB and not pinned.is_installed() else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.ones(MIB).is_pinned()
"""

THREADS = """
import threading
def work():
    for size in range(4096, 40960, 512):
        torch.full((size,), 1.0).cuda()
threads = [threading.Thread(target=work) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
del each
numbers = pinned.statistics()
assert numbers.used == 0 and numbers.held <= numbers.limit, numbers
left_over = torch.ones(MIB)  # the process ends with it
"""


def run(code, start=START):
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, "PYTHONPATH": str(CSRC.parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "code", [MEMORY, ASYNCHRONOUS, GRAPH, FORK, THREADS],
    ids=["memory", "asynchronous", "graph", "fork", "threads"],
)  # fmt: skip
def test_in_a_process_of_its_own(code):
    run(code)


def test_a_second_device_is_left_alone():
    """A thread that never chose a device asks for memory: no context is made on device 0."""
    import torch

    if torch.cuda.device_count() < 2 or not hasattr(torch._C, "_cuda_hasPrimaryContext"):
        pytest.skip("needs two GPUs, and a torch that tells which have a context")
    run(
        """
import threading, torch
from narrowgauge_kernels import pinned
torch.cuda.set_device(1)
pinned.install(512 << 20)
assert not torch._C._cuda_hasPrimaryContext(0)
thread = threading.Thread(target=lambda: torch.ones(32 << 20))
thread.start()
thread.join()
assert pinned.statistics().held >= 128 << 20
assert not torch._C._cuda_hasPrimaryContext(0)
""",
        start="",
    )
