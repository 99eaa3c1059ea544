"""Products of layers at every precision that a CPU has, against autograd in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, List

import pytest
import torch
from passes_cases import (
    CASES,
    DEPTHWISE,
    Case,
    by_autograd,
    differently_laid,
    distance,
    errors,
    exact_int8,
    layer,
    packed,
    products,
)

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError, UsageError
from narrowgauge_kernels.wire import pack_int8_ref, unpack_int8_ref
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.layers.passes import (
    Problem,
    Quantised,
    choice,
    matrix,
    missing,
    passes_for,
)
from narrowgauge_lab.layers.passes.choice import product_of
from narrowgauge_lab.layers.passes.geometry import forward_phase, input_grad_phases
from narrowgauge_lab.layers.passes.quantise import FORMATS
from narrowgauge_lab.measure import probe

CPU = torch.device("cpu")
#: |error| / |product|: of float32 sums, of operands with 8 and 11 bits, and of 127 steps.
LIMITS = {"fp32": 1e-6, "bf16": 8e-3, "fp16": 1e-3, "int8": 2.5e-2}
HERE = [name for name in LIMITS if not missing(name, CPU)]
LINEAR, PLAIN = CASES[-2], CASES[0]


def passes(precision: str, case: Case, **wanted: Any) -> Any:
    return passes_for(precision, CPU, case.problem, **wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("precision", HERE)
def test_products_are_those_of_autograd(precision: str, case: Case) -> None:
    made = layer(case)

    found = errors(passes(precision, case), made)

    assert max(found.values()) < LIMITS[precision], found


@pytest.mark.skipif("e4m3" not in FORMATS, reason="this torch has no fp8")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_operands_and_scales_are_right_whatever_multiplies_them(case: Case) -> None:
    """No CPU has fp8; its numbers can be multiplied in float64 to look at all but the sums."""
    made = layer(case)

    found = errors(matrix.MatrixPasses("fp8", CPU, case.problem, product="float64"), made)

    assert max(found.values()) < 0.12, found
    assert found["forward"] < 0.06  # gradients have a bit less


def test_a_depthwise_convolution_goes_in_float() -> None:
    assert max(errors(passes("fp32", DEPTHWISE), layer(DEPTHWISE)).values()) < LIMITS["fp32"]


def test_float32_and_int8_are_everywhere() -> None:
    assert {"fp32", "int8"} <= set(HERE)


@pytest.mark.parametrize("product", [n for n in matrix.MULTIPLY if n != "torch._scaled_mm"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_int8_sums_are_exact(product: str, case: Case) -> None:
    if product == "torch._int_mm" and product_of("int8", CPU) != product:
        pytest.skip("this torch has no such product here")
    made, chosen = layer(case), passes("int8", case, product=product)

    found, exact = products(chosen, made, seed=3), exact_int8(chosen, made, seed=3)

    for name, each in found.items():
        # A sum that is one step off shows; three roundings to float32 do not.
        largest = exact[name].abs() + (made.bias.abs().max() if name == "forward" else 0)
        assert bool(((each.double() - exact[name]).abs() <= 3e-7 * largest).all()), name


@pytest.mark.parametrize("depth", [8, 64, 100, 1000])
def test_one_row_may_have_any_stride(depth: int) -> None:
    """What a turned column has: torch's own product takes it for the distance of rows."""
    if product_of("int8", CPU) != "torch._int_mm":
        pytest.skip("this torch has no such product here")
    column = torch.randint(-128, 128, (depth, 1), dtype=torch.int8)
    assert column.t().is_contiguous()

    found = matrix.MULTIPLY["torch._int_mm"](column.t(), column)

    assert int(found) == int((column.long() ** 2).sum())


