"""The experiment `sparse-layers`: its rows on a CPU, its maps, its peers and its tables."""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import json
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, Dict, List, Tuple, Type

import pytest
import torch
import torch.nn.functional as F
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    SkippedError,
    UsageError,
)
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.summary import summary_lines
from narrowgauge_kernels.errors import KernelsError, ToolchainMissingError
from narrowgauge_kernels.library import has_kernels
from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_lab.measure import Comparison, Samples
from narrowgauge_lab.networks.layer_shapes import LayerShape, shapes_named

LAYER = "128-32-3x3s1-7"
SHAPE = shapes_named(LAYER)[0]
ROWS = Rows(
    "sparse-layers",
    (f"shapes={LAYER}", "maps=matched", "peers=dense", "pairs=2", "limit_s=0.01", "threads=1"),
)
module = ROWS.module
needs_kernels = pytest.mark.skipif(not has_kernels("cpu"), reason="the kernels are not built")


def _values(row: Row, name: str) -> Tuple[float, ...]:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values


def _no_files(name: str) -> Any:
    raise AssertionError(f"{name} was read")


def _layer(maps: str = "matched", batch: int = 1, **changed: Any) -> Any:
    library = changed.pop("library", None) or module("maps").Library(_no_files, 0)
    shape = changed.pop("shape", SHAPE)
    return module("maps").layer_of(shape, batch, maps, library=library, seed=0, **changed)


# Rows from end to end.


@needs_kernels
def test_a_layer_beside_dense_and_its_tables(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "batch=2", "peers=all")

    assert row.validity.valid
    (layer,) = row.facts["layers"]
    assert (layer["name"], layer["source"]) == (LAYER, "synthetic-matched")
    assert 0 < layer["error"] < 1e-5
    assert layer["macs"] == 2 * 49 * 128 * 32 * 9
    assert layer["nonzeros"] == round((1 - layer["zeros"]) * 2 * 128 * 49)
    assert layer["zeros"] == pytest.approx(0.87, abs=0.02)
    assert set(layer["peers"]) == {
        "torch", "torch_last", "torch_packed", "torch_sparse", "selected", "selected_sparse",
        "selected_dense",
    }  # fmt: skip
    assert set(layer["peers_missing"]) == {"t1", "t2", "t3", "cudnn", "own_dense", "spconv"}
    assert layer["peers"]["selected"]["chosen"] in ("sparse", "dense")
    for name in (
        "times_torch", "times_torch_packed", "times_torch_last", "times_dense", "times_dense_cpu",
        "times_torch_sparse", "selector_over_best", "selector_over_best_cpu", "selector_over_all",
    ):  # fmt: skip
        assert all(value > 0 for value in _values(row, name))
        assert _values(row, name) == pytest.approx(_values(row, f"{name}.{LAYER}"))
        assert _values(row, f"{name}_mean") == pytest.approx(_values(row, name))
        assert row.metric(f"{name}_real") is None, "no map of these is real"
    assert row.metric("times_gemm") is None
    folder = tmp_path / "row-0"
    (line,) = csv.DictReader((folder / "layers.csv").read_text().splitlines())
    assert list(line) == ["B", "C", "H", "W", "N", "t1", "t2", "t3", "t4"]
    assert [line[name] for name in "BCHWN"] == ["2", "128", "7", "7", "32"]
    assert (line["t1"], line["t2"], line["t3"]) == ("", "", "")
    assert float(line["t4"]) > 0
    (longer,) = json.loads((folder / "layers.json").read_text())
    assert longer["t1"] is None
    assert longer["gflop_per_second"] == pytest.approx(
        2e-6 * layer["macs"] / float(line["t4"]), rel=1e-3
    )


@needs_kernels
def test_layers_of_a_network_count_as_often_as_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = LayerShape(8, 8, kernel=3, stride=1, size=6, padding=1)
    monkeypatch.setitem(module("maps").MATCHED, small.name, (0.6, 0.2))
    monkeypatch.setattr(module("run"), "layers_named", lambda _name: [SHAPE, SHAPE, small])

    row = ROWS.run(tmp_path)

    assert [each["name"] for each in row.facts["layers"]] == [LAYER, small.name]
    one, other = (_values(row, f"times_torch.{each.name}") for each in (SHAPE, small))
    together = [(a * a * b) ** (1 / 3) for a, b in zip(one, other)]
    assert _values(row, "times_torch") == pytest.approx(together)
    assert _values(row, "times_torch_mean") == pytest.approx(
        [(2 * a + b) / 3 for a, b in zip(one, other)]
    )
    assert row.facts["layers_beside"]["times_torch"] == 3


