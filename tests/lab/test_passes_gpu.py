"""Products of layers on a GPU, at every precision that it has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict

import pytest
import torch
from passes_cases import (
    CASES,
    DEPTHWISE,
    Case,
    conv,
    differently_laid,
    distance,
    errors,
    exact_int8,
    layer,
    packed,
    products,
)
from torch.nn import functional as F

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.layers.passes import PRECISIONS, missing, passes_for, tiling
from narrowgauge_lab.layers.passes.choice import product_of
from narrowgauge_lab.layers.passes.seeds import SeedAt, seed_under
from narrowgauge_lab.measure import probe

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
#: |error| / |product|: of 3 and of 4 significant bits, of 127 steps, of 8 and 11 bits, of float32,
#: whose products may be Winograd's: those transform by factors that cost it some bits.
LIMITS = {"fp32": 2e-5, "tf32": 2e-3, "bf16": 8e-3, "fp16": 1e-3, "int8": 2.5e-2, "fp8": 0.12}
#: Layers whose products fill several tiles and blocks, aligned and not.
LARGE = (
    conv("large 3x3", (4, 256, 14, 14), (256, 256, 3, 3), (1, 1), (1, 1)),
    conv("large 3x3, stride 2", (2, 256, 28, 28), (128, 256, 3, 3), (2, 2), (1, 1)),
    conv("large 1x1", (8, 512, 7, 7), (256, 512, 1, 1)),
    conv("large 1x1, stride 2", (4, 256, 14, 14), (512, 256, 1, 1), (2, 2)),
    conv("large, odd", (3, 200, 15, 17), (150, 200, 3, 3), (1, 1), (1, 1)),
    conv("large groups", (2, 256, 9, 9), (256, 64, 3, 3), (2, 1), (1, 1), (1, 1), 4),
)
ALL = (*CASES, *LARGE)


def passes(precision: str, case: Case, **wanted: Any) -> Any:
    reason = missing(precision, CUDA)
    if reason:
        pytest.skip(reason)
    return passes_for(precision, CUDA, case.problem, **wanted)


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_are_those_of_autograd(precision: str, case: Case) -> None:
    found = errors(passes(precision, case), layer(case, CUDA))

    assert max(found.values()) < LIMITS[precision], found


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("case", [LARGE[0], LARGE[2], CASES[-2]], ids=str)
def test_fp32_is_strict_and_tf32_is_not_whatever_the_flags_say(case: Case, flag: bool) -> None:
    made = layer(case, CUDA)
    with tf32_flags.tf32_set_to(flag):
        strict = errors(passes("fp32", case), made)
        reduced = errors(passes("tf32", case), made)
        after = tf32_flags.tf32_allowed()

    assert max(strict.values()) < LIMITS["fp32"], strict
    if case in LARGE:  # small products may run without matrix units, and cuDNN may choose to
        del reduced["weight_grad"]
        assert min(reduced.values()) > 5e-5, reduced
    assert set(after.values()) == {flag}


@pytest.mark.parametrize("product", ["triton", "torch._int_mm", "float64"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_int8_sums_are_exact(product: str, case: Case) -> None:
    if product == "triton" and product_of("int8", CUDA) != "triton":
        pytest.skip("no Triton here")
    made, chosen = layer(case, CUDA), passes("int8", case, product=product)

    found, exact = products(chosen, made, seed=3), exact_int8(chosen, made, seed=3)

    for name, each in found.items():
        # Four roundings to float32, one of them of a weight's scale by another division.
        largest = exact[name].abs() + (made.bias.abs().max() if name == "forward" else 0)
        assert bool(((each.double() - exact[name]).abs() <= 4e-7 * largest).all()), name


@pytest.mark.parametrize("seed", [None, 0, 2**40 + 3])
@pytest.mark.parametrize("case", [CASES[0], LARGE[4]], ids=str)
def test_what_is_quantised_here_has_the_bits_of_the_wire(case: Case, seed: Any) -> None:
    made, chosen = layer(case), passes("int8", case)
    made.x[0, 1, 0, 0], made.x[0, 2, 1, 1] = float("nan"), float("inf")
    made.x[:, 3] = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = made.x.to(dtype)
        values, scale = packed(x, seed)
        for how, other in {"contiguous": x, **differently_laid(x)}.items():
            operand = other.to(CUDA)

            found = (
                chosen.prepared_input(operand)
                if seed is None
                else chosen.prepared_grad(operand, seed)
            )

            assert torch.equal(found.values.cpu(), values), (how, dtype)
            assert torch.equal(found.scale.cpu().isnan(), scale.isnan())
            known = ~scale.isnan()
            assert torch.equal(found.scale.cpu()[known], scale[known])


def test_a_captured_rounding_takes_the_seed_that_is_there_at_its_replay() -> None:
    case = CASES[0]
    made, chosen = layer(case, CUDA), passes("int8", case)
    if chosen.product != "triton":
        pytest.skip("no Triton here")
    base = torch.zeros(1, dtype=torch.int64, device=CUDA)
    at = SeedAt(base, 2)
    chosen.prepared_grad(made.grad, at)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chosen.prepared_grad(made.grad, at)

    rounded = []
    for number in (7, 2**61 + 1):
        base.fill_(number)
        graph.replay()
        values, _ = packed(made.grad.cpu(), seed_under(number, 2))
        assert torch.equal(found.values.cpu(), values)
        rounded.append(values)
    assert not torch.equal(*rounded)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("case", [LARGE[0], LARGE[1], LARGE[2], LARGE[4]], ids=str)
def test_every_tile_gives_the_same_bits(
    precision: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run that is resumed goes on bit for bit, whichever tiles were fastest that day."""
    chosen, made = passes(precision, case), layer(case, CUDA)
    if chosen.product != "triton":
        pytest.skip("no Triton here")
    wanted = products(chosen, made)
    from narrowgauge_lab.layers.passes.triton_kernels import OutOfResources

    unfit, tall = 0, [each for each in tiling.TILES if each.m >= 64]
    for tile in tall:
        monkeypatch.setattr(tiling, "_chosen", {})
        monkeypatch.setattr(tiling, "fastest", lambda *_, tile=tile: tile)
        try:
            found = products(chosen, made)
        except OutOfResources:
            unfit += 1
            continue
        for name, each in found.items():
            assert torch.equal(each, wanted[name]), (str(tile), name)
    assert unfit < len(tall) // 2


