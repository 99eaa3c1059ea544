"""Generated sparse convolutions against float64, on emulated threads: every path."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sparse_cases import Emulated, expected, operands, run, tolerance

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.launching import Convolution
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Emulated(tmp_path_factory.mktemp("sparse"))


FULL = Variant(bias=True, relu_output=True)
#: Tails of tiles, channels and filters; each kernel, stride and path.
CASES = {
    "3x3, groups": (Shape(2, 5, 7, 6, 20), Tile(3, 4, 3, groups=2), FULL),
    "3x3, launch": (
        Shape(1, 9, 7, 7, 40), Tile(2, 7, 2, 32, 1, "launch"), Variant(layout="nhwc"),
    ),
    "3x3, atomic": (
        Shape(2, 6, 5, 6, 33), Tile(4, 4, 2, 32), dataclasses.replace(FULL, accumulation="atomic"),
    ),
    "3x3 strided, lists": (
        Shape(1, 4, 9, 8, 8, 3, 2, 1), Tile(2, 3, 2), dataclasses.replace(FULL, path="lists"),
    ),
    "1x1 strided": (Shape(1, 7, 7, 9, 33, 1, 2, 0), Tile(2, 3, 7, 32, 2), FULL),
    "5x5, fp16": (
        Shape(1, 3, 8, 9, 16, 5, 1, 2), Tile(4, 3, 2), Variant("fp16", layout="nhwc"),
    ),
    "5x5 strided, no padding": (
        Shape(1, 3, 9, 11, 8, 5, 2, 0), Tile(2, 2, 3), Variant(path="lists"),
    ),
    "wide padding": (Shape(1, 2, 3, 4, 8, 3, 1, 4), Tile(4, 4, 2), FULL),
    "1x1, no ReLU": (
        Shape(1, 4, 5, 5, 8, 1, 1, 0), Tile(3, 3, 4), Variant(relu_input=False),
    ),
    "fp16 on tensor cores": (
        Shape(2, 40, 5, 6, 20), Tile(4, 4, 64, 32),
        Variant("fp16", granularity="tensor-core", bias=True, layout="nhwc"),
    ),
    # Weights come by eight, but where filters are no eights; values where channels are, in NHWC.
    "fp16 on tensor cores, by eight": (
        Shape(2, 70, 5, 6, 24), Tile(4, 4, 64, 32), Variant("fp16", granularity="tensor-core"),
    ),
    "fp16 on tensor cores, blocks by eight": (
        Shape(1, 33, 9, 10, 40, 5, 2, 0), Tile(2, 4, 32, 16, 1, "launch"),
        dataclasses.replace(FULL, precision="fp16", granularity="tensor-core", layout="nhwc"),
    ),
    "fp16 on tensor cores, cluster by eight": (
        Shape(1, 72, 6, 5, 8, 1, 1, 0), Tile(4, 8, 32, 16, 2, "cluster"),
        Variant("fp16", granularity="tensor-core", relu_output=True, layout="nhwc"),
    ),
    "fp16 on tensor cores, many rows": (
        Shape(2, 40, 13, 14, 16), Tile(16, 16, 32, 16, 2, "cluster"),
        Variant("fp16", granularity="tensor-core", layout="nhwc", bias=True),
    ),
    "dense on tensor cores, many rows": (
        Shape(2, 24, 15, 14, 16), Tile(14, 14, 16, 16, 2),
        Variant("fp16", granularity="tensor-core", layout="nhwc", path="dense"),
    ),
    "fp16 on tensor cores, odd": (
        Shape(1, 37, 5, 5, 21), Tile(4, 4, 32, 16, 2),
        Variant("fp16", granularity="tensor-core", layout="nhwc", bias=True),
    ),
    "tf32 on tensor cores": (
        Shape(1, 66, 9, 5, 16, 3, 2, 1), Tile(2, 8, 32, 16, 2),
        Variant("tf32", "atomic", granularity="tensor-core", relu_output=True),
    ),
    "window": (
        Shape(2, 5, 7, 6, 20), Tile(3, 4, 3, groups=2), dataclasses.replace(FULL, path="window"),
    ),
    "window, 5x5 strided": (
        Shape(1, 3, 9, 11, 8, 5, 2, 0), Tile(2, 2, 3, 32, 1, "launch"),
        Variant("fp16", layout="nhwc", path="window"),
    ),
    "window, 1x1 strided": (
        Shape(1, 7, 7, 9, 33, 1, 2, 0), Tile(2, 3, 2, 32, 2), Variant(path="window"),
    ),
    "dense": (
        Shape(1, 9, 7, 7, 40), Tile(2, 7, 2, 32, 1), Variant(layout="nhwc", path="dense"),
    ),
    "dense, 1x1": (
        Shape(1, 4, 5, 5, 8, 1, 1, 0), Tile(1, 1, 4), Variant("fp16", path="dense", bias=True),
    ),
    "dense on tensor cores": (
        Shape(2, 40, 5, 6, 20), Tile(4, 4, 32, 32, 2),
        Variant("fp16", granularity="tensor-core", bias=True, layout="nhwc", path="dense"),
    ),
    "dense on tensor cores, cluster": (
        Shape(1, 70, 9, 7, 24, 3, 2, 1), Tile(3, 5, 16, 16, 4, "cluster"),
        Variant("fp16", granularity="tensor-core", relu_output=True, path="dense"),
    ),
    "dense on tensor cores, 5x5": (
        Shape(1, 20, 8, 9, 16, 5, 1, 2), Tile(7, 7, 32, 16, 8, "launch"),
        Variant("fp16", granularity="tensor-core", layout="nhwc", path="dense"),
    ),
    "dense on tensor cores, 1x1": (
        Shape(1, 48, 9, 7, 40, 1, 1, 0), Tile(1, 14, 16, 64, 1, "cluster"),
        Variant("fp16", "deterministic", True, False, granularity="tensor-core", layout="nhwc",
                path="dense"),
    ),
    "cluster, groups": (
        Shape(1, 9, 7, 7, 40), Tile(2, 7, 2, 32, 2, "cluster"), Variant(path="window"),
    ),
    "cluster, lists": (Shape(2, 5, 7, 6, 20), Tile(3, 4, 3, 32, 1, "cluster"), FULL),
    "cluster, tensor cores": (
        Shape(1, 70, 9, 5, 20), Tile(2, 8, 32, 16, 1, "cluster"),
        Variant("tf32", granularity="tensor-core", layout="nhwc"),
    ),
    "two filters a thread": (
        Shape(1, 6, 7, 6, 66), Tile(2, 3, 3, 64, 2, wide=2),
        dataclasses.replace(FULL, path="window"),
    ),
    "two filters a thread, odd": (
        Shape(1, 5, 5, 6, 67), Tile(2, 3, 5, 64, 1, wide=2), Variant("fp16", path="dense"),
    ),
    "four filters a thread, lists": (
        Shape(1, 5, 5, 6, 132, 3, 2, 1), Tile(2, 2, 2, 128, 2, "cluster", 4),
        Variant("fp16", layout="nhwc"),
    ),
    "four filters a thread": (
        Shape(2, 4, 5, 5, 100, 5, 1, 2), Tile(1, 4, 4, 128, 1, wide=4), Variant(path="switched"),
    ),
    "switched, 1x1": (
        Shape(1, 4, 5, 5, 8, 1, 1, 0), Tile(1, 1, 4), Variant(path="switched"),
    ),
    "switched": (Shape(1, 4, 6, 6, 8), Tile(3, 4, 2), Variant("fp16", path="switched", bias=True)),
}  # fmt: skip


def dtype_of(variant):
    return torch.float16 if variant.precision == "fp16" else torch.float32


@pytest.mark.parametrize("name", CASES)
def test_a_generated_convolution_gives_the_reference(machine, name):
    shape, tile, variant = CASES[name]
    x, weight, bias = operands(shape, dtype=dtype_of(variant))
    bias = bias if variant.bias else None
    y = run(machine, shape, tile, variant, x, weight, bias)
    wanted = expected(shape, variant, x, weight, bias)
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)


def some(name, **changes):
    """A case, its operands, and the bias that its variant takes."""
    shape, tile, variant = CASES[name]
    x, weight, bias = operands(shape, dtype=dtype_of(variant), **changes)
    return shape, tile, variant, x, weight, bias if variant.bias else None


@pytest.mark.parametrize(
    "name", ["3x3, groups", "3x3, launch", "fp16 on tensor cores", "dense", "cluster, groups",
             "fp16 on tensor cores, by eight", "dense on tensor cores",
             "four filters a thread, lists"],
)  # fmt: skip
def test_deterministic_sums_do_not_depend_on_the_order_of_blocks(machine, name):
    """To the bit: the block that comes last adds in the order of the channels, as a launch does."""
    shape, tile, variant, x, weight, bias = some(name)
    first = run(machine, shape, tile, variant, x, weight, bias)
    machine.backwards = True
    second = run(machine, shape, tile, variant, x, weight, bias)
    machine.backwards = False
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "name",
    [
        "3x3, groups",
        "3x3, atomic",
        "tf32 on tensor cores",
        "switched",
        "window",
        "fp16 on tensor cores, by eight",
        "dense on tensor cores, cluster",
    ],
)
def test_a_second_call_finds_its_buffers_as_the_first(machine, name):
    """Partial sums, tickets and counts are left as they were found: nothing is cleared between."""
    shape, tile, variant, x, weight, bias = some(name)
    convolution = Convolution(shape, tile, variant, machine=machine)
    convolution(x, weight, bias)
    other, _, _ = operands(shape, seed=5, dtype=x.dtype)
    y = convolution(other, weight, bias)
    wanted = expected(shape, variant, other, weight, bias)
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)


@pytest.mark.parametrize("zeros", [0.0, 1.0])
@pytest.mark.parametrize(
    "name", ["3x3, groups", "switched", "fp16 on tensor cores", "window", "dense",
             "dense on tensor cores", "cluster, lists"],
)  # fmt: skip
def test_all_zeros_and_no_zeros(machine, name, zeros):
    shape, tile, variant, x, weight, bias = some(name, zeros=zeros)
    y = run(machine, shape, tile, variant, x, weight, bias)
    wanted = expected(shape, variant, x, weight, bias)
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)


@pytest.mark.parametrize(
    "name", ["3x3, groups", "3x3 strided, lists", "1x1, no ReLU", "switched", "window", "dense",
             "fp16 on tensor cores", "fp16 on tensor cores, by eight", "tf32 on tensor cores",
             "dense on tensor cores", "dense on tensor cores, cluster", "two filters a thread"],
)  # fmt: skip
def test_nan_is_no_zero_and_reaches_what_it_reaches_in_torch(machine, name):
    """Through the ReLU in front, and the one behind; infinities too."""
    shape, tile, variant, x, weight, bias = some(name)
    x[0, 1, 2, 3] = float("nan")
    x[0, 2, 0, 0] = float("inf")
    y = run(machine, shape, tile, variant, x, weight, bias)
    wanted = expected(shape, variant, x, weight, bias)
    assert torch.isnan(wanted).any()
    assert torch.equal(torch.isnan(y), torch.isnan(wanted))
    assert torch.equal(torch.isinf(y), torch.isinf(wanted))
    finite = torch.isfinite(wanted)
    apart = (y.double() - wanted)[finite].abs().max()
    assert float(apart) <= tolerance(variant, wanted[finite])


@pytest.mark.parametrize(
    "name", ["fp16 on tensor cores", "fp16 on tensor cores, by eight", "tf32 on tensor cores"]
)
def test_zero_channels_cost_no_product_on_tensor_cores(machine, name):
    """The depth is compacted over taps and channels before it is filled up to whole steps."""
    shape, tile, variant, x, weight, bias = some(name, zeros=0.0)
    counted = []
    # The first count has those of other tests in it.
    for kept in (shape.channels, shape.channels, shape.channels // 4, 0):
        x[:, kept:] = 0.0
        y = run(machine, shape, tile, variant, x, weight, bias)
        counted.append(machine.products())
        wanted = expected(shape, variant, x, weight, bias)
        assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)
    _, everything, quarter, nothing = counted
    assert nothing == 0
    # One step of each warp's groups and chunks may be half empty.
    assert everything / 5 < quarter <= everything / 3


@pytest.mark.parametrize(("path", "skipped"), [("window", True), ("dense", False)])
def test_only_a_window_that_jumps_does_not_multiply_zeros(machine, path, skipped):
    """Seen by an infinite weight: zero times it is NaN."""
    shape, tile, _ = CASES["window"]
    variant = Variant(path=path)
    x, weight, _ = operands(shape, zeros=1.0)
    weight[:, 1] = float("inf")
    y = run(machine, shape, tile, variant, x, weight)
    assert bool((y == 0).all()) is skipped
    assert bool(torch.isnan(y).any()) is not skipped


def test_a_map_that_begins_in_between_is_copied(machine):
    """As a view of a larger tensor can: eight channels are loaded at once."""
    shape, tile, variant, x, weight, bias = some("dense on tensor cores")
    x = x.contiguous(memory_format=torch.channels_last)
    room = torch.zeros(x.numel() + 1, dtype=x.dtype)
    shifted = room[1:].as_strided(x.shape, x.stride())
    shifted.copy_(x)
    assert shifted.data_ptr() % 16 != 0
    y = run(machine, shape, tile, variant, shifted, weight, bias)
    assert torch.equal(y, run(machine, shape, tile, variant, x, weight, bias))


def test_a_cluster_needs_no_memory_for_partial_sums(machine):
    shape, tile, variant, *_ = some("cluster, groups")
    ready = Convolution(shape, tile, variant, machine=machine).prepare(torch.device("cpu"))
    assert ready.buffers == {}
    tail = dataclasses.replace(tile, finish="tail")
    kept = Convolution(shape, tail, variant, machine=machine).prepare(torch.device("cpu"))
    assert set(kept.buffers) == {"partial", "tickets"}


@pytest.mark.parametrize("path", ["fused", "window", "dense"])
def test_a_path_of_one_launch_counts_no_zeros(machine, path):
    shape, tile, _ = CASES["window"]
    with pytest.raises(SparseArgumentError, match=f"the path {path} counts no zeros"):
        Convolution(shape, tile, Variant(path=path), machine=machine).zeros(torch.device("cpu"))


def test_zero_channels_are_skipped_by_element(machine):
    """Lists of no entries among others."""
    shape, tile, variant, x, weight, bias = some("3x3, groups", blocky=True)
    assert 0 < int((x > 0).flatten(2).any(2).sum()) < x.shape[0] * x.shape[1]
    y = run(machine, shape, tile, variant, x, weight, bias)
    wanted = expected(shape, variant, x, weight, bias)
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)


@pytest.mark.parametrize("name", ["3x3 strided, lists", "5x5 strided, no padding"])
def test_the_producer_counts_each_zero_once(machine, name):
    """Whatever the tiles share, and whatever no window sees, as the border behind the last."""
    shape, tile, variant, x, weight, bias = some(name)
    convolution = Convolution(shape, tile, variant, machine=machine)
    for factor in (1, -1):
        convolution(x * factor, weight, bias)
        assert int(convolution.zeros(x.device)) == int((x * factor <= 0).sum())


def test_lists_are_ordered_and_hold_no_zero(machine):
    """What the producer leaves for the convolution."""
    shape, tile, variant, x, weight, bias = some("3x3 strided, lists")
    convolution = Convolution(shape, tile, variant, machine=machine)
    convolution(x, weight, bias)
    buffers = convolution.prepare(x.device).buffers
    lengths = buffers["lengths"]
    window = buffers["entries"].numel() // 2 // lengths.numel()
    entries = buffers["entries"].reshape(lengths.numel(), window, 2)
    assert int(lengths.max()) > 1
    for entry, length in zip(entries, lengths.tolist()):
        places = entry[:length, 1].tolist()
        assert places == sorted(set(places))
        assert all(0 <= place < window for place in places)
        assert (entry[:length, 0].contiguous().view(torch.float32) > 0).all()


@pytest.mark.parametrize("crossover", [0.0, 0.5, 0.7, 1.0])
def test_the_device_lets_one_kernel_run(machine, crossover):
    """Both are launched; the other writes nothing: seen by how long its blocks are."""
    shape, tile, variant, x, weight, bias = some("switched", zeros=0.6)
    dense = float((x <= 0).sum()) < crossover * x.numel()
    poisoned = Convolution(shape, tile, variant, crossover, machine)
    ready = poisoned.prepare(x.device)
    names = [each.kernel for each, _ in ready.functions]
    assert names == ["sparse_produce", "sparse_convolve", "dense_convolve"]
    off = "sparse_convolve" if dense else "dense_convolve"
    one = tuple(pair for pair in ready.functions if pair[0].kernel != off)
    poisoned._ready[x.device] = dataclasses.replace(ready, functions=one)
    wanted = expected(shape, variant, x, weight, bias)
    y = poisoned(x, weight, bias)
    # Without the kernel that is to end at once, the result is the same.
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)
    y = run(machine, shape, tile, variant, x, weight, bias, crossover)
    assert float((y.double() - wanted).abs().max()) <= tolerance(variant, wanted)
