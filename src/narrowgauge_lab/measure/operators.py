"""The operators that are convolutions and matrix products: their operands, and what they cost.

One multiply-accumulate (MAC) is one product that is summed; a FLOP count is twice that. Biases,
normalisation, activations and pooling cost nothing in this convention.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

__all__ = ["PACKED", "RULES", "Invocation", "Operand", "Rule", "Use", "use_of"]

Shape = Tuple[int, ...]
#: MACs, and the least that the fast algorithms of libraries need; None where there is no formula.
Count = Tuple[Optional[int], Optional[int]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor as an operator got or gave it. `dtype` is torch's name without `torch.`."""

    dtype: str
    shape: Shape
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Any) -> Operand:
        """What `tensor` is; this module itself needs no torch."""
        dtype = str(tensor.dtype).replace("torch.", "")
        return cls(dtype, tuple(map(int, tensor.shape)), tensor.device.type)


#: Stands for packed quantised weights where nobody can look inside.
PACKED = Operand("packed", ())


@dataclasses.dataclass(frozen=True)
class Invocation:
    """One call of an operator (`aten::mm`): tensors are Operands, lists are tuples."""

    name: str
    arguments: Tuple[Any, ...]
    results: Tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """A convolution or matrix product that ran. `macs` is None where no formula is known."""

    operator: str
    inputs: Operand
    weight: Operand
    output: Operand
    macs: Optional[int] = None
    least_macs: Optional[int] = None

    @property
    def quantized(self) -> bool:
        """Whether a converted module ran it, whose cost is counted on the float graph."""
        return self.operator.startswith(("quantized::", "onednn::"))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to read an operator's arguments.

    A `composite` only calls other operators of this table; where those can be seen, it is not.
    `multiplies` tells whether a product is in this call; None: in every one.
    """

    inputs: int = 0
    weight: int = 1
    count: Optional[Callable[[Invocation], Count]] = None
    composite: bool = False
    packed_dtype: str = ""
    multiplies: Optional[Callable[[Invocation], bool]] = None


def use_of(made: Invocation) -> Optional[Use]:
    """What `made` is in this table; None for an operator that is not in it."""
    rule = RULES.get(made.name)
    if rule is None or (rule.multiplies is not None and not rule.multiplies(made)):
        return None
    inputs, weight = (_first_tensor(made.arguments[at]) for at in (rule.inputs, rule.weight))
    output = _first_tensor(made.results)
    if weight is PACKED:
        weight = Operand(rule.packed_dtype, ())
    if inputs is None or weight is None or output is None:
        return None
    if rule.composite:
        # Its casts lie between its own arguments and its products; its result has their dtype.
        inputs = dataclasses.replace(inputs, dtype=output.dtype)
        weight = dataclasses.replace(weight, dtype=output.dtype)
    macs, least = rule.count(made) if rule.count is not None else (None, None)
    return Use(made.name, inputs, weight, output, macs, least)


def _first_tensor(value: Any) -> Optional[Operand]:
    if isinstance(value, (tuple, list)):
        found = (_first_tensor(each) for each in value)
        return next((each for each in found if each is not None), None)
    return value if isinstance(value, Operand) else None


def _product(made: Invocation, at: int = 0) -> Count:
    """[…, K] times anything: K MACs per element of the result."""
    macs = math.prod(_shape(made.results)) * _shape(made.arguments[at])[-1]
    return macs, macs


def _added_product(made: Invocation) -> Count:
    return _product(made, at=1)


def _summed_products(made: Invocation) -> Count:
    """addbmm: all [B, M, K] · [B, K, N] are summed into one [M, N]."""
    macs = math.prod(_shape(made.arguments[1])) * _shape(made.arguments[2])[-1]
    return macs, macs


def _contraction(made: Invocation) -> Count:
    """tensordot: elements of both sides and of the result determine what was summed over."""
    sides = math.prod(_shape(made.arguments[0])) * math.prod(_shape(made.arguments[1]))
    macs = math.isqrt(sides * math.prod(_shape(made.results)))
    return macs, macs


def _einsum(made: Invocation) -> Count:
    """Two operands: one MAC per combination of all letters. One operand multiplies nothing."""
    terms = made.arguments[0].replace(" ", "").partition("->")[0].split(",")
    shapes = [_shape(each) for each in made.arguments[1]]
    if len(terms) == 1:
        return 0, 0
    if len(terms) > 2 or "." in made.arguments[0]:
        return None, None
    sizes: Dict[str, int] = {}
    for term, shape in zip(terms, shapes):
        for letter, size in zip(term, shape):
            sizes[letter] = max(size, sizes.get(letter, 1))
    macs = math.prod(sizes.values())
    return macs, macs


def _distances(made: Invocation) -> Count:
    """|x|² - 2 x·y + |y|² as one product: both norms are two more columns of the K of x."""
    macs = math.prod(_shape(made.results)) * (_shape(made.arguments[0])[-1] + 2)
    return macs, macs


def _by_product(made: Invocation) -> bool:
    """cdist (x, y, p, mode): Euclid's distances, where asked for (1) or of more than 25 points."""
    mode = made.arguments[3] or 0
    points = max(_shape(side)[-2] for side in made.arguments[:2])
    return bool(made.arguments[2] == 2 and (mode == 1 or (mode == 0 and points > 25)))


