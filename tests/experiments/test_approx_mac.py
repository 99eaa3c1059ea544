"""The experiment `approx-mac`: rows of every kind of kernel, what is wrong, and its declaration."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError, SkippedError
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.layers.manual.settings import settings_of
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.layer_shapes import SETS, LayerShape, product, shapes_named

LAYER = "4-10-5x5s1-12"
ROWS = Rows("approx-mac", (f"shapes={LAYER}", "batch=2", "pairs=2", "limit_s=0.001"))
module = ROWS.module
#: Strides, a window beyond the edges, more channels than a block of any kernel has.
SHAPES = (
    LayerShape(19, 21, kernel=3, stride=2, size=11, padding=1),
    LayerShape(6, 37, kernel=1, stride=1, size=5, padding=0),
    product(0, 23, 35),
)
INT_MM = hasattr(torch, "_int_mm")


def _values(row: Row, name: str) -> Tuple[float, ...]:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values


def _subject(
    policy: str, shape: LayerShape, path: str = "auto", relu: bool = False, last: bool = False
) -> Any:
    drawn = module("operands").Drawn(CPU, 3, relu, last)
    return module("subject").subject_of(settings_of(policy, path=path), shape, 2, drawn)


# Rows from end to end.


def test_a_float_policy_beside_torch_and_the_original(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "policy=mitchell")

    assert row.validity.valid
    assert (row.facts["path"], row.facts["choices"][0]["path"]) == ("functor", "functor")
    (layer,) = row.facts["layers"]
    assert layer["name"] == LAYER
    assert layer["macs"] == 2 * 64 * 10 * 100
    assert 0 < layer["error"] < 1e-5
    assert layer["looked_at"] == "16 of 128 pixels or rows, 10 of 10 filters"
    assert set(layer["peers_missing"]) == {"int_mm", "torchapprox", "adapt"}
    assert row.facts["layers_beside"] == {
        "cost_over_exact": 1, "times_torch": 1, "times_lowered": 1, "times_untiled": 1,
    }  # fmt: skip
    for name in ("macs_per_second", *row.facts["layers_beside"]):
        assert all(value > 0 for value in _values(row, name))
        # Of one layer, all together are that layer.
        assert _values(row, name) == pytest.approx(_values(row, f"{name}.{LAYER}"))
    metric = row.metric("times_torch")
    assert metric is not None
    assert metric.conditions["interleaved"] is True


@pytest.mark.parametrize(
    ("words", "path", "terms"),
    [
        (("policy=exact_int8",), "exact", 1),
        (("policy=lut8x8:ama5", "layout=channels_last"), "structured", 2),
        (("policy=lut8x8:bam-3-6-signed", "kernel=structured", "activations=relu"),
         "structured", 4),
        (("policy=lut8x8:drum-6", "kernel=factored"), "factored", 1),
        (("policy=lut8x8:mitchell",), "table", 0),
    ],
)  # fmt: skip
def test_a_policy_of_codes_by_each_kernel(
    tmp_path: Path, words: Tuple[str, ...], path: str, terms: int
) -> None:
    row = ROWS.run(tmp_path, *words)

    assert row.validity.valid
    (choice,) = row.facts["choices"]
    assert (choice["path"], choice["terms"]) == (path, terms)
    assert choice["proof"]["proved"] is (path != "table")
    (layer,) = row.facts["layers"]
    assert layer["error"] == 0.0
    missing = {"torchapprox", "adapt"} if INT_MM else {"int_mm", "torchapprox", "adapt"}
    assert set(layer["peers_missing"]) == missing | ({"exact"} if path == "exact" else set())
    beside = set(row.facts["layers_beside"])
    assert {"times_torch", "times_lowered", "times_untiled"} <= beside
    assert ("times_int_mm" in beside) is INT_MM
    assert ("cost_over_exact" in beside) is (path != "exact")


def test_layers_together_are_their_products_over_their_time(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "shapes=lenet", "peers=libraries")

    macs = {each["name"]: each["macs"] for each in row.facts["layers"]}
    assert list(macs.values()) == [2 * 57_600, 2 * 64_000, 2 * 16_000, 2 * 1000]
    beside = row.facts["layers_beside"]
    assert beside == {"times_torch": 4, "times_lowered": 2}
    rates = {name: _values(row, f"macs_per_second.{name}") for name in macs}
    pairs = range(min(map(len, rates.values())))  # a limit of time may leave one out
    seconds = [sum(macs[name] / rates[name][at] for name in macs) for at in pairs]
    wanted = [sum(macs.values()) / each for each in seconds]
    assert _values(row, "macs_per_second") == pytest.approx(wanted)
    ratios = [_values(row, f"times_torch.{name}") for name in macs]
    means = [functools.reduce(lambda x, y: x * y, at) ** 0.25 for at in zip(*ratios)]
    assert _values(row, "times_torch") == pytest.approx(means)


def test_a_layer_that_is_listed_twice_is_measured_once_and_counts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = shapes_named("100-10")[0], shapes_named("160-100")[0]
    monkeypatch.setattr(module("run"), "shapes_named", lambda _name: [small, large, small])

    row = ROWS.run(tmp_path, "peers=none")

    assert [each["name"] for each in row.facts["layers"]] == ["100-10", "160-100"]
    one, two = (_values(row, f"macs_per_second.{each.name}") for each in (small, large))
    total, seconds = 2 * (1000 + 16000 + 1000), 2 * 2000 / one[0] + 32000 / two[0]
    assert _values(row, "macs_per_second")[0] == pytest.approx(total / seconds)


def test_a_product_has_the_sides_that_are_asked_for(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "shapes=product", "side=40", "policy=exact_int8", "peers=none")

    (layer,) = row.facts["layers"]
    assert (layer["name"], layer["macs"]) == ("40-40-40", 40**3)


def test_what_a_policy_has_not_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="has no path 'structured'"):
        ROWS.run(tmp_path, "policy=lut8x8:mitchell", "kernel=structured")


def test_any_policy_can_be_said(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "policy=other", "other=truncated(5)", "peers=none")

    assert row.facts["policy"] == "truncated(5)"
    for words in (("policy=other",), ("policy=mitchell", "other=axfpm")):
        with pytest.raises(BadValueError, match="do not go together"):
            ROWS.run(tmp_path / words[0], *words)


# Correctness, and what is wrong.


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    ("policy", "path"),
    [("axfpm", "functor"), ("lut8x8:ama5", "structured"), ("lut8x8:ama5-signed", "factored"),
     ("lut8x8:drum-3-signed", "table"), ("exact_int8", "exact")],
)  # fmt: skip
def test_every_kernel_and_peer_computes_the_layer(
    policy: str, path: str, shape: LayerShape
) -> None:
    subject = _subject(policy, shape, path, relu=policy == "axfpm", last=path == "table")
    peers, missing = module("peers").peers_of(subject, "all")
    said: List[str] = []

    right, error = module("correctness").check(_Invalid(said), subject, peers)

    assert (right, said) == (True, [])
    assert (error == 0.0) is subject.codes
    lacking = {"torchapprox", "adapt", *(["lowered"] if shape.linear else [])}
    lacking |= {"exact"} if path == "exact" else set()
    assert set(missing) == lacking | ({"int_mm"} if not subject.codes or not INT_MM else set())


class _Invalid:
    """A context that keeps what makes its row invalid."""

    def __init__(self, said: List[str]) -> None:
        self.invalid = said.append


def test_codes_of_a_smaller_multiplier_stay_in_its_range() -> None:
    subject = _subject("lut8x8:ama5-4x4", SHAPES[0])
    for each in (subject.operands.x, subject.operands.weight):
        assert (int(each.min()), int(each.max())) == (0, 15)
    relu = _subject("lut8x8:ama5-4x4", SHAPES[0], relu=True).operands.x
    assert 0.4 < float((relu == 0).float().mean()) < 0.65
    assert int(relu.max()) <= 15


def test_a_sample_sees_corners_and_padding() -> None:
    operands = _subject("exact_fp32", SHAPES[0]).operands
    sample = operands.sample
    assert sample.positions[0] == (0, 0, 0)
    assert sample.positions[-1] == (1, 5, 5)
    assert (sample.filters[0], sample.filters[-1], len(sample.filters)) == (0, 20, 16)
    first = sample.windows[0].reshape(19, 3, 3)
    assert not bool(first[:, 0].any() or first[:, :, 0].any())
    assert torch.equal(first[:, 1:, 1:], operands.x[0, :, :2, :2])
    whole = torch.nn.functional.unfold(operands.x, 3, padding=1, stride=2)
    for at, window in zip(sample.positions, sample.windows):
        assert torch.equal(window, whole[at[0], :, at[1] * 6 + at[2]])


@pytest.mark.parametrize("policy", ["exact_fp32", "lut8x8:mitchell-signed"])
def test_the_macs_of_a_row_are_those_that_are_counted(policy: str) -> None:
    for shape in SHAPES:
        subject = _subject(policy, shape)
        found = count(lambda _x, subject=subject: subject.call(), subject.operands.x)
        assert found.macs == subject.operands.macs


def test_a_kernel_that_is_wrong_makes_the_row_invalid_and_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one unit in one result of a filter that is looked at."""
    kernels = module("subject").kernels
    right = kernels.code_sums

    def wrong(problem: Any, x: Any, weight: Any, mac: Any, zero: int) -> torch.Tensor:
        result = right(problem, x, weight, mac, zero)
        if mac.name == "structured":
            result[0, 0, 0, 0] += 1
        return result

    monkeypatch.setattr(kernels, "code_sums", wrong)
    row = ROWS.run(tmp_path, "policy=lut8x8:ama5")

    assert not row.validity.valid
    (reason,) = row.validity.reasons
    assert reason.startswith(f"{LAYER}: the kernel is off by")
    assert row.metric("macs_per_second") is None


