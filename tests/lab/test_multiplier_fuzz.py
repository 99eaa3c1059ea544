"""Any table, from a file to the sums of a layer: import, analysis, every kernel of every path that
it has, and reference give the same integers."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_kernels.codes import CodeMac, conv2d_codes_ref
from narrowgauge_lab.layers.manual import dispatch, kernels
from narrowgauge_lab.layers.manual.codes import CodeLayer
from narrowgauge_lab.layers.manual.factors import factored_sums
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.quantise import Scales
from narrowgauge_lab.layers.manual.settings import PATHS, settings_of
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.multipliers import find_table, named
from narrowgauge_lab.multipliers.table import codes
from narrowgauge_lab.quant.parameters import QuantParams

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CPU = torch.device("cpu")
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
_FEW = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=_QUIET, database=None
)
_MANY = settings(max_examples=400, deadline=None, suppress_health_check=_QUIET, database=None)
#: Kinds of files: what a table is written as, and read from again.
_FILES = ("npy", "npy of int64", "npy, big-endian and by columns")
_PROGRAMS = ("c", "py")


@dataclasses.dataclass(frozen=True)
class Made:
    """A table's values by what made them, int64 [256, 256]."""

    how: str
    values: np.ndarray

    def __repr__(self) -> str:
        return f"{self.how}, products from {self.values.min()} to {self.values.max()}"


def _masked(side: np.ndarray, mask: int, shift: int, signed: bool) -> np.ndarray:
    """Of codes, by bytes: not by the arithmetic that is tested."""
    bits = side.astype(np.uint8) & np.uint8(mask)
    return (bits.view(np.int8) if signed else bits).astype(np.int64) >> shift