@pytest.mark.parametrize("product", ["float64", "torch._int_mm"])
def test_sums_that_int32_does_not_hold_are_split(product: str) -> None:
    """140,000 · 127² > 2^31, as a batch of 112 × 112 pixels and more reaches it."""
    if product == "torch._int_mm" and product_of("int8", CPU) != product:
        pytest.skip("this torch has no such product here")
    rows = 140_000
    assert rows * 127**2 > 2**31 > matrix.DEEPEST * 127**2
    one = torch.ones(rows, 1)

    found = passes("int8", LINEAR, product=product).weight_grad(one, one, (1, 1))

    assert float(found) == pytest.approx(rows, rel=3e-7)


def test_gradients_round_to_either_side_as_near_as_they_are_and_by_the_seed_alone() -> None:
    chosen = passes("int8", LINEAR)
    grad = torch.tensor([[127.0, -127.0], [0.25, 0.25], [-0.25, 0.75], [3.0, -3.0]])

    drawn = [chosen.prepared_grad(grad, seed).values for seed in range(400)]

    mean = torch.stack(drawn).double().mean(0)
    assert float((mean - grad.double()).abs().max()) < 0.1  # 4.6 standard errors of 400 draws
    assert torch.equal(mean[0], grad[0].double())
    assert torch.equal(mean[3], grad[3].double())
    assert not all(torch.equal(each, drawn[0]) for each in drawn)
    assert torch.equal(chosen.prepared_grad(grad, 7).values, drawn[7])


@pytest.mark.parametrize("case", [PLAIN, LINEAR], ids=str)
def test_the_gradient_of_a_quiet_channel_is_not_lost_beside_a_loud_one(case: Case) -> None:
    """An image whose gradient is in a channel that is a thousandth of the loudest. With a scale for
    each channel the weights between it and the input would round to 0, draw after draw."""
    chosen, made = passes("int8", case), layer(case)
    grad = torch.zeros_like(made.grad)
    grad[0, 0], grad[1, 1] = 1.0, 1e-3
    exact = passes("fp32", case).input_grad(grad, made.weight, made.x.shape)[1]

    drawn = [
        chosen.input_grad(grad, made.weight, made.x.shape, seed)[1].double() for seed in range(400)
    ]

    mean = torch.stack(drawn).mean(0)
    along = float((mean * exact).sum() / (exact.double() ** 2).sum())
    assert along == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("seed", [None, 0, 2**40 + 3])
def test_what_is_quantised_here_has_the_bits_of_the_wire(seed: Any) -> None:
    made, chosen = layer(PLAIN), passes("int8", PLAIN)
    values, scale = packed(made.x, seed)

    found = chosen.prepared_input(made.x) if seed is None else chosen.prepared_grad(made.x, seed)

    assert torch.equal(found.values, values)
    assert torch.equal(found.scale, scale)


@pytest.mark.parametrize("precision", HERE)
def test_what_came_quantised_is_taken_for_what_it_stands_for(precision: str) -> None:
    made, chosen = layer(PLAIN), passes(precision, PLAIN)
    image, above = Quantised(*pack_int8_ref(made.x)), Quantised(*pack_int8_ref(made.grad, 5))
    stands_for = dataclasses.replace(
        made,
        x=unpack_int8_ref(*pack_int8_ref(made.x)),
        grad=unpack_int8_ref(above.values, above.scale),
    )

    found = {
        "forward": chosen.forward(image, made.weight, made.bias),
        "input_grad": chosen.input_grad(above, made.weight, made.x.shape),
        "weight_grad": chosen.weight_grad(above, image, made.weight.shape),
    }

    exact = by_autograd(PLAIN.problem, stands_for.x, made.weight, made.bias, stands_for.grad)
    for each, wanted in zip(found.values(), exact):
        assert distance(each, wanted) < LIMITS[precision]
    if precision == "int8":  # nothing is rounded in a weight gradient but its result
        assert distance(found["weight_grad"], exact[2]) < 1e-6