def _attention(made: Invocation) -> Count:
    """softmax(q kᵀ) v with q [B, H, L, E], k [B, H, S, E], v [B, H, S, F]."""
    query, key, value = (_shape(made.arguments[at]) for at in range(3))
    macs = math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return macs, macs


def _convolution(stride: int, transposed: Optional[int]) -> Callable[[Invocation], Count]:
    """Weights are [out, in / groups, …], or [in, out / groups, …] where the flag says transposed.

    `stride` and `transposed` are the positions of those arguments; None: never transposed.
    """

    def count(made: Invocation) -> Count:
        swapped = transposed is not None and bool(made.arguments[transposed])
        image, weight = _shape(made.arguments[0]), _shape(made.arguments[1])
        per_position = math.prod(weight[1:])
        positions = math.prod(image if swapped else _shape(made.results))
        macs = positions * per_position
        # A dispatcher leaves out arguments that stand at their defaults.
        steps = made.arguments[stride] if len(made.arguments) > stride else (1,)
        return macs, _least(macs, weight[2:], steps)

    return count


def _always_transposed(made: Invocation) -> Count:
    """cudnn_convolution_transpose (…, padding, output_padding, stride, …)."""
    weight = _shape(made.arguments[1])
    macs = math.prod(_shape(made.arguments[0])) * math.prod(weight[1:])
    return macs, _least(macs, weight[2:], made.arguments[4])


def _convolution_backward(made: Invocation) -> Count:
    """The gradient of the input and that of the weight each cost as much as the forward pass."""
    gradient, image, weight = (_shape(made.arguments[at]) for at in range(3))
    positions = math.prod(image if made.arguments[7] else gradient)
    products = sum(map(bool, made.arguments[10][:2]))
    macs = products * positions * math.prod(weight[1:])
    return macs, _least(macs, weight[2:], made.arguments[4])


def _time_convolution(made: Invocation) -> Count:
    """conv_tbc: weight [k, in, out], result [T, B, out]; its stride is always 1."""
    weight = _shape(made.arguments[1])
    macs = math.prod(_shape(made.results)) * weight[0] * weight[1]
    return macs, _least(macs, weight[:1], (1,))


def _least(macs: int, kernel: Sequence[int], stride: Sequence[int]) -> int:
    """With Winograd's F(6, k) along every dimension of stride 1: (k + 5) products instead of 6 k.

    F(6×6, 3×3) needs 64 for 324: the largest tiles that cuDNN, oneDNN and NNPACK have, larger ones
    lose too many bits. Large kernels need fewer by Fourier's algorithm: a complex product, 4 real
    ones, for half of the frequencies, so 2 for each result whatever the kernel. Partial tiles and
    the transforms are left out, so it is less than any implementation of them needs.
    """
    steps = [stride[index] if len(stride) > 1 else stride[0] for index in range(len(kernel))]
    share = Fraction(1)
    for size, step in zip(kernel, steps):
        if step == 1:
            share *= Fraction(size + 5, 6 * size)
    if all(step == 1 for step in steps):
        share = min(share, Fraction(2, math.prod(kernel)))
    return math.ceil(macs * share)


def _shape(value: Any) -> Shape:
    found = _first_tensor(value)
    if found is None:
        raise ValueError("an operator of the table lacks a tensor where it should have one")
    return found.shape