@needs_kernels
def test_a_sweep_finds_where_skipping_pays_and_draws_it(tmp_path: Path) -> None:
    row = ROWS.run(
        tmp_path, "measure=crossover", "maps=random", "sweep_zeros=0 50 100", "sweep_batches=2 1"
    )

    assert row.validity.valid
    assert row.facts["crossover_batches"] == [1, 2]
    found = _values(row, "crossover_zeros")
    assert len(found) == 2
    assert all(0 <= share <= 1 for share in found)
    picture = json.loads((tmp_path / "row-0" / "crossover.json").read_text())
    assert picture["rows"] == ["batch 1", "batch 2"]
    assert picture["columns"] == ["0%", "50%", "100%"]
    points = {(p["batch"], p["zeros"]): p["gain"] for p in row.facts["points"]}
    assert 2 ** picture["values"][0][2] == pytest.approx(points[1, 1.0])
    assert all(each["sparse_s"] > 0 and each["dense_s"] > 0 for each in row.facts["points"])


def test_a_sweep_of_what_is_no_grid() -> None:
    numbers_in = module("crossover").numbers_in
    assert numbers_in("50 0 50", 0, 100) == [0, 50]
    assert numbers_in("1.5 2", 0, 100) == [1.5, 2]
    assert numbers_in("2 1", 1, 100, whole=True) == [1, 2]
    for text, whole in (
        ("", False), ("a", False), ("5 101", False), ("-1", False), ("nan", False), ("1.5", True),
    ):  # fmt: skip
        with pytest.raises(BadValueError, match="no list of numbers"):
            numbers_in(text, 0, 100, whole=whole)


def test_real_maps_cannot_be_swept(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="cannot be over maps=matched"):
        ROWS.run(tmp_path, "measure=crossover", "maps=matched")


@pytest.mark.parametrize("words", [("precision=fp16",), ("precision=tf32", "granularity=auto")])
def test_what_a_cpu_has_not_is_skipped(tmp_path: Path, words: Tuple[str, ...]) -> None:
    with pytest.raises(SkippedError, match="on a CPU"):
        ROWS.run(tmp_path, *words)
    with pytest.raises(SkippedError, match="by tensor-core"):
        ROWS.run(tmp_path / "other", "granularity=tensor-core")


@needs_kernels
def test_a_wrong_result_makes_the_row_invalid_and_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, right = module("run"), module("run").ours_of

    def wrong(*arguments: Any) -> Any:
        made = right(*arguments)
        return module("ours").Ours(lambda: made.call() * (1 + 1e-4), made.about)

    monkeypatch.setattr(run, "ours_of", wrong)
    row = ROWS.run(tmp_path)

    assert not row.validity.valid
    assert row.validity.reasons[0].startswith(f"{LAYER}: ours is off by")
    assert row.metric("macs_per_second") is None


def _checked(tmp_path: Path, ours: Any, peers: Any, batch: int = 1) -> Tuple[Any, Row]:
    """What `check` says of a layer, and the row that it was said of."""
    found: List[Any] = []

    def run(ctx: Any, _shapes: Any, _library: Any) -> None:
        layer = _layer(batch=batch)
        found.append(module("correctness").check(ctx, layer, "fp32", ours(layer), peers(layer)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module("run"), "_layers", run)
        row = ROWS.run(tmp_path)
    return found[0], row


def _right(layer: Any) -> Any:
    wanted = F.conv2d(torch.relu(layer.x), layer.weight, padding=1)
    return module("ours").Ours(lambda: wanted, {})


def test_another_peer_that_is_wrong_is_left_out_and_ours_is_timed(tmp_path: Path) -> None:
    peer = module("problem").Peer

    def peers(layer: Any) -> Any:
        right = _right(layer).call
        return [peer("torch", right), peer("torch_sparse", lambda: 1.01 * right())]

    checked, row = _checked(tmp_path, _right, peers)

    assert checked.right
    assert row.validity.valid
    assert [each.name for each in checked.peers] == ["torch"]
    assert checked.dropped["torch_sparse"].startswith("torch_sparse is off by 0.01")
    assert checked.errors["torch_sparse"] > 1e-3


@pytest.mark.parametrize("name", ["torch", "selected", "selected_dense"])
def test_torch_and_the_layer_that_chooses_have_to_be_right(tmp_path: Path, name: str) -> None:
    checked, row = _checked(
        tmp_path,
        _right,
        lambda layer: [module("problem").Peer(name, lambda: 1.01 * _right(layer).call())],
    )

    assert not checked.right
    assert not row.validity.valid
    assert row.validity.reasons[0].startswith(f"{LAYER}: {name} is off by")


@pytest.mark.parametrize("image", [0, 2, 4])
def test_first_middle_and_last_image_are_checked(tmp_path: Path, image: int) -> None:
    def ours(layer: Any) -> Any:
        wrong = _right(layer).call().clone()
        wrong[image] *= 1.01
        return module("ours").Ours(lambda: wrong, {})

    checked, row = _checked(tmp_path, ours, lambda _layer: [], batch=5)

    assert not checked.right
    assert not row.validity.valid


def test_which_images_are_checked() -> None:
    images = module("correctness").checked_images
    assert [images(batch) for batch in (1, 2, 3, 8)] == [[0], [0, 1], [0, 1, 2], [0, 4, 7]]


def test_halved_weights_are_skipped_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="measured in float16"):
        ROWS.run(tmp_path, "measure=weights")
    with pytest.raises(SkippedError, match="2:4 weight sparsity cannot run") as caught:
        ROWS.run(tmp_path / "half", "measure=weights", "precision=fp16")
    assert "CUDA" in caught.value.why or "semi-structured" in caught.value.why