@pytest.mark.parametrize("precision", HERE)
@pytest.mark.parametrize("case", [PLAIN, LINEAR], ids=str)
def test_the_order_of_memory_does_not_matter(precision: str, case: Case) -> None:
    made, chosen = layer(case), passes(precision, case)
    wanted = products(chosen, made, seed=9)
    for how, weight in differently_laid(made.weight).items():
        x, grad = (differently_laid(each)[how] for each in (made.x, made.grad))

        found = products(chosen, dataclasses.replace(made, x=x, weight=weight, grad=grad), seed=9)

        for name, each in found.items():
            if precision == "int8":
                assert torch.equal(each, wanted[name]), how
            assert distance(each, getattr(made, name)) < LIMITS[precision], how


@pytest.mark.parametrize("precision", HERE)
@pytest.mark.parametrize("case", [PLAIN, LINEAR], ids=str)
def test_an_empty_batch_gives_empty_results_and_no_weight_gradient(
    precision: str, case: Case
) -> None:
    chosen, weight = passes(precision, case), torch.ones(case.weight)
    x = torch.empty(0, *case.image[1:])

    result = chosen.forward(x, weight, torch.ones(case.weight[0]))
    by_input = chosen.input_grad(result, weight, x.shape)
    by_weight = chosen.weight_grad(result, x, weight.shape)

    assert result.shape == case.problem.output_shape(x.shape, weight.shape)
    assert (by_input.shape, by_weight.shape) == (x.shape, weight.shape)
    assert not by_weight.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", HERE)
def test_what_is_not_finite_never_comes_out_finite(precision: str, bad: float) -> None:
    made, chosen = layer(PLAIN), passes(precision, PLAIN)
    made.x[0, 3, 2, 2] = made.grad[1, 2, 4, 4] = bad

    found = products(chosen, made)
    exact = by_autograd(PLAIN.problem, made.x, made.weight, made.bias, made.grad)

    for (name, each), wanted in zip(found.items(), exact):
        lost = ~torch.isfinite(wanted)
        assert lost.any()
        assert not torch.isfinite(each[lost]).any(), name


@pytest.mark.parametrize("precision", HERE)
def test_results_have_the_dtype_of_the_precision_or_the_one_asked_for(precision: str) -> None:
    made = layer(PLAIN)
    own = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    for asked in (None, torch.float32, torch.bfloat16):
        chosen = passes(precision, PLAIN, result_dtype=asked)

        found = products(chosen, made)

        assert found["forward"].dtype == found["input_grad"].dtype == (asked or own)
        assert found["weight_grad"].dtype == torch.float32
        assert chosen.result_dtype == (asked or own)


@pytest.mark.skipif(not torch_compat.autocast_dtypes(CPU), reason="no autocast on this CPU")
def test_somebodys_autocast_does_not_reach_them() -> None:
    made, chosen = layer(PLAIN), passes("fp32", PLAIN)
    wanted = products(chosen, made)

    with torch_compat.autocast(CPU, torch.bfloat16):
        found = products(chosen, made)

    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.skipif(
    not hasattr(torch, "set_float32_matmul_precision"), reason="no word for float32 products"
)
def test_fp32_is_strict_under_flags_that_allow_less_and_leaves_them_as_they_were() -> None:
    made, chosen = layer(LINEAR), passes("fp32", LINEAR)
    torch.set_float32_matmul_precision("medium")
    try:
        found = errors(chosen, made)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")

    assert max(found.values()) < LIMITS["fp32"]
    assert after == "medium"
    assert tf32_flags.cpu_float32_is_strict()


def test_what_the_cpu_lacks_is_refused_with_what_it_has() -> None:
    for precision in ("tf32", "fp8"):
        with pytest.raises(NotApplicableError, match="GPUs") as refused:
            passes_for(precision, CPU, PLAIN.problem)
        assert "fp32" in refused.value.next_step
        assert precision not in refused.value.next_step


