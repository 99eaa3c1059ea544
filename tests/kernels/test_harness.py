"""The compiled timing loop on a CPU: what it calls, how often, and what it refuses."""

from __future__ import annotations

import re
import time

import pytest
import torch

from narrowgauge_kernels import harness
from narrowgauge_kernels.errors import GraphRefusedError, KernelsNotBuiltError
from narrowgauge_kernels.harness import time_operator
from narrowgauge_kernels.sources import CSRC

pytestmark = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")


def test_an_operator_is_called_as_often_as_asked():
    """Twelve in samples, and one that nobody times."""
    counter, one = torch.zeros(1), torch.ones(1)
    samples = time_operator("aten::add_.Tensor", [counter, one], CPU, samples=4, calls=3)

    assert counter.item() == 4 * 3 + 1
    assert (samples.shape, samples.dtype) == ((2, 4), torch.float64)
    assert (samples > 0).all()
    assert torch.equal(samples[0], samples[1])


def test_a_sample_is_per_call_and_within_what_passed():
    x = torch.randn(256, 256)
    began = time.perf_counter()
    samples = time_operator("aten::mm", [x, x], CPU, samples=5, calls=4)
    passed = time.perf_counter() - began

    assert 0 < samples[0].sum().item() * 4 <= passed


def test_a_buffer_is_written_before_every_sample():
    """Cold: no untimed call, one call per sample."""
    counter, flush = torch.zeros(1), torch.zeros(64, dtype=torch.int64)
    time_operator("aten::add_.Tensor", [counter, torch.ones(1)], CPU, 5, 1, flush)

    assert counter.item() == 5
    assert (flush == 5).all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::conv2d", [torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)]),
        (
            "aten::conv2d",
            [torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 1],
        ),
        ("aten::cat", [[torch.ones(2), torch.ones(3)], 0]),
        ("aten::mul.Scalar", [torch.ones(2), 2.0]),
        ("narrowgauge::linear", [torch.ones(2, 3), torch.ones(4, 3)]),
    ],
    ids=["defaults", "lists", "tensors", "scalar", "ours"],
)
def test_operators_of_any_signature(name, arguments):
    assert time_operator(name, arguments, CPU, 2, 1).shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("aten::nonesuch", [], "aten::nonesuch"),
        ("aten::mm", [torch.ones(2, 2)], "missing value for argument 'mat2'"),
        ("aten::mm", [torch.ones(2, 2), 3], "Expected a value of type 'Tensor'"),
        ("aten::mm", [torch.ones(2, 2), torch.ones(3, 3)], "size|shape"),
    ],
)
def test_what_cannot_be_called_is_refused(name, arguments, said):
    with pytest.raises(RuntimeError, match=said):
        time_operator(name, arguments, CPU, 2, 1)


@pytest.mark.parametrize(("samples", "calls"), [(0, 1), (1, 0), (-1, 1)])
def test_nothing_to_do_is_refused(samples, calls):
    with pytest.raises(RuntimeError, match="must be positive"):
        time_operator("aten::relu", [torch.ones(1)], CPU, samples, calls)


def test_several_calls_cannot_all_find_a_cold_cache():
    flush = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="only the first would find it cold"):
        time_operator("aten::relu", [torch.ones(1)], CPU, 2, 2, flush)


class Captured:
    """A CUDAGraph of a torch that gives its graph out, made without keeping it."""

    def raw_cuda_graph(self):
        raise RuntimeError("instantiated graphs are not kept\nat CUDAGraph.cpp")


@pytest.mark.parametrize(
    ("captured", "said"), [(object(), "raw_cuda_graph"), (Captured(), "keep_graph=True")]
)
def test_a_graph_that_torch_keeps_to_itself_is_refused(captured, said):
    with pytest.raises(GraphRefusedError, match=said):
        harness._raw_graph(captured)


class Executables:
    """What the library answers, and which executables it was told to destroy."""

    def __init__(self):
        self.destroyed = []

    def harness_graph_instantiate(self, graph, device):
        return 17

    def harness_graph_destroy(self, executable, device):
        self.destroyed.append((executable, device))

    def harness_graph(self, executable, *_):
        return torch.ones(2, 1)


def test_a_graph_is_given_back_once(monkeypatch):
    """A handle that is destroyed twice may be somebody else's by then."""
    library = Executables()
    monkeypatch.setattr(torch.ops, "narrowgauge", library)
    monkeypatch.setattr(harness, "require", lambda _: None)
    monkeypatch.setattr(harness, "_raw_graph", lambda _: 5)
    with harness.Graph(object(), torch.device("cuda", 1)) as graph:
        assert graph.time(1, 1).shape == (2, 1)
        graph.close()
    graph.close()

    assert library.destroyed == [(17, 1)]
    with pytest.raises(GraphRefusedError, match="closed"):
        graph.time(1, 1)


#: A statement that is a call of the runtime or of a launcher, and nothing else.
UNCHECKED = re.compile(r"^\s*(?:cuda[A-Z]\w*|launch|prepare|calibration_bytes)\(", re.MULTILINE)


def test_no_answer_of_the_cuda_runtime_is_ignored():
    source = (CSRC / "harness" / "harness_cuda.cpp").read_text(encoding="utf-8")

    assert "check(cudaEventRecord(" in source
    assert UNCHECKED.findall(source) == []
    assert UNCHECKED.findall("  check(\n      cudaEventRecord(event, stream);"), "it can find one"


def test_cuda_work_needs_a_cuda_build(kernels):
    """Every entry says so, and with the command that builds."""
    if (kernels / "narrowgauge_cuda.so").exists():
        pytest.skip("the kernels here are built for CUDA")
    buffer, device = torch.zeros(8), torch.device("cuda", 0)
    for entry in (
        lambda: harness.launch("copy", buffer, 1),
        lambda: harness.time_kernel("copy", buffer, 1, 1, 1),
        lambda: harness.time_bare(device, 1, 1),
        lambda: harness.hold(0, 1.0),
        lambda: harness.Graph(object(), device),
        lambda: time_operator("aten::relu", [buffer], device, 1, 1),
    ):
        with pytest.raises(KernelsNotBuiltError, match="--cuda auto"):
            entry()
