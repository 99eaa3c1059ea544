"""The Triton kernels of the 8-bit passes on the CPU by Triton's interpreter, for int8.

A program of its own: TRITON_INTERPRET=1 has to be there before triton is imported. Says how many
layers were right. Not for fp8, to which the interpreter does not round as devices do.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import triton_interpreter  # noqa: F401 - it mends what it imports
from passes_cases import CASES, Case, differently_laid, exact_int8, layer, packed, products

from narrowgauge_lab.layers.passes import Quantised, passes_for
from narrowgauge_lab.layers.passes.matrix import DEEPEST
from narrowgauge_lab.layers.passes.seeds import SeedAt, seed_under

CPU = torch.device("cpu")
#: The interpreter takes seconds for each; the others are like one of these.
WALKED = [each for each in CASES if str(each) in (
    "stride 2, odd", "stride 3 and 2, not square", "dilation 2 and 3, stride 2", "groups",
    "1x1, stride 2", "1x1, stride 2, padding", "rows longer than 16", "linear, batch 1",
)]  # fmt: skip
POINTWISE = next(each for each in CASES if str(each) == "1x1")


def check_case(case: Case) -> None:
    """Exact, and the bits of the products by float64."""
    made = layer(case)
    chosen = passes_for("int8", CPU, case.problem, product="triton")
    reference = passes_for("int8", CPU, case.problem, product="float64")
    found, wanted = products(chosen, made, seed=3), products(reference, made, seed=3)
    exact = exact_int8(reference, made, seed=3)
    for name, each in found.items():
        assert torch.equal(each, wanted[name]), (case, name)
        assert float((each.double() - exact[name]).norm() / exact[name].norm()) < 1e-6, name


def check_quantised() -> None:
    """The bits of the wire, with and without a seed, in several orders of memory."""
    made = layer(CASES[0])
    made.x[0, 1, 2, 2], made.x[1, 3, 0, 0] = float("nan"), float("inf")
    made.x[:, 2] = 0
    made.x[:, 4] *= 1e-42
    seeds = {"contiguous": (None, 0, 2**40 + 3)}
    chosen = passes_for("int8", CPU, CASES[0].problem, product="triton")
    for how, x in {"contiguous": made.x, **differently_laid(made.x)}.items():
        for seed in seeds.get(how, (7,)):
            values, scale = packed(x, seed)
            found = chosen.prepared_input(x) if seed is None else chosen.prepared_grad(x, seed)
            assert torch.equal(found.values, values), (how, seed)
            assert torch.equal(torch.nan_to_num(found.scale, -1), torch.nan_to_num(scale, -1)), how
    for base, place in ((0, 0), (5, 3), (2**62 - 1, 400), (-(2**40), 1)):
        at = SeedAt(torch.tensor([base]), place)
        values, _ = packed(made.x, seed_under(base, place))
        assert torch.equal(chosen.prepared_grad(made.x, at).values, values), (base, place)


def check_layouts() -> None:
    """Operands that came quantised, in several orders of memory, and weights."""
    made = layer(POINTWISE)
    chosen = passes_for("int8", CPU, POINTWISE.problem, product="triton")
    wanted = products(chosen, made)
    image, above = chosen.prepared_input(made.x), chosen.prepared_grad(made.grad)
    for how, weight in differently_laid(made.weight).items():
        other, under = (
            dataclasses.replace(each, values=differently_laid(each.values)[how])
            for each in (image, above)
        )
        assert torch.equal(chosen.forward(other, weight, made.bias), wanted["forward"]), how
        by_input = chosen.input_grad(under, weight, made.x.shape)
        assert torch.equal(by_input, wanted["input_grad"]), how
        by_weight = chosen.weight_grad(under, other, weight.shape)
        assert torch.equal(by_weight, wanted["weight_grad"]), how


def check_not_finite() -> None:
    made = layer(CASES[0])
    made.x[0, 3, 2, 2] = made.grad[1, 2, 4, 4] = float("nan")
    found = products(passes_for("int8", CPU, CASES[0].problem, product="triton"), made)
    assert torch.isnan(found["forward"]).all()
    assert torch.isnan(found["input_grad"]).all()
    assert torch.isnan(found["weight_grad"][2]).all()
    assert torch.isnan(found["weight_grad"][:, 3]).all()


def check_long_sum() -> None:
    """140,000 · 127² > 2^31: parts of it are summed in int32, and those in int64."""
    rows = 140_000
    assert rows > DEEPEST
    most = Quantised(torch.full((rows, 1), 127, dtype=torch.int8), torch.ones(1))
    linear = passes_for("int8", CPU, CASES[-1].problem, product="triton")
    found = linear.weight_grad(most, most, (1, 1))
    assert abs(float(found) / (rows * 127**2) - 1) < 1e-7


def main() -> None:
    check_quantised()
    check_layouts()
    check_not_finite()
    check_long_sum()
    for case in WALKED:
        check_case(case)
    print(f"{len(WALKED)} layers")


if __name__ == "__main__":
    sys.exit(main())