def test_unknown_names_and_impossible_problems_are_told() -> None:
    with pytest.raises(UnknownNameError, match="precision 'fp23'"):
        passes_for("fp23", CPU, PLAIN.problem)
    with pytest.raises(UnknownNameError, match="product"):
        passes("int8", PLAIN, product="by hand")
    with pytest.raises(UnknownNameError, match="kind of layer"):
        Problem("conv3d")
    with pytest.raises(UsageError, match="linear layer"):
        Problem("linear", (2, 2))
    with pytest.raises(UsageError, match="does not fit"):
        passes("fp32", PLAIN).problem.output_shape((1, 3, 2, 2), (4, 3, 7, 7))


def test_int8_refuses_groups_that_have_next_to_nothing_to_multiply() -> None:
    chosen, made = passes("int8", DEPTHWISE), layer(DEPTHWISE)
    calls: List[Any] = [
        lambda: chosen.require(made.weight.shape),
        lambda: chosen.forward(made.x, made.weight),
        lambda: chosen.input_grad(made.grad, made.weight, made.x.shape),
        lambda: chosen.weight_grad(made.grad, made.x, made.weight.shape),
    ]
    for call in calls:
        with pytest.raises(NotApplicableError, match="depthwise") as refused:
            call()
        assert "1 channels" in refused.value.why
        assert "fp32" in refused.value.next_step
    passes("fp32", DEPTHWISE).require(made.weight.shape)


def test_a_card_that_is_too_old_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 2))
    for precision, least in (("tf32", "8.0"), ("bf16", "8.0"), ("int8", "7.5"), ("fp8", "8.9")):
        reason = missing(precision, torch.device("cuda", 0))
        assert "7.2" in reason
        assert least in reason


def test_an_old_torch_multiplies_int8_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    choice._int_mm_works.cache_clear()
    monkeypatch.delattr(torch, "_int_mm", raising=False)
    try:
        assert passes("int8", PLAIN).product == "float64"
        assert passes("fp32", PLAIN).product == "torch"
    finally:
        choice._int_mm_works.cache_clear()


@pytest.mark.parametrize("precision", HERE)
def test_whoever_watches_sees_the_dtypes_of_all_three(precision: str) -> None:
    made, chosen = layer(PLAIN), passes(precision, PLAIN)

    seen = probe.observe(lambda: products(chosen, made))

    assert sum(each.calls for each in seen) >= 3
    wanted = "fp64" if chosen.product == "float64" else precision
    assert probe.precision_ran(seen, {}) == wanted, seen


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_every_product_of_a_window_is_in_one_phase_of_each_pass(
    stride: int, padding: int, dilation: int
) -> None:
    """As triples (input's pixel, output's pixel, tap) along one dimension."""
    for image in range(1, 12):
        for window in (1, 2, 3, 4):
            reached = image + 2 * padding - dilation * (window - 1)
            if reached < 1:
                continue
            result = (reached - 1) // stride + 1
            problem = Problem("conv2d", (stride, 1), (padding, 0), (dilation, 1))
            wanted = {
                (o * stride - padding + r * dilation, o, r)
                for o in range(result)
                for r in range(window)
                if 0 <= o * stride - padding + r * dilation < image
            }
            rows = forward_phase(problem, (window, 1), (result, 1)).rows
            forward = [(h, o, r) for o, h, r in _met(rows, image)]
            backward = [
                (stride * t + phase.start[0], o, r)
                for phase in input_grad_phases(problem, (window, 1), (image, 1))
                for t, o, r in _met(phase.rows, result)
            ]
            assert sorted(forward) == sorted(wanted)
            assert sorted(backward) == sorted(wanted)


def _met(axis: Any, operand: int) -> List[Any]:
    """(result's pixel, operand's pixel, tap) of all that is inside."""
    places = [
        (t, axis.stride * t + axis.base + axis.reach * i, axis.first + axis.step * i)
        for t in range(axis.size)
        for i in range(axis.count)
    ]
    inside = [each for each in places if 0 <= each[1] < operand]
    assert axis.inside(operand) == (len(inside) == len(places))
    return inside