def test_a_float_kernel_of_another_policy_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, exact = module("subject").kernels, module("subject").EXACT_FP32
    right = kernels.float_layer
    monkeypatch.setattr(
        kernels, "float_layer", lambda problem, x, weight, bias, mac: right(
            problem, x, weight, bias, exact
        ),
    )  # fmt: skip
    row = ROWS.run(tmp_path, "policy=truncated(7)", "peers=none")

    assert not row.validity.valid


def test_a_peer_that_is_wrong_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = module("peers")
    native = peers._native
    monkeypatch.setattr(peers, "_native", lambda operands: lambda: native(operands)() * (1 + 2e-4))
    row = ROWS.run(tmp_path, "policy=exact_fp32")

    reasons = "\n".join(row.validity.reasons)
    assert f"{LAYER}: torch is off" in reasons
    assert f"{LAYER}: lowered is off" in reasons
    assert "kernel" not in reasons


def test_nan_is_wrong() -> None:
    nan = torch.tensor([float("nan")])
    assert not module("correctness").distance(nan, torch.ones(1)) <= 1e9


@pytest.mark.slow
def test_a_users_own_function_is_held_against_itself_product_by_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functor = tmp_path / "half.h"
    functor.write_text(
        "struct Multiply {\n  MAC_INLINE float operator()(float a, float b) const {"
        " return 0.5f * a * b; }\n};\n",
        encoding="utf-8",
    )
    subject = _subject(f"custom:{functor}", SHAPES[0])
    sample = subject.operands.sample
    exact = sample.windows.double() @ sample.weights.double().t()

    assert torch.allclose(subject.wanted, exact / 2, rtol=1e-6, atol=1e-6)
    assert module("correctness").check(_Invalid([]), subject, ())[0]