def test_halved_weights_are_held_against_the_faster_dense_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, with a dense layer in the place of the 2:4 one."""
    halves = module("two_to_four")
    monkeypatch.setattr(halves, "SIZES", ((64, 32, 64), (32, 64, 64)))
    monkeypatch.setattr(halves.weights, "require", lambda *_: None)
    monkeypatch.setattr(halves.torch, "float16", torch.float32)
    wrong = 1.0

    class Stub(torch.nn.Module):
        def __init__(self, layer: torch.nn.Conv2d) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float((self.layer.weight == 0).float().mean()) == 0.5
            return wrong * self.layer(x)

    monkeypatch.setattr(halves.weights, "SemiStructuredConv2d", Stub)
    row = ROWS.run(tmp_path, "measure=weights", "precision=fp16")

    assert row.validity.valid
    medians = _values(row, "times_2to4")
    assert len(medians) == 2
    assert all(value > 0 for value in (*medians, *_values(row, "times_2to4.64x32x64")))
    assert [each["dense"] in ("convolution", "product") for each in row.facts["products"]] == [
        True, True,
    ]  # fmt: skip
    wrong = 1.01
    row = ROWS.run(tmp_path / "wrong", "measure=weights", "precision=fp16")
    assert "2:4 product 64x32x64 is off by 0.01" in row.validity.reasons[0]
    assert row.metric("times_2to4") is None


# Maps.


class _Network:
    """Stands in for `pictured`: one convolution of SHAPE behind a ReLU, and one that is not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        first = torch.nn.Conv2d(3, 128, 1)
        layers = [torch.nn.Conv2d(128, 32, 3, padding=1, bias=False) for _ in range(2)]
        self.model = torch.nn.Sequential(first, torch.nn.ReLU(), layers[0]).eval()
        self.images = torch.randn(5, 3, 7, 7)


def test_real_maps_are_the_networks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    network = _Network()
    monkeypatch.setattr(module("maps"), "pictured", lambda *_: network)
    library = module("maps").Library(_no_files, 0)

    layer = _layer("auto", batch=3, library=library, first=3)

    assert layer.source == "real"
    assert layer.where == "resnet50-v1 2, images 3 4 0"
    with torch.no_grad():
        before = network.model[0](network.images)
    assert torch.equal(layer.x, before[[3, 4, 0]]), "over and over"
    assert torch.equal(layer.weight, network.model[2].weight.detach())
    other = _layer("auto", library=library, shape=shapes_named("128-32-3x3s1-14")[0])
    assert other.source == "synthetic-matched"
    with pytest.raises(UsageError, match="no real map for 128-32-3x3s1-14"):
        _layer("real", library=library, shape=shapes_named("128-32-3x3s1-14")[0])


