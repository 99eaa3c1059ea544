"""Generated sparse convolutions on a GPU: float64's results, bits that repeat, graphs, the switch.

PYTHONPATH=src python3 -m pytest -m gpu tests/kernels/test_sparse_cuda.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sparse_cases import expected, operands, tolerance

from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_kernels.sparse.launching import Convolution
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import PUBLISHED, candidates, default_tile
from narrowgauge_kernels.sparse.tuning import best_tile, device_identity, stored_tile, tune

pytestmark = pytest.mark.gpu

EIGHT = [Shape(1, *key) for key in list(PUBLISHED)[:8]]
VARIANTS = {
    "deterministic": Variant(),
    "atomic": Variant(accumulation="atomic", bias=True, relu_output=True),
    "lists": Variant(path="lists", bias=True),
    "window": Variant(path="window", bias=True, relu_output=True),
    "dense": Variant(path="dense", layout="nhwc"),
    "window fp16": Variant("fp16", path="window"),
    "switched": Variant(path="switched"),
    "fp16": Variant("fp16", layout="nhwc", bias=True, relu_output=True),
    "fp16 cores": Variant("fp16", granularity="tensor-core", layout="nhwc", bias=True),
    "fp16 nchw cores": Variant("fp16", granularity="tensor-core", relu_output=True),
    "dense cores": Variant(
        "fp16", granularity="tensor-core", layout="nhwc", path="dense", relu_output=True
    ),
    "dense nchw cores": Variant("fp16", granularity="tensor-core", path="dense", bias=True),
    "tf32 cores": Variant("tf32", "atomic", granularity="tensor-core", relu_output=True),
}


@pytest.fixture(scope="module")
def arch():
    return device_identity()[1]


def on_gpu(variant, tensors):
    dtype = torch.float16 if variant.precision == "fp16" else torch.float32
    return [each.to("cuda", dtype) for each in tensors]


def given(shape, variant, zeros=0.65, seed=0):
    x, weight, bias = on_gpu(variant, operands(shape, zeros, seed))
    return (x, weight, bias) if variant.bias else (x, weight)


def is_close(y, shape, variant, tensors):
    wanted = expected(shape, variant, *[each.double() for each in tensors])
    # 4608 products of a sum: rounding errors grow with their root.
    return float((y.double() - wanted).abs().max()) <= 4 * tolerance(variant, wanted)


@pytest.fixture(autouse=True)
def _needs_cores(request, arch):
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    if "cores" in name and float(arch) < 8:
        pytest.skip(f"compute capability {arch} lacks the tensor-core products used")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", EIGHT, ids=Shape.text)
def test_the_eight_shapes(shape, name, arch):
    variant = VARIANTS[name]
    tensors = given(shape, variant)
    y = Convolution(shape, default_tile(shape, variant, arch), variant)(*tensors)
    assert is_close(y, shape, variant, tensors)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(3, 70, 13, 11, 40, 1, 1, 0),
        Shape(2, 33, 15, 17, 24, 1, 2, 0),
        Shape(2, 33, 15, 17, 24, 3, 2, 1),
        Shape(2, 20, 9, 12, 65, 5, 1, 2),
        Shape(9, 20, 12, 9, 16, 5, 2, 0),
    ],
    ids=Shape.text,
)
def test_other_kernels_strides_and_batches(shape, name, arch):
    variant = VARIANTS[name]
    tensors = given(shape, variant)
    y = Convolution(shape, default_tile(shape, variant, arch), variant)(*tensors)
    assert is_close(y, shape, variant, tensors)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "atomic" not in name])
def test_deterministic_repeats_to_the_bit(name, arch):
    variant = dataclasses.replace(VARIANTS[name], accumulation="deterministic")
    shape = Shape(4, 256, 14, 14, 64)
    tensors = given(shape, variant)
    convolution = Convolution(shape, default_tile(shape, variant, arch), variant)
    first = convolution(*tensors)
    assert all(torch.equal(convolution(*tensors), first) for _ in range(20))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_graph_replays_it_with_other_maps(name, arch):
    """More and fewer zeros than when it was captured; the switch decides in the replay."""
    variant, shape = VARIANTS[name], Shape(1, 128, 28, 28, 32)
    tensors = given(shape, variant)
    tile = default_tile(shape, variant, arch)
    convolution = Convolution(shape, tile, variant, 0.5 if variant.path == "switched" else 0.0)
    convolution(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = convolution(*tensors)
    for zeros in (0.0, 0.3, 0.65, 1.0):
        tensors[0].copy_(given(shape, variant, zeros, seed=9)[0])
        graph.replay()
        assert is_close(y, shape, variant, tensors)


@pytest.mark.parametrize("name", ["deterministic", "window", "lists", "fp16 cores", "dense cores"])
@pytest.mark.parametrize("shape", [*EIGHT[1:8:2], Shape(3, 70, 13, 11, 40)], ids=Shape.text)
def test_a_cluster_adds_what_a_launch_adds_to_the_bit(shape, name, arch):
    """Both in the order of the channels; and in graphs, again and again."""
    if float(arch) < 9:
        pytest.skip(f"compute capability {arch} has no clusters")
    variant = VARIANTS[name]
    tensors = given(shape, variant)
    every = candidates(shape, variant, arch, most=1 << 16)
    clusters = [tile for tile in every if tile.finish == "cluster"][:3]
    for tile in clusters:
        clustered = Convolution(shape, tile, variant)
        y = clustered(*tensors)
        assert is_close(y, shape, variant, tensors)
        launched = Convolution(shape, dataclasses.replace(tile, finish="launch"), variant)
        assert torch.equal(y, launched(*tensors))
        assert all(torch.equal(clustered(*tensors), y) for _ in range(10))
    assert clusters


@pytest.mark.parametrize("name", ["deterministic", "window", "dense", "window fp16"])
@pytest.mark.parametrize("shape", [*EIGHT[4:], Shape(3, 70, 13, 11, 130)], ids=Shape.text)
def test_several_filters_of_a_thread(shape, name, arch):
    variant = VARIANTS[name]
    tensors = given(shape, variant)
    wide = [tile for tile in candidates(shape, variant, arch, 1 << 16) if tile.wide > 1]
    assert wide
    for tile in wide[:4]:
        assert is_close(Convolution(shape, tile, variant)(*tensors), shape, variant, tensors)


@pytest.mark.parametrize("name", ["fp16 cores", "fp16 nchw cores", "dense cores"])
@pytest.mark.parametrize(
    "shape", [Shape(8, 64, 56, 56, 64), Shape(8, 256, 14, 14, 256), Shape(3, 70, 29, 31, 40)],
    ids=Shape.text,
)  # fmt: skip
def test_large_tiles_of_several_images(shape, name, arch):
    variant = VARIANTS[name]
    tensors = given(shape, variant)
    tall = [tile for tile in candidates(shape, variant, arch, 1 << 16) if tile.rows > 8]
    assert tall
    for tile in tall[:4]:
        assert is_close(Convolution(shape, tile, variant)(*tensors), shape, variant, tensors)


def test_every_published_tile_and_the_first_candidates(arch):
    for shape in EIGHT[3:8:2]:
        tensors = given(shape, Variant())
        tiles = [Tile(*each) for each in PUBLISHED[dataclasses.astuple(shape)[1:5]]]
        for tile in [*tiles, *candidates(shape, Variant(), arch, 6)]:
            assert is_close(
                Convolution(shape, tile, Variant())(*tensors), shape, Variant(), tensors
            )


def test_nan_reaches_what_it_reaches_in_torch(arch):
    shape = Shape(2, 64, 14, 14, 48)
    for variant in VARIANTS.values():
        if variant.granularity == "tensor-core" and float(arch) < 8:
            continue
        tensors = given(shape, variant)
        tensors[0][1, 3, 4, 5] = float("nan")
        y = Convolution(shape, default_tile(shape, variant, arch), variant)(*tensors)
        wanted = expected(shape, variant, *[each.double() for each in tensors])
        assert torch.equal(torch.isnan(y), torch.isnan(wanted))


def test_calls_go_to_the_current_stream(arch):
    shape, variant = Shape(1, 64, 28, 28, 32), Variant()
    convolution = Convolution(shape, default_tile(shape, variant, arch), variant)
    tensors = given(shape, variant)
    convolution(*tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = convolution(*tensors)
    stream.synchronize()
    assert is_close(y, shape, variant, tensors)


def test_a_kernel_that_the_device_cannot_hold_is_refused_with_its_name(tmp_path, arch):
    """The driver's own words, for machine code that is none."""
    from narrowgauge_kernels.sparse.driver import CudaDriver

    torch.zeros(1, device="cuda")
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"no machine code" * 8)
    with pytest.raises(DeviceError, match="cuModuleLoadData failed"):
        CudaDriver().function(broken, "sparse_convolve", 0, 0)


