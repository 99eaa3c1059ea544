"""Layers by engines of TensorRT, over the API of each version: what they compute, by a stand-in
whose engines compute what they were defined as, and what is built, sent and refitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from hetero_cases import CASES, Case, gradients, make, relative_error
from trt_cases import CPU, VERSIONS, WITHOUT_80
from trt_convolving import Convolving
from trt_layers import Bench, batch, check, products

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import Transfers
from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.errors import EngineClosedError, EngineMissingError
from narrowgauge_lab.layers.hetero.backends import BackendOptions, missing
from narrowgauge_lab.layers.hetero.backends.tensorrt import TensorrtBackend
from narrowgauge_lab.layers.hetero.ledger import Ledger

SET, BUILD = "Refitter.set_named_weights", "Builder.build_serialized_network"
#: One of each kind: bindings by index, by name, weights taken from the device, strong types only.
KINDS = ["8.4", "8.6", "10.3", "11.4"]
PLAIN = CASES[0]


@pytest.fixture
def bench(monkeypatch: Any, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


# What they compute


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(case: Case, bench: Bench) -> None:
    check(bench.backend(Convolving("10.3"), case.problem), case)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_is_asked_for_what_it_has(version: str, bench: Bench) -> None:
    case = CASES[3]

    check(bench.backend(Convolving(version), case.problem, "fp16"), case)


@pytest.mark.parametrize("version", KINDS)
def test_tf32_is_asked_for(version: str, bench: Bench) -> None:
    world = Convolving(version)

    check(bench.backend(world, PLAIN.problem, "tf32"), PLAIN)

    assert "TF32" in world.flags()


def test_tensorrt_80_is_asked_for_nothing_that_it_lacks(bench: Bench) -> None:
    world = Convolving("8.4", **WITHOUT_80)

    check(bench.backend(world, PLAIN.problem, "fp16"), PLAIN)


def test_weights_that_change_are_those_that_count(bench: Bench) -> None:
    made = bench.backend(Convolving("10.3"), PLAIN.problem)
    for factor in (1.0, -2.0):
        changed = Case("", PLAIN.problem, PLAIN.x, PLAIN.weight * factor, None, PLAIN.grad)
        check(made, changed)


# Engines


@pytest.mark.parametrize("version", ["8.4", "11.4"])
def test_batches_of_any_size_share_the_largest_engine(version: str, bench: Bench) -> None:
    world = Convolving(version)
    made = bench.backend(world, PLAIN.problem)

    for count in (3, 1, 2, 3):
        check(made, batch(count))
    assert len(world.made(BUILD)) == 3
    check(made, batch(5))
    check(made, batch(4))
    assert len(world.made(BUILD)) == 6


def test_image_sizes_have_engines_of_their_own(bench: Bench) -> None:
    world = Convolving("10.3")
    made = bench.backend(world, PLAIN.problem)

    for size in (8, 6, 8):
        check(made, make("size", PLAIN.problem, (2, 4, size, 8), 6, (3, 3)))
    assert len(world.made(BUILD)) == 6


def test_engines_are_kept_for_the_next_process(bench: Bench) -> None:
    world = Convolving("10.3")
    check(bench.backend(world, PLAIN.problem), PLAIN)

    again = Case("", PLAIN.problem, PLAIN.x, PLAIN.weight + 1, None, PLAIN.grad)
    check(bench.backend(world, PLAIN.problem), again)

    assert len(world.made(BUILD)) == 3


def test_no_images_need_no_engine(bench: Bench) -> None:
    world, ledger = Convolving("10.3"), Ledger("bytes")
    made = bench.backend(world, PLAIN.problem, ledger=ledger)
    x = PLAIN.x[:0]

    y = made.forward(x, PLAIN.weight, None)

    assert y.shape == (0, 6, 8, 8)
    assert made.input_grad(y, PLAIN.weight, x.shape).shape == x.shape
    assert not made.weight_grad(y, x, PLAIN.weight.shape).any()
    assert (world.made(BUILD), ledger.bytes_moved()) == ([], (0, 0))


def test_a_closed_backend_says_so(bench: Bench) -> None:
    made = bench.backend(Convolving("10.3"), PLAIN.problem)
    check(made, PLAIN)

    made.close()

    with pytest.raises(EngineClosedError, match="layer 'conv'"):
        made.forward(PLAIN.x, PLAIN.weight, None)


# What is asked of TensorRT


def test_the_weight_gradient_is_a_product_of_two_inputs(bench: Bench) -> None:
    world = Convolving("8.6")
    case = next(each for each in CASES if each.name == "groups, stride 2")

    bench.backend(world, case.problem).weight_grad(case.grad, case.x, case.weight.shape)

    assert [made["name"] for made in world.made("INetworkDefinition.add_input")] == [
        "image", "output_grad",
    ]  # fmt: skip
    shapes = {made["input"]: made["max"] for made in world.made("IOptimizationProfile.set_shape")}
    assert shapes == {"image": (2, 6, 9, 7), "output_grad": (2, 9, 5, 4)}
    assert world.flags() == set()  # nothing to be refitted
    (windows,) = world.made("INetworkDefinition.add_convolution_nd")
    assert windows["num_output_maps"] == 6 * 9
    assert world.made("IConvolutionLayer.num_groups=") == [{"value": 6}]
    rows = [made["value"] for made in world.made("IShuffleLayer.reshape_dims=")]
    assert rows == [(3, 3, -1), (3, 18, -1)]


def test_a_pointwise_layer_has_its_windows_already(bench: Bench) -> None:
    world = Convolving("8.6")
    case = next(each for each in CASES if each.name == "pointwise")

    bench.backend(world, case.problem).weight_grad(case.grad, case.x, case.weight.shape)

    assert world.made("INetworkDefinition.add_convolution_nd") == []


@pytest.mark.parametrize(
    ("name", "image", "post", "dilation"),
    [
        ("stride 2", (4, 4), (0, 0), (1, 1)),
        ("stride 2, odd", (5, 5), (1, 1), (1, 1)),
        ("pointwise, stride 2", (5, 5), (1, 1), (1, 1)),
        ("stride and dilation", (6, 4), (2, 0), (1, 1)),
        ("dilation", (9, 9), (2, 2), (2, 2)),
    ],
)
def test_what_no_window_reached_is_cut_less_or_added_as_zeros(
    name: str, image: Any, post: Any, dilation: Any, bench: Bench
) -> None:
    world = Convolving("8.6")
    case = next(each for each in CASES if each.name == name)

    bench.backend(world, case.problem).input_grad(case.grad, case.weight, case.x.shape)

    (source,) = world.made("INetworkDefinition.add_input")
    assert source["shape"][2:] == image
    assert world.made("IDeconvolutionLayer.post_padding=") == [{"value": post}]
    assert world.made("IDeconvolutionLayer.dilation_nd=") == [{"value": dilation}]


# Refits and copies


@pytest.mark.parametrize("version", KINDS)
def test_only_changed_weights_are_handed_over(version: str, bench: Bench) -> None:
    world = Convolving(version)
    made = bench.backend(world, PLAIN.problem)

    products(made, PLAIN)
    assert len(world.made(SET)) == 2  # forward and input_grad; weight_grad has none
    products(made, PLAIN)
    assert len(world.made(SET)) == 2
    PLAIN.weight.add_(1)
    check(made, PLAIN)
    PLAIN.weight.sub_(1)
    assert len(world.made(SET)) == 4


def moved(ledger: Ledger) -> Dict[Tuple[str, str], Tuple[int, int]]:
    """Bytes to the device and from it, by pass and stage."""
    found: Dict[Tuple[str, str], Tuple[int, int]] = {}
    for each in ledger.intervals():
        if each.to_device or each.from_device:
            before = found.get((each.pass_, each.stage), (0, 0))
            key = each.pass_, each.stage
            found[key] = before[0] + each.to_device, before[1] + each.from_device
    return found


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("fp16", 2)])
def test_what_is_resident_is_sent_once(precision: str, size: int, bench: Bench) -> None:
    ledger = Ledger("serial")
    made = bench.backend(Convolving("8.6"), PLAIN.problem, precision, ledger)
    x, y, w = PLAIN.x.numel(), PLAIN.grad.numel(), PLAIN.weight.numel()

    products(made, PLAIN)

    assert moved(ledger) == {
        ("forward", "to_device"): (x * size, 0), ("forward", "refit"): (w * 4, 0),
        ("forward", "from_device"): (0, y * 4),
        ("input_grad", "to_device"): (y * size, 0), ("input_grad", "refit"): (w * 4, 0),
        ("input_grad", "from_device"): (0, x * 4),
        ("weight_grad", "from_device"): (0, w * 4),
    }  # fmt: skip
    ledger.clear()
    products(made, PLAIN)
    assert ("forward", "refit") not in moved(ledger)


def test_what_is_not_resident_is_sent_again(bench: Bench) -> None:
    ledger = Ledger("serial")
    transfers = Transfers(resident=False)
    made = bench.backend(Convolving("8.6"), PLAIN.problem, ledger=ledger, transfers=transfers)

    products(made, PLAIN)

    both = (PLAIN.x.numel() + PLAIN.grad.numel()) * 4
    assert moved(ledger)["weight_grad", "to_device"] == (both, 0)


def test_what_was_written_to_is_sent_again(bench: Bench) -> None:
    case = make("written to", PLAIN.problem, (2, 4, 8, 8), 6, (3, 3))
    made = bench.backend(Convolving("8.6"), case.problem)
    made.forward(case.x, case.weight, None)
    case.x.mul_(3)

    found = made.weight_grad(case.grad, case.x, case.weight.shape)

    assert relative_error(found, gradients(case)[2]) <= 1e-5


def test_another_tensor_of_the_same_shape_is_not_taken_for_it(bench: Bench) -> None:
    made = bench.backend(Convolving("8.6"), PLAIN.problem)
    made.forward(PLAIN.x, PLAIN.weight, None)
    other = PLAIN.x.clone() + 1

    found = made.weight_grad(PLAIN.grad, other, PLAIN.weight.shape)

    case = Case("", PLAIN.problem, other, PLAIN.weight, None, PLAIN.grad)
    assert relative_error(found, gradients(case)[2]) <= 1e-5


def test_evaluation_comes_before_training_and_after_it(bench: Bench) -> None:
    """Tensors of inference mode keep no count of writes, and cannot be written to outside of it."""
    made = bench.backend(Convolving("10.3"), PLAIN.problem, "fp16")

    for _ in range(2):
        with torch_compat.inference_mode():
            y = made.forward(PLAIN.x.clone(), PLAIN.weight, PLAIN.bias)
        assert relative_error(y, gradients(PLAIN)[0]) <= 3e-3
        check(made, PLAIN)


def test_results_are_the_callers_own(bench: Bench) -> None:
    made = bench.backend(Convolving("10.3"), PLAIN.problem)
    first = products(made, PLAIN)
    kept = [each.clone() for each in first]

    products(made, Case("", PLAIN.problem, PLAIN.x * 2, PLAIN.weight, None, PLAIN.grad * 2))

    assert all(torch.equal(*pair) for pair in zip(first, kept))


# What cannot be


def test_without_tensorrt_it_is_missing() -> None:
    assert "TensorRT runs on NVIDIA GPUs, not on cpu" in missing("tensorrt", CPU)
    with pytest.raises(EngineMissingError, match="layer 'conv' has no TensorRT"):
        TensorrtBackend("conv", PLAIN.problem, "fp32", CPU, Ledger("off"), BackendOptions())


@pytest.mark.parametrize(
    ("version", "precision", "options", "said"),
    [
        ("10.3", "int8", {}, "no calibrated scales"),
        ("8.6", "bf16", {}, "has fp16, fp32, int8, tf32"),
        ("8.4", "fp16", {"dla": 0}, "finds 0 cores"),
        ("8.4", "fp32", {"dla": 0}, "in fp16, not fp32"),
    ],
)
def test_what_the_device_lacks_is_said_before_anything_runs(
    version: str, precision: str, options: Dict[str, Any], said: str, bench: Bench
) -> None:
    with pytest.raises(NotApplicableError) as caught:
        bench.backend(Convolving(version), PLAIN.problem, precision, **options)
    assert said in f"{caught.value.what} {caught.value.why}"