def test_a_network_that_failed_half_way_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network, maps = _Network(), module("maps")
    monkeypatch.setattr(maps, "pictured", lambda *_: network)
    right = maps.capture

    def fails(*arguments: Any) -> Any:
        right(*arguments)
        raise RuntimeError("no memory")

    monkeypatch.setattr(maps, "capture", fails)
    library = maps.Library(_no_files, 0)
    with pytest.raises(RuntimeError, match="no memory"):
        library.has(SHAPE)
    with pytest.raises(RuntimeError, match="no memory"):
        library.has(SHAPE)
    monkeypatch.setattr(maps, "capture", right)
    assert library.has(SHAPE)


@pytest.mark.parametrize("name", ["128-32-3x3s1-14", "64-64-3x3s1-56"])
def test_matched_maps_have_the_shares_that_were_counted(name: str) -> None:
    layer = _layer(shape=shapes_named(name)[0])

    zeros, groups = module("maps").MATCHED[name]
    assert layer.zeros.elements == pytest.approx(zeros, abs=0.02)
    assert layer.zeros.groups_2x4 == pytest.approx(groups, abs=0.06)


def test_what_nobody_counted() -> None:
    unknown = LayerShape(4, 4, kernel=3, stride=1, size=6, padding=1)
    with pytest.raises(UsageError, match="nobody counted"):
        _layer(shape=unknown)
    layer = _layer("channel", shape=unknown, zeros=0.5)
    assert layer.zeros.channels == 0.5
    assert layer.source == "synthetic-channel"


def test_a_network_has_its_layers_as_often_as_the_paper_lists() -> None:
    names = module("maps").layers_named
    assert len(names("resnet152")) == 50
    assert len(names("densenet201")) == 98
    assert names("resnet152")[44].name == names("resnet152")[46].name == "256-256-3x3s1-14"
    assert names("resnet152")[47].name == "512-512-3x3s1-7"
    assert set(names("sparse")) == set(names("resnet152") + names("densenet201"))


# Peers.