def _aten() -> Dict[str, Rule]:
    product, added = Rule(count=_product), Rule(1, 2, _added_product)
    rules = dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_weight_int8pack_mm",
         "_weight_int4pack_mm", "mkldnn_linear"), product)  # fmt: skip
    rules.update(dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), added))
    rules["addbmm"] = Rule(1, 2, _summed_products)
    for name in ("convolution", "_convolution", "convolution_overrideable"):
        rules[name] = Rule(count=_convolution(stride=3, transposed=6))
    for name in ("cudnn_convolution_relu", "thnn_conv2d", "slow_conv3d", "_slow_conv2d_forward"):
        at = 3 if name == "cudnn_convolution_relu" else 4
        rules[name] = Rule(count=_convolution(stride=at, transposed=None))
    rules["cudnn_convolution"] = Rule(count=_convolution(stride=3, transposed=None))
    rules["cudnn_convolution_add_relu"] = Rule(count=_convolution(stride=5, transposed=None))
    rules["cudnn_convolution_transpose"] = Rule(count=_always_transposed)
    rules["mkldnn_convolution"] = Rule(count=_convolution(stride=4, transposed=None))
    rules["convolution_backward"] = Rule(0, 2, _convolution_backward)
    rules["conv_tbc"] = Rule(count=_time_convolution)
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention",
                 "cudnn_attention", "fused_attention_overrideable"):  # fmt: skip
        rules[f"_scaled_dot_product_{name}"] = Rule(count=_attention)
        rules[f"_scaled_dot_product_{name}_backward"] = Rule(1, 2)
    for name in ("_grouped_mm", "_scaled_grouped_mm", "_cslt_sparse_mm",
                 "_sparse_semi_structured_mm", "_sparse_semi_structured_linear"):  # fmt: skip
        rules[name] = Rule()
    rules["_cudnn_rnn"] = Rule()
    rules["mkldnn_rnn_layer"] = Rule()
    rules["_transformer_encoder_layer_fwd"] = Rule(0, 3)
    rules["_native_multi_head_attention"] = Rule(0, 5)
    for name in ("matmul", "linear"):
        rules[name] = Rule(count=_product, composite=True)
    rules["tensordot"] = Rule(count=_contraction, composite=True)
    rules["einsum"] = Rule(1, 1, _einsum, composite=True)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        rules[name] = Rule(0, 2, composite=True)
    for name in ("chain_matmul", "linalg_multi_dot"):
        rules[name] = Rule(0, 0, composite=True)
    rules["_euclidean_dist"] = Rule(count=_distances)
    rules["cdist"] = Rule(count=_distances, composite=True, multiplies=_by_product)
    rules["bilinear"] = Rule(0, 2, composite=True)
    rules["_trilinear"] = Rule(0, 1)
    return {f"aten::{name}": rule for name, rule in rules.items()}


def _quantized() -> Dict[str, Rule]:
    """Converted modules. The packed weights of these operators are int8 by their definition."""
    packed = Rule(packed_dtype="qint8")
    names = [
        f"conv{rank}d{tail}" for rank in (1, 2, 3) for tail in ("", "_relu", "_add", "_add_relu")
    ]
    names += [f"conv_transpose{rank}d" for rank in (1, 2, 3)]
    names += [f"conv{rank}d_dynamic" for rank in (1, 2, 3)]
    names += ["linear", "linear_relu", "linear_dynamic", "linear_relu_dynamic", "linear_leaky_relu",
              "linear_tanh", "matmul"]  # fmt: skip
    rules = {f"quantized::{name}": packed for name in names}
    for name in ("linear_dynamic_fp16", "linear_relu_dynamic_fp16"):
        rules[f"quantized::{name}"] = Rule(packed_dtype="float16")
    for name, weight in (
        ("qconv_pointwise", 3),
        ("qconv2d_pointwise", 3),
        ("qlinear_pointwise", 3),
    ):
        rules[f"onednn::{name}"] = Rule(weight=weight)
    return rules


def _own() -> Dict[str, Rule]:
    """The compiled operators of narrowgauge_kernels.

    The products of manual ones are formed one by one, whatever they are: nothing like Winograd's
    algorithm saves any. One by masked exact products is one MAC, however many masks it takes.
    """
    return {
        "narrowgauge::manual_conv2d": Rule(count=_formed_products),
        "narrowgauge::manual_linear": Rule(count=_product),
        "narrowgauge::conv2d_codes": Rule(count=_formed_products),
        "narrowgauge::linear_codes": Rule(count=_product),
        "narrowgauge::linear": Rule(count=_product),
        "narrowgauge::linear_grad_input": Rule(count=_product),
        # [N, …] of the outputs and [K, …] of the inputs: every row is one MAC per weight.
        "narrowgauge::linear_grad_weight": Rule(count=_weight_gradient),
    }


def _formed_products(made: Invocation) -> Count:
    macs = math.prod(_shape(made.results)) * math.prod(_shape(made.arguments[1])[1:])
    return macs, macs


def _weight_gradient(made: Invocation) -> Count:
    macs = math.prod(_shape(made.arguments[0])) * _shape(made.arguments[1])[-1]
    return macs, macs


#: By the operator's name, overloads aside.
RULES: Dict[str, Rule] = {**_aten(), **_quantized(), **_own()}