@st.composite
def _tables(draw: Any, signed: bool) -> Made:
    """With few terms, with many, with none, and with one pair that spoils it."""
    kind = draw(st.sampled_from(["random", "masks", "lists", "family", "flat", "sparse"]))
    random = np.random.RandomState(draw(st.integers(0, 2**31)))
    side = codes(signed)
    values = np.zeros((256, 256), np.int64)
    if kind == "random":
        most = draw(st.sampled_from([1, 127, 32_767, 32_768, 70_000, 2**24]))
        values = random.randint(-most, most + 1, (256, 256)).astype(np.int64)
    elif kind == "masks":
        for _ in range(draw(st.integers(1, 5))):
            masks, shifts = (
                draw(st.tuples(*[st.integers(0, 255)] * 2)),
                draw(st.tuples(*[st.integers(0, 3)] * 2)),
            )
            left, right = (_masked(side, *each, signed) for each in zip(masks, shifts))
            values += draw(st.sampled_from([1, 1, -1, 3])) * np.multiply.outer(left, right)
    elif kind == "lists":
        for _ in range(draw(st.integers(1, 3))):
            left, right = (random.randint(-9, 10, 256) for _ in range(2))
            values += np.multiply.outer(left, right).astype(np.int64)
    elif kind == "family":
        name = draw(
            st.one_of(
                st.builds("truncated-{}".format, st.integers(0, 15)),
                st.builds("bam-{}-{}".format, st.integers(0, 8), st.integers(0, 15)),
                st.builds("drum-{}".format, st.integers(3, 8)),
                st.sampled_from(["ama5", "mitchell", "exact"]),
            )
        )
        kind = name
        values = named(name + ("-signed" if signed else "")).values.astype(np.int64)
    elif kind == "flat":
        values[:] = draw(st.sampled_from([0, 1, -1, 255, 70_000]))
    else:
        for _ in range(draw(st.integers(1, 4))):
            values[random.randint(256), random.randint(256)] = draw(st.integers(-(2**24), 2**24))
    if draw(st.integers(0, 3)) == 0:
        row, column = draw(st.integers(0, 255)), draw(st.integers(0, 255))
        values = values.copy()
        values[row, column] += draw(st.sampled_from([1, -1, 1000]))
        kind += ", one pair off"
    return Made(kind, values)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a convolution: x [N, C, H, W] and weight [O, C / groups, R, S]."""

    x: Tuple[int, ...]
    weight: Tuple[int, ...]
    problem: Problem


@st.composite
def _sizes(draw: Any) -> Sizes:
    groups, deep = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    window = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    image = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    for i in (0, 1):
        assume(image[i] + 2 * padding[i] > dilation[i] * (window[i] - 1))
    outputs = groups * draw(st.integers(1, 9))
    return Sizes(
        (draw(st.integers(1, 2)), groups * deep, *image), (outputs, deep, *window),
        Problem("conv2d", stride, padding, dilation, groups),
    )  # fmt: skip


def _written(made: Made, how: str, signed: bool, folder: Path) -> str:
    """A file of the table, of a name that no other has: what is read of a name is kept."""
    digest = hashlib.sha256(made.values.tobytes() + f"{how}{signed}".encode()).hexdigest()[:16]
    stem = folder / f"t{digest}"
    array = stem.with_suffix(".npy")
    offset = 128 if signed else 0
    if how == "npy":
        np.save(str(array), made.values.astype(np.int32))
    elif how == "npy of int64":
        np.save(str(array), made.values)
    elif how.startswith("npy"):
        np.save(str(array), np.asfortranarray(made.values.astype(">i4")))
    elif how == "py":
        np.save(str(array), made.values)
        text = (
            f"import numpy\nTABLE = numpy.load({str(array)!r}).tolist()\n"
            f"def f(a, b):\n    return TABLE[a + {offset}][b + {offset}]\n"
        )
        stem.with_suffix(".py").write_text(text, encoding="utf-8")
        return f"{stem}.py:f"
    else:
        kind = "int8_t" if signed else "uint8_t"
        numbers = ",".join(map(str, made.values.ravel()))
        text = (
            f"#include <stdint.h>\nstatic const int32_t table[65536] = {{{numbers}}};\n"
            f"int32_t f({kind} a, {kind} b)\n"
            f"{{ return table[(a + {offset}) * 256 + b + {offset}]; }}\n"
        )
        stem.with_suffix(".c").write_text(text, encoding="utf-8")
        return f"{stem}.c:f"
    return str(array)


def _whole(signed: bool, zero: int) -> QuantParams:
    """A scale of 1: values are codes."""
    return QuantParams(
        torch.tensor(1.0), torch.tensor(zero, dtype=torch.int32), 8, None, signed, False
    )


def _layers(source: str, sizes: Sizes, zero: int, signed: bool) -> List[Tuple[str, CodeLayer]]:
    """By every path that the table has; the one that is taken by itself comes first."""
    depth = int(np.prod(sizes.weight[1:]))
    found = []
    for path in ("auto", *PATHS):
        try:
            layer = dispatch.layer_for(
                settings_of(source, path=path), sizes.problem, CPU, depth,
                Scales(_whole(signed, zero), _whole(signed, 0)),
            )  # fmt: skip
        except NotApplicableError:
            continue
        assert isinstance(layer, CodeLayer)
        found.append((path, layer))
    return found


def _check(made: Made, sizes: Sizes, how: str, signed: bool, data: Any, folder: Path) -> None:
    file = _written(made, how, signed, folder)
    depth = int(np.prod(sizes.weight[1:]))
    assume(depth * int(np.abs(made.values).max()) < 2**31)
    table = find_table(file, signed)
    assert (table.values == made.values).all()

    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    low, dtype = (-128, torch.int8) if signed else (0, torch.uint8)
    x, weight = (
        torch.randint(low, low + 256, shape, generator=generator, dtype=dtype)
        for shape in (sizes.x, sizes.weight)
    )
    zero = 0 if signed else data.draw(st.integers(0, 255))
    problem = sizes.problem
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    by_table = CodeMac("lut8x8", torch.from_numpy(made.values.astype(np.int32)), signed, signed)
    expected = conv2d_codes_ref(x, weight, by_table, *geometry, x_zero=zero)

    source = f"lut8x8:{file},{'signed' if signed else 'unsigned'}"
    layers = _layers(source, sizes, zero, signed)
    structure = multiplier_of(settings_of(source).policy).structure
    assert {path for path, _ in layers} >= {"auto", "table"}
    assert (len(layers) == 3) == structure.proved
    for path, layer in layers:
        assert torch.equal(_sums(layer, x, weight, zero).long(), expected), path
        for isa in (
            []
            if layer.factors
            else torch.ops.narrowgauge.codes_instruction_sets(layer.mac.name == "lut8x8")
        ):
            got = torch.ops.narrowgauge.conv2d_codes(
                x, weight, *layer.mac.arguments(CPU), *map(list, geometry[:3]), geometry[3], zero,
                isa=isa,
            )  # fmt: skip
            assert torch.equal(got.long(), expected), (path, isa)
    _check_layer(layers, x, weight, zero, expected)


def _sums(layer: CodeLayer, x: torch.Tensor, weight: torch.Tensor, zero: int) -> torch.Tensor:
    if layer.factors:
        return factored_sums(layer.problem, x, weight, layer.factors, zero)
    return kernels.code_sums(layer.problem, x, weight, layer.mac, zero)


def _check_layer(
    layers: List[Tuple[str, CodeLayer]], x: torch.Tensor, weight: torch.Tensor, zero: int,
    expected: torch.Tensor,
) -> None:  # fmt: skip
    """The layer's own result on floats: with scales of 1, the sums less the zero points' part."""
    of_weights = weight.long().flatten(1).sum(1).reshape(1, -1, 1, 1)
    wanted = (expected - zero * of_weights).float()
    for path, layer in layers:
        result, _ = layer.forward(x.float() - zero, weight.float(), None, (False, False))
        assert torch.equal(result, wanted), path


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@_FEW
@given(data=st.data())
def test_a_table_comes_through_to_the_bit(signed: bool, data: Any, tmp_path: Path) -> None:
    made, sizes = data.draw(_tables(signed)), data.draw(_sizes())
    _check(made, sizes, data.draw(st.sampled_from(_FILES)), signed, data, tmp_path)


@pytest.mark.parametrize("how", _PROGRAMS)
def test_so_does_a_program_of_one(how: str, tmp_path: Path) -> None:
    """One of each kind; more of them in the slow tier."""

    @settings(_FEW, max_examples=1)
    @given(data=st.data())
    def once(data: Any) -> None:
        _check(Made("masks", _broken()), _SMALL, how, True, data, tmp_path)

    once()


#: A shape of every kind at once: strides, padding, dilation, groups.
_SMALL = Sizes((2, 6, 7, 8), (4, 3, 3, 2), Problem("conv2d", (2, 1), (1, 2), (1, 2), 2))


def _broken() -> np.ndarray:
    """A truncated array with a pair that it does not have."""
    values = named("truncated-4-signed").values.astype(np.int64)
    values[200, 17] += 1
    return values


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@_MANY
@given(data=st.data())
def test_many_tables_come_through_to_the_bit(signed: bool, data: Any, tmp_path: Path) -> None:
    made, sizes = data.draw(_tables(signed)), data.draw(_sizes())
    how = data.draw(st.sampled_from((*_FILES, *_FILES, *_FILES, *_PROGRAMS)))
    _check(made, sizes, how, signed, data, tmp_path)