@pytest.fixture(scope="module")
def fake_cudnn(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """cuDNN's calls by loops on the host."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("fake_gemm_cudnn.c")
    library = tmp_path_factory.mktemp("cudnn") / "fake.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_the_three_algorithms_are_called_as_cudnn_wants_it(
    fake_cudnn: ctypes.CDLL, stride: int, padding: int
) -> None:
    x, weight = torch.randn(2, 5, 7, 6), torch.randn(4, 5, 3, 3)

    wanted = F.conv2d(x, weight, None, stride, padding)

    def seconds_of(gemm: Any) -> float:
        assert torch.allclose(gemm(), wanted, atol=1e-4)
        return 1e-6 if (gemm.layout == "NHWC") is (stride == 1) else 2e-6

    found, missing = module("gemm").all_of(
        x, weight, (stride, stride), (padding, padding), lambda: fake_cudnn, seconds_of
    )

    assert missing == {}
    faster = "NHWC" if stride == 1 else "NCHW"
    assert {name: each.gemm.layout for name, each in found.items()} == {
        "t1": faster, "t2": faster, "t3": "NCHW",
    }  # fmt: skip
    assert sorted(found["t1"].tried.values()) == ["1.00 µs", "2.00 µs"]
    assert "WorkspaceSize gave status 9" in found["t3"].tried["NHWC"]
    for each in found.values():
        assert torch.allclose(each.gemm(), wanted, atol=1e-4)


def test_the_faster_layout_is_measured(fake_cudnn: ctypes.CDLL) -> None:
    x, weight = torch.randn(1, 5, 7, 6), torch.randn(4, 5, 3, 3)
    found, _ = module("gemm").all_of(x, weight, (1, 1), (1, 1), lambda: fake_cudnn)

    figures = {layout: float(said.split()[0]) for layout, said in found["t1"].tried.items()}
    assert set(figures) == {"NHWC", "NCHW"}
    assert figures[found["t1"].gemm.layout] == min(figures.values())


def test_a_refusal_of_cudnn_is_told(fake_cudnn: ctypes.CDLL) -> None:
    gemm = module("gemm")
    x, weight = torch.randn(1, 5, 7, 6), torch.randn(4, 5, 3, 3)
    with pytest.raises(NotApplicableError, match="WorkspaceSize gave status 9"):
        gemm.Gemm(fake_cudnn, 7, x, weight, (1, 1), (1, 1), "NHWC")


def test_a_host_without_cudnn_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gemm = module("gemm")
    monkeypatch.setattr(gemm, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(gemm, "_NAMES", ("libnothing-of-this-name.so",))
    gemm.find_cudnn.cache_clear()
    try:
        _, missing = gemm.all_of(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), (1, 1), (1, 1))
    finally:
        gemm.find_cudnn.cache_clear()
    assert set(missing) == {"t1", "t2", "t3"}
    assert "no cuDNN to call here" in missing["t1"]


def test_peers_compute_the_layer() -> None:
    layer = _layer(batch=2)
    problem = module("peers").problem_of(layer, CPU, "fp32")
    found = module("peers").peers_of(problem, module("peers").PEERS, 4, 1.0, 0.0)

    assert [peer.name for peer in found.peers] == [
        "torch", "torch_last", "torch_packed", "torch_sparse",
    ]  # fmt: skip
    wanted = module("correctness").reference(layer, "fp32")
    for peer in found.peers:
        assert module("correctness").distance(peer.call(), wanted) < 1e-5
    assert "spconv is not installed" in found.missing["spconv"]


@pytest.mark.parametrize("error", ["OSError", "AttributeError", "ImportError"])
def test_an_spconv_that_is_broken_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    package = tmp_path / "spconv"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(f"raise {error}('libcudart of another CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = module("peers").problem_of(_layer(), CPU, "fp32")

    found = module("peers").peers_of(problem, ("spconv",), 4, 1.0, 0.0)

    sys.modules.pop("spconv", None)
    assert "libcudart of another CUDA" in found.missing["spconv"]
    assert found.peers == ()


def test_a_torch_without_packing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(_problem: Any) -> Any:
        raise AttributeError("no mkldnn_reorder_conv2d_weight")

    monkeypatch.setattr(module("on_torch"), "_packed", lacks)
    problem = module("peers").problem_of(_layer(), CPU, "fp32")

    found = module("peers").peers_of(problem, ("torch", "torch_packed"), 4, 1.0, 0.0)

    assert [peer.name for peer in found.peers] == ["torch"]
    assert "no mkldnn_reorder_conv2d_weight" in found.missing["torch_packed"]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_plan_reads_a_bias_where_it_has_one(dtype: Any) -> None:
    """With torch's convolution in the place of cuDNN's."""
    plans, layer = module("plans"), _layer()
    problem = module("peers").problem_of(layer, CPU, "fp32")

    class Plan:
        bias_dtype = dtype
        problem = plans.conv_problem(
            module("peers").problem_of(layer, CPU, "fp32"), dtype is not None
        )

        def own_workspace(self) -> None:
            return None

        def bind(self, x: Any, w: Any, bias: Any, _residual: Any, y: Any, _space: Any) -> Any:
            assert (bias is None) is (dtype is None)
            assert bias is None or (bias.dtype == dtype and not bias.any())
            return lambda: y.copy_(F.conv2d(x, w, padding=1))

    into, call = plans.bound(problem, Plan())

    assert torch.equal(into, torch.relu(layer.x))
    wanted = module("correctness").reference(layer, "fp32")
    assert module("correctness").distance(call(), wanted) < 1e-5


def test_plans_with_a_bias_and_without_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, asked = module("plans"), []

    def survey(problem: Any, _device: Any, *, limit: int, seconds: float) -> Any:
        asked.append((problem.bias, limit, seconds))
        return types.SimpleNamespace(plans=(f"plan {problem.bias}",), note="1 plans, 2 x slow")

    monkeypatch.setattr(plans.cudnn, "survey", survey)
    problem = module("peers").problem_of(_layer(), CPU, "fp32")

    found, note = plans.surveyed(problem, 9, 3.0)

    assert asked == [(True, 4, 1.5), (False, 4, 1.5)]
    assert found == ["plan True", "plan False"]
    assert note == "with a bias: 1 plans, 2 x slow; without a bias: 1 plans, 2 x slow"


class _KeptPlan:
    """Of a cuDNN that stores `convolution` as its name; `slow` plans take longer."""

    def __init__(self, name: str, problem: Any, stores: bool = True) -> None:
        self.name, self.problem, self.stores, self.source = name, problem, stores, "first"
        self.bias_dtype = torch.float32 if problem.bias else None

    def own_workspace(self) -> None:
        return None

    def bind(self, x: Any, w: Any, bias: Any, _residual: Any, y: Any, _space: Any) -> Any:
        def call() -> None:
            time.sleep(0.001 * int(self.name))
            y.copy_(F.conv2d(x, w, padding=1))

        return call

    def blob(self) -> bytes:
        if not self.stores:
            raise module("kept_plans").CudnnPlanError("cuDNN does not store it")
        return self.name.encode()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> List[bool]:
    """The searches that were made, by whether they were with a bias; in a cache of its own."""
    made: List[bool] = []
    plans = module("plans")

    def survey(problem: Any, _device: Any, *, limit: int, seconds: float) -> Any:
        made.append(problem.bias)
        # One that is fast and cannot be stored, one that can, and slow ones.
        found = [_KeptPlan("0", problem, stores=False)] if problem.bias else []
        found += [_KeptPlan(str(name), problem) for name in (3, 1, 4)]
        return types.SimpleNamespace(plans=tuple(found), note="a note")

    def rebuild(problem: Any, blob: bytes, _device: Any) -> Any:
        return _KeptPlan(blob.decode(), problem)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans.cudnn, "survey", survey)
    monkeypatch.setattr(plans.cudnn, "rebuild", rebuild)
    monkeypatch.setattr(plans.cudnn, "missing", lambda: "")
    return made


def _cuda_like(problem: Any) -> Any:
    """`search` asks whether x is on a GPU; nothing else of it needs one."""

    class Map(torch.Tensor):
        is_cuda = True

    return dataclasses.replace(problem, x=problem.x.as_subclass(Map))


def test_the_fastest_plans_of_a_search_serve_the_repeats(searches: List[bool]) -> None:
    plans, problem = module("plans"), module("peers").problem_of(_layer(), CPU, "fp32")
    problem = _cuda_like(problem)

    first = plans.search(problem, 8, 1.0)
    second = plans.search(problem, 8, 1.0)

    assert searches == [True, False]
    assert first.engines[0]["engine"] == "0"
    # The two that take a millisecond, and one of three.
    assert sorted(each["engine"] for each in second.engines) == ["1", "1", "3"]
    assert {each["bias"] for each in second.engines} == {True, False}
    assert second.note.startswith("kept by an earlier row: with a bias: a note")
    plans.search(problem, 8, 2.0)
    assert len(searches) == 4, "other bounds are another search"


def test_kept_plans_that_are_of_no_use_are_searched_anew(
    searches: List[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans, problem = module("plans"), module("peers").problem_of(_layer(), CPU, "fp32")
    problem = _cuda_like(problem)
    plans.search(problem, 8, 1.0)
    (file,) = tmp_path.rglob("plans-*.json")

    for text in ("{", '{"plans": []}', '{"note": "", "plans": [{"bias": 1, "blob": "%"}]}'):
        file.write_text(text)
        searches.clear()
        plans.search(problem, 8, 1.0)
        assert searches == [True, False], text

    def refuses(*_: Any) -> Any:
        raise module("kept_plans").CudnnPlanError("of another GPU")

    monkeypatch.setattr(plans.cudnn, "rebuild", refuses)
    searches.clear()
    plans.search(problem, 8, 1.0)
    assert searches == [True, False]


@pytest.mark.parametrize(
    ("precision", "words"), [("fp32", "for NVIDIA GPUs"), ("fp16", "for NVIDIA GPUs")]
)
def test_a_cpu_has_no_dense_kernel_of_ours(precision: str, words: str) -> None:
    problem = module("peers").problem_of(_layer(), CPU, precision)
    found = module("peers").peers_of(problem, ("own_dense",), 4, 1.0, 0.0)
    assert found.peers == ()
    assert words in found.missing["own_dense"]


def test_spconv_is_fed_pixels_that_are_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU can tell: with a dense convolution in the place of its module."""
    peers = module("peers")
    seen: Dict[str, Any] = {}

    class SubM(torch.nn.Module):
        def __init__(self, channels: int, filters: int, kernel: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(filters, kernel, kernel, channels))

        def forward(self, tensor: Any) -> Any:
            whole = torch.zeros(tensor.batch, *tensor.size, tensor.values.shape[1])
            whole[tuple(tensor.places.long().t())] = tensor.values
            y = F.conv2d(whole.permute(0, 3, 1, 2), self.weight.permute(0, 3, 1, 2), padding=1)
            mask = (whole != 0).any(dim=3)[:, None]
            return types.SimpleNamespace(dense=lambda: y * mask)

    def tensor(values: Any, places: Any, size: List[int], batch: int) -> Any:
        seen.update(places=places)
        return types.SimpleNamespace(values=values, places=places, size=size, batch=batch)

    fake = types.SimpleNamespace(SubMConv2d=SubM, SparseConvTensor=tensor)
    monkeypatch.setitem(sys.modules, "spconv", types.SimpleNamespace(pytorch=fake))
    monkeypatch.setitem(sys.modules, "spconv.pytorch", fake)
    layer = _layer("pixel", zeros=0.6)
    problem = peers.problem_of(layer, CPU, "fp32")
    with pytest.raises(NotApplicableError, match="NVIDIA"):
        peers._spconv(problem)
    monkeypatch.setattr(peers, "_on_gpu", lambda _tensor: True)

    peer = peers._spconv(problem)
    with torch.no_grad():
        found = peer.call()

    active = (torch.relu(layer.x) != 0).any(dim=1, keepdim=True)
    wanted = module("correctness").reference(layer, "fp32") * active
    assert module("correctness").distance(found.double() * active, wanted) < 1e-5
    assert len(seen["places"]) == int(active.sum())


@pytest.mark.parametrize(
    ("precision", "granularity", "single", "several"),
    [("fp32", "auto", 3, 4), ("fp16", "auto", 7, 8), ("tf32", "auto", 2, 2),
     ("fp16", "element", 3, 4), ("fp16", "tensor-core", 4, 4), ("fp32", "tensor-core", 0, 0),
     ("tf32", "element", 0, 0)],
)  # fmt: skip
def test_a_gpu_has_these_kernels(
    precision: str, granularity: str, single: int, several: int
) -> None:
    """Of one image and of eight, for which a launch that makes lists is tried too."""
    variants = module("ours")._variants
    for batch, count in ((1, single), (8, several)):
        if count == 0:
            with pytest.raises(SkippedError, match=f"no {granularity} kernel in {precision}"):
                variants(precision, granularity, batch)
            continue
        assert len({each.text() for each in variants(precision, granularity, batch)}) == count


def test_the_fastest_kernel_of_a_gpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with torch's convolution in the place of the generated ones: all paths but one are
    slow, and the tensor-core ones have no tile."""
    from narrowgauge_kernels.sparse import launching, tuning
    from narrowgauge_kernels.sparse.errors import SparseArgumentError
    from narrowgauge_kernels.sparse.shapes import Tile

    class Stub:
        def __init__(self, shape: Any, tile: Any, variant: Any) -> None:
            self.shape, self.variant = shape, variant

        def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if self.variant.path != "fused":
                time.sleep(0.002)
            return F.conv2d(torch.relu(x.float()), weight.float(), padding=1)

    def tile(_shape: Any, variant: Any, _identity: Any) -> Any:
        if variant.granularity == "tensor-core":
            raise SparseArgumentError("no tile fits")
        return Tile(2, 7, 4)

    monkeypatch.setattr(launching, "Convolution", Stub)
    monkeypatch.setattr(tuning, "stored_tile", tile)
    monkeypatch.setattr(tuning, "device_identity", lambda _device: ("stub", "9.0"))
    layer = _layer()

    made = module("ours")._cuda(layer, CPU, "fp16", "auto", 1.0)

    assert made.about["granularity"] == "element"
    assert "fused" in made.about["kernel"]
    assert made.about["tile"] == Tile(2, 7, 4).text()
    assert sorted(made.about["tried"].values())[-1] == "no tile fits"
    wanted = module("correctness").reference(layer, "fp16")
    assert module("correctness").distance(made.call(), wanted) < 1e-5
    with pytest.raises(SkippedError, match="no sparse kernel does 1,128,7,7,32"):
        module("ours")._cuda(layer, CPU, "tf32", "auto", 1.0)


def test_nan_is_wrong() -> None:
    nan = torch.tensor([float("nan")])
    assert not module("correctness").distance(nan, torch.ones(1).double()) <= 1e9


# Figures.


def _samples(*seconds: float) -> Samples:
    return Samples(seconds, "monotonic", 1, seconds, 1, True, "sample limit")


def _times(**seconds: float) -> Any:
    ours = seconds.pop("ours")
    beside = {
        name: Comparison(_samples(ours, ours), _samples(taken, taken))
        for name, taken in seconds.items()
    }
    return module("times").Times(_layer(), _samples(ours, ours), beside)


def test_the_fastest_of_several_counts() -> None:
    ratios = _times(ours=1.0, torch=3.0, cudnn=2.0, t1=5.0, t2=4.0, t3=6.0).ratios()

    assert ratios["times_gemm"] == (4.0, 4.0)
    assert ratios["times_dense"] == (2.0, 2.0)
    assert ratios["times_t3"] == (6.0, 6.0)
    assert "selector_over_best" not in ratios


@pytest.mark.parametrize(
    ("ours", "torch_s", "chosen", "over"),
    [(1.0, 2.0, 1.03, 1.03), (2.0, 1.0, 1.02, 1.02), (2.0, 1.0, 2.0, 2.0)],
)
def test_a_choice_is_held_against_all(
    ours: float, torch_s: float, chosen: float, over: float
) -> None:
    ratios = _times(ours=ours, torch=torch_s, selected=chosen).ratios()
    assert ratios["selector_over_all"] == pytest.approx((over, over))
    assert "selector_over_best" not in ratios, "it was not told what to be"


@pytest.mark.parametrize(("sparse", "dense"), [(1.0, 2.0), (3.0, 1.0)])
def test_a_choice_is_held_against_the_better_way_of_the_same_layer(
    sparse: float, dense: float
) -> None:
    ways = {
        "selected_sparse": Comparison(_samples(sparse, sparse), _samples(1.05, 1.1)),
        "selected_dense": Comparison(_samples(dense, dense), _samples(1.05, 1.1)),
    }
    times = _times(ours=0.1, torch=0.2, selected=1.0)
    on_gpu, on_cpu = (
        module("times").Times(times.layer, times.samples, times.beside, ways, device).ratios()
        for device in ("cuda", "cpu")
    )

    assert on_gpu["selector_over_best"] == pytest.approx((1.05, 1.1)), "not ours, nor torch's"
    assert on_cpu["selector_over_best_cpu"] == on_cpu["selector_over_best"]
    assert on_cpu["times_dense_cpu"] == on_cpu["times_dense"]
    assert not {name for name in on_gpu if name.endswith("_cpu")}


def test_the_crossover_lies_between_two_shares() -> None:
    crossing = module("crossover").crossing
    assert crossing([(0.0, 0.5), (0.5, 2.0), (1.0, 4.0)]) == pytest.approx(0.25)
    assert crossing([(0.0, 2.0), (0.5, 0.5), (1.0, 2.0)]) == pytest.approx(0.75)
    assert crossing([(0.0, 1.5), (1.0, 4.0)]) == 0.0
    assert crossing([(0.0, 0.5), (1.0, 0.9)]) == 1.0


# The declaration.

#: What claims ask for beyond their profiles, in runs of their own.
_BEYOND = {("h200-batch-8", "granularity")}


def test_every_claim_is_of_a_row_of_its_profile() -> None:
    spec = ROWS.spec()
    for claim in load_claims(EXPERIMENTS / "sparse-layers" / "claims.toml", spec):
        values: Dict[str, Any] = spec.profiles[claim.profile].values
        for selection in claim.selections:
            for name, value in selection.where.items():
                declared = values.get(name, (spec.parameters[name].default,))
                assert (value in declared) is ((claim.id, name) not in _BEYOND), (claim.id, name)


def test_choices_are_what_there_is() -> None:
    spec, maps = ROWS.spec(), module("maps")
    assert spec.parameters["maps"].choices == maps.SOURCES
    assert spec.parameters["granularity"].choices == module("ours").GRANULARITIES
    assert tuple(spec.parameters["precision"].choices) == tuple(module("ours").DTYPES)
    for name in spec.parameters["shapes"].choices:
        for shape in maps.layers_named(name):
            assert shape.name in maps.MATCHED
    assert ROWS.job("maps=auto").data_sets == ("imagenet-20", "resnet50-v1-imagenet")
    assert ROWS.job("maps=random").data_sets == ()


@needs_kernels
def test_the_closing_lines_say_what_was_measured(tmp_path: Path) -> None:
    closing = ROWS.spec().closing
    assert closing is not None
    line = summary_lines(closing, [ROWS.run(tmp_path)])[-1]
    assert line.startswith(f"| {LAYER} | 1 | matched | 0.8")


@pytest.mark.parametrize("kind", [DeviceError, ToolchainMissingError])
def test_a_gpu_whose_kernels_cannot_be_compiled_or_loaded_skips_the_row(
    monkeypatch: pytest.MonkeyPatch, kind: Type[KernelsError]
) -> None:
    ours = ROWS.module("ours")

    def refuse(*given: Any) -> None:
        raise kind("no NVRTC", why="looked in /usr/lib", next_step="install it")

    monkeypatch.setattr(ours, "_fastest", refuse)
    with pytest.raises(SkippedError, match="no NVRTC") as caught:
        ours.ours_of(None, torch.device("cuda", 0), "fp32", "auto", 1.0)
    assert (caught.value.why, caught.value.next_step) == ("looked in /usr/lib", "install it")