def test_tuning_stores_a_tile_that_is_right(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    shape, variant = Shape(1, 128, 14, 14, 32), Variant()
    found = tune(shape, variant, seconds=20.0, most=8, env=env)
    assert 0.5 < found.trials[0].microseconds < 1000
    assert stored_tile(shape, variant, device_identity(), env) == found.trials[0].tile
    tile = best_tile(shape, variant, env=env)
    tensors = given(shape, variant)
    assert is_close(Convolution(shape, tile, variant)(*tensors), shape, variant, tensors)


@pytest.mark.parametrize(
    ("path", "text", "tile"),
    [
        ("fused", "8,64,56,56,64", "16x16x32/f64/cluster"),
        ("fused", "8,512,7,7,512", "8x8x64/f64/cluster"),
        ("fused", "8,512,7,7,512", "8x8x128/f128/g2/cluster"),
        ("dense", "8,64,56,56,64", "16x16x32/f64/cluster"),
        ("dense", "8,512,7,7,512", "8x8x64/f64/g2/cluster"),
    ],
)
def test_no_block_ends_while_another_reads_its_sums(path, text, tile, arch):
    """Whole warps past the edge had loads under way from blocks that had ended. It takes clusters
    that wait for room on the device, and launches without a pause."""
    if float(arch) < 9:
        pytest.skip(f"compute capability {arch} has no clusters")
    variant = Variant("fp16", granularity="tensor-core", layout="nhwc", path=path)
    shape = Shape.parse(text)
    tensors = given(shape, variant)
    convolution = Convolution(shape, Tile.parse(tile), variant)
    convolution(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            y = convolution(*tensors)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert is_close(y, shape, variant, tensors)
