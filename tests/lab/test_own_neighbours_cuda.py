"""Our engine's bits while other processes use the GPU: kernels are then stopped and go on, begin
late and end late, and whatever relies on an order that nobody waits for shows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Dict, Iterator, List

import pytest
import torch
from network_cases import everything, images

from narrowgauge_lab import engines, tf32_flags
from narrowgauge_lab.engines import registry
from narrowgauge_lab.engines.graph import capture
from narrowgauge_lab.engines.own.gpu import ahead
from narrowgauge_lab.engines.own.gpu.formats import FORMATS
from narrowgauge_lab.engines.own.gpu.lowered import lowered
from narrowgauge_lab.engines.own.gpu.work import Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore:::torch"),
]
CUDA = torch.device("cuda")
HEIGHT, WIDTH = 39, 33
TURNS = 300
#: Multiplies matrices of one size until it is killed.
_BUSY = """
import sys, torch
x = torch.randn(int(sys.argv[1]), int(sys.argv[1]), device="cuda", dtype=torch.float16)
(x @ x).sum().item()
print("busy", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def neighbours() -> Iterator[None]:
    """Three other processes on the GPU, one with kernels that fill it."""
    busy = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(side)], stdout=subprocess.PIPE)
        for side in (256, 1024, 6144)
    ]
    try:
        for each in busy:
            assert each.stdout is not None
            assert each.stdout.readline() == b"busy\n"
        yield
    finally:
        for each in busy:
            each.kill()
            each.communicate()


def _choose(work: Work, which: str) -> None:
    """Ours, what libraries offer, or now this and now that."""
    for place, launch in enumerate(work.launches()):
        theirs = [] if which == "ours" else launch.others(1.0)
        if theirs and (which == "theirs" or place % 2):
            launch.chosen = theirs[0]


def _one_by_one(work: Work) -> torch.Tensor:
    work._read()
    for launch in work.launches():
        launch()
        torch.cuda.synchronize()
    return work._finish().clone()


@pytest.mark.parametrize("early", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("beside", [False, True], ids=["one-stream", "beside"])
@pytest.mark.parametrize(
    ("name", "which"),
    [("fp16", "ours"), ("fp16", "mixed"), ("fp16", "theirs"), ("bf16", "mixed"),
     ("fp32", "mixed"), ("int8", "ours")],
)  # fmt: skip
@pytest.mark.usefixtures("neighbours")
def test_bits_do_not_depend_on_what_else_the_gpu_does(
    name: str, which: str, beside: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed graph against its launches one by one, each waited for."""
    reason = engines.missing("narrowgauge", CUDA) or registry.refuses("narrowgauge", name, CUDA)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(ahead, "LAUNCHED_AHEAD", early)
    model = everything(HEIGHT, WIDTH, torch_step=not FORMATS[name].scaled)
    with tf32_flags.tf32_set_to(False), torch.inference_mode():
        few = images(16, 7, HEIGHT, WIDTH)
        network = lowered(model, tuple(few.shape[1:]), FORMATS[name], [few], CUDA)
        given = {seed: images(2, seed, HEIGHT, WIDTH).to(CUDA) for seed in range(3)}
        read_from = torch.empty_like(given[0])
        work = Work(network, network.memory(2), read_from)
        _choose(work, which)
        wanted: Dict[int, torch.Tensor] = {}
        for seed, x in given.items():
            read_from.copy_(x)
            wanted[seed] = _one_by_one(work)
        work.beside = beside
        assert work.has_besides
        replay = capture(work.run, CUDA)
        off: List[Any] = []
        for turn in range(TURNS):
            read_from.copy_(given[turn % 3])
            found = replay()
            if not torch.equal(found, wanted[turn % 3]):
                off.append((turn, float((found - wanted[turn % 3]).abs().max())))

    assert not off, (
        f"{len(off)} of {TURNS}, by up to {max(far for _, far in off):.2g}, first at {off[0]}; "
        f"{[launch.running().kernel for launch in work.launches()]}"
    )