# The original's design on a GPU, as far as a CPU can tell.


@pytest.mark.parametrize("policy", ["exact_fp32", "lut8x8:mitchell-signed"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_untiled_kernels_threads_cover_every_result(
    monkeypatch: pytest.MonkeyPatch, policy: str, shape: LayerShape
) -> None:
    """Its arguments as a GPU would get them, and its loop in Python in place of the threads."""
    untiled, subject = module("untiled"), _subject(policy, shape)
    monkeypatch.setattr(untiled, "_compiled", lambda name: functools.partial(_threads, name))
    monkeypatch.setattr(untiled, "_on_gpu", lambda _device: True)

    if subject.codes:
        call = untiled.untiled_codes(subject.operands, subject.table)
    else:
        call = untiled.untiled_float(subject.operands)

    found = subject.operands.sample.of(call())
    assert module("correctness").distance(found, subject.wanted) < 1e-6


def _threads(name: str, grid: Tuple[int, ...], block: Tuple[int, ...], args: List[Any]) -> None:
    x, weight, *tables, out, pixels, depth, filters, images = args
    assert name == ("untiled_codes" if tables else "untiled_float")
    covered = [each * threads for each, threads in zip(grid, block)]
    assert all(
        size <= cover < size + threads
        for size, cover, threads in zip((filters, pixels, images), covered, block)
    )
    assert block[0] * block[1] * block[2] <= 1024
    for each in (x, weight, out):
        assert each.is_contiguous()
    rows, columns = x.reshape(images * pixels, depth), weight.reshape(depth, filters)
    if not tables:
        out.copy_(rows @ columns)
        return
    places = 256 * rows.long()[:, :, None] + columns.long()[None]
    out.copy_(tables[0][places].sum(1))


# The declaration.


def test_profiles_name_policies_and_shapes_that_there_are() -> None:
    spec = ROWS.spec()
    for policy in spec.parameters["policy"].choices[:-1]:
        assert str(parse_policy(policy)) == policy
    for profile in spec.profiles.values():
        for policy in profile.values["policy"]:
            assert str(parse_policy(str(policy))) == policy
        for shapes in profile.values["shapes"]:
            assert shapes == "product" or shapes_named(str(shapes))


def test_every_layer_can_be_chosen() -> None:
    names = dict.fromkeys(shape.name for shapes in SETS.values() for shape in shapes)
    assert ROWS.spec().parameters["shapes"].choices == (*SETS, "product", *names)


def test_every_claim_is_of_a_row_of_its_profile() -> None:
    spec = ROWS.spec()
    for claim in load_claims(EXPERIMENTS / "approx-mac" / "claims.toml", spec):
        values: Dict[str, Any] = spec.profiles[claim.profile].values
        for selection in claim.selections:
            for name, value in selection.where.items():
                declared = values.get(name, (spec.parameters[name].default,))
                assert value in declared, (claim.id, name)


def test_the_closing_lines_say_what_was_measured(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "policy=lut8x8:ama5", "peers=none")
    closing = ROWS.spec().closing
    assert closing is not None
    line = summary_lines(closing, [row])[-1]
    assert line.startswith(f"| {LAYER} | 2 | random | lut8x8:ama5 | structured | ")
    assert line.endswith("| – | – | – | – | – |")
    assert json.dumps(row.facts["choices"])