@pytest.mark.parametrize("product", ["triton", "torch._scaled_mm"])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], *LARGE[:3]], ids=str)
def test_fp8_goes_both_ways(product: str, case: Case) -> None:
    chosen = passes("fp8", case, product=product)

    found = errors(chosen, layer(case, CUDA))

    assert chosen.product == product
    assert max(found.values()) < LIMITS["fp8"], found


def test_long_sums_of_fp8_stay_good() -> None:
    """A weight gradient over 200,704 pixels: matrix units alone would lose its last bits."""
    case = conv("long", (16, 64, 112, 112), (64, 64, 1, 1))

    assert errors(passes("fp8", case), layer(case, CUDA))["weight_grad"] < LIMITS["fp8"]


@pytest.mark.parametrize("product", ["triton", "torch._int_mm"])
def test_sums_that_int32_does_not_hold_are_split(product: str) -> None:
    """32 images of 112 × 112 pixels, all 127: 6.5 · 10^9 > 2^31."""
    one = torch.ones(32, 16, 112, 112, device=CUDA)
    chosen = passes("int8", CASES[6], product=product)

    found = chosen.weight_grad(one, one, (16, 16, 1, 1))

    assert 32 * 112 * 112 * 127**2 > 2**31
    assert float(found.min()) == pytest.approx(32 * 112 * 112, rel=3e-7)
    assert float(found.max()) == pytest.approx(32 * 112 * 112, rel=3e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", [CASES[0], CASES[-2], LARGE[4]], ids=str)
def test_the_order_of_memory_does_not_matter(precision: str, case: Case) -> None:
    made, chosen = layer(case, CUDA), passes(precision, case)
    for how, weight in differently_laid(made.weight).items():
        x, grad = (differently_laid(each)[how] for each in (made.x, made.grad))

        found = products(chosen, dataclasses.replace(made, x=x, weight=weight, grad=grad))

        for name, each in found.items():
            assert distance(each, getattr(made, name)) < LIMITS[precision], (how, name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_an_empty_batch_gives_empty_results(precision: str, case: Case) -> None:
    chosen, weight = passes(precision, case), torch.ones(case.weight, device=CUDA)
    x = torch.empty(0, *case.image[1:], device=CUDA)

    result = chosen.forward(x, weight)

    assert result.shape == case.problem.output_shape(x.shape, weight.shape)
    assert chosen.input_grad(result, weight, x.shape).shape == x.shape
    assert not chosen.weight_grad(result, x, weight.shape).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_finite_never_comes_out_finite(precision: str, bad: float) -> None:
    made, chosen = layer(CASES[0], CUDA), passes(precision, CASES[0])
    made.x[0, 3, 2, 2] = made.grad[1, 2, 4, 4] = bad

    found = products(chosen, made)

    near = (0, slice(None), slice(1, 4), slice(1, 4))
    finite = torch.isfinite(found["forward"][near])
    if precision == "fp16":
        # cuDNN 9.19 has a kernel that gives zero (and the bias) where minus infinity is due; never
        # for a gradient, where loss scaling looks.
        assert made.bias is not None
        bias = made.bias.half().view(1, -1, 1, 1).expand_as(found["forward"])
        lost = (found["forward"] - bias)[near][finite]
        due = F.conv2d(made.x.double(), made.weight.double(), padding=1)[near][finite]
        assert not lost.any(), lost
        assert (due == -math.inf).all(), due
    else:
        assert not finite.any(), found["forward"][near][finite]
    assert not torch.isfinite(found["input_grad"][1, :, 3:6, 3:6]).any()
    assert not torch.isfinite(found["weight_grad"][:, 3]).any()
    assert not torch.isfinite(found["weight_grad"][2]).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_whoever_watches_sees_the_dtypes_of_all_three(precision: str) -> None:
    made, chosen = layer(LARGE[0], CUDA), passes(precision, LARGE[0])
    products(chosen, made)  # tiles are measured once, and that is seen too

    seen = probe.observe(lambda: products(chosen, made))

    tf32: Dict[str, bool] = dict.fromkeys(("matmul", "conv"), precision == "tf32")
    assert sum(each.calls for each in seen) == 3
    assert probe.precision_ran(seen, tf32) == precision, seen


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_they_run_inside_a_graph_and_beside_other_streams(precision: str) -> None:
    made, chosen = layer(LARGE[1], CUDA), passes(precision, LARGE[1])
    wanted = products(chosen, made)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = products(chosen, made)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products(chosen, made)
    graph.replay()
    torch.cuda.synchronize()

    for name, each in wanted.items():
        assert torch.equal(beside[name], each)
        assert torch.equal(captured[name], each)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_depthwise_is_refused(precision: str) -> None:
    with pytest.raises(NotApplicableError, match="depthwise"):
        passes(precision, DEPTHWISE).require(DEPTHWISE.weight)
