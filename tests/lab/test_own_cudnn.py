"""The search for cuDNN's plans, on a stand-in for its frontend that computes on the CPU."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any, Dict, Iterator, List

import fake_cudnn as fake
import pytest
import torch
from cudnn_cases import beside, convolution, error, expected, operands
from fake_cudnn import Engine, Knob, knob_type

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.engines.errors import EngineMissingError
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.cudnn import ConvProblem, CudnnPlanError, Survey
from narrowgauge_lab.engines.own.cudnn_graphs import choices, forms, label
from narrowgauge_lab.engines.own.cudnn_plans import Library, load
from narrowgauge_lab.engines.own.cudnn_search import Bounds, search

CPU = torch.device("cpu")
BASE = convolution(2, 8, 7, 16, width=6, stride=(2, 1), residual=True)


class CpuLibrary(Library):
    gpu = "Stand-in"

    def handle(self, device: torch.device) -> Any:
        return "handle"

    def host(self, device: torch.device) -> Dict[str, Any]:
        return {"cuDNN": fake.VERSION[0], "frontend": fake.__version__, "GPU": self.gpu}


@pytest.fixture
def engines() -> Iterator[List[Engine]]:
    """Engines of the stand-in, to be filled by the test."""
    for store in (fake.ENGINES, fake.PROPOSED):
        store.clear()
    yield fake.ENGINES
    fake.VERSION[0] = 91900


def changed(**fields: Any) -> ConvProblem:
    return dataclasses.replace(BASE, **fields)


def look(problem: ConvProblem, limit: int = 100, seconds: float = 60.0) -> Survey:
    return search(CpuLibrary(fake), problem, CPU, Bounds(limit, seconds, 1 << 20))


@pytest.mark.parametrize(
    "problem",
    [
        BASE,
        changed(dtype="float32"),
        changed(dtype="tf32", activation="relu6"),
        changed(residual=False, activation="none"),
        changed(bias=False),
        changed(bias=False, residual=False, activation="none", groups=4, padding=(0, 2)),
        changed(x_pixel=24, y_pixel=32, residual_pixel=40),
        changed(rows=1, columns=1, padding=(0, 0), dilation=(2, 2)),
        changed(height=3, width=3, padding=(0, 0), stride=(1, 1), batch=1),
    ],
)
def test_every_plan_computes_the_problem(engines: List[Engine], problem: ConvProblem) -> None:
    engines += [Engine(), Engine(lambda words: "bias:FLOAT" in words)]
    found = look(problem)
    assert found.plans, found.note
    for plan in found.plans:
        tensors = operands(problem, plan)
        plan.start(**tensors)
        wrong = error(tensors["y"], expected(problem, tensors))
        assert wrong <= (1e-3 if problem.dtype == "float16" else 1e-6), plan


def test_what_lies_beside_a_slice_is_left_alone(engines: List[Engine]) -> None:
    engines.append(Engine())
    problem = changed(residual=False, x_pixel=24, y_pixel=48)
    (plan, *_) = look(problem).plans
    tensors = operands(problem, plan, offset=8, fill=3.5)
    plan.start(**tensors)
    around = beside(problem, "y", tensors["y"], 8)
    assert around.shape == (2 * 4 * 6, 32)
    assert bool((around == 3.5).all())
    assert error(tensors["y"], expected(problem, tensors)) <= 1e-3


def test_the_precompiled_pattern_comes_first_and_a_float32_bias_after_it(
    engines: List[Engine],
) -> None:
    engines.append(Engine())
    fake.PROPOSED["A"] = [(0, {})]
    names = [plan.name for plan in look(BASE).plans]
    assert names == ["eng0 bias=float16", "eng0 bias=float32 first"]
    words = {form: search_words(form) for form in forms(BASE)}
    assert list(words.values()) == [
        ["conv", "add", "bias:HALF", "relu"],
        ["conv", "bias:FLOAT", "add", "relu"],
    ]
    assert [form.bias_dtype for form in forms(changed(dtype="float32"))] == ["float32"]
    assert [form.bias_dtype for form in forms(changed(bias=False))] == [""]


def search_words(form: Any) -> List[str]:
    from narrowgauge_lab.engines.own.cudnn_graphs import make_graph

    graph = make_graph(fake, BASE, form, "handle")
    assert graph.types == (fake.data_type.FLOAT, fake.data_type.FLOAT)
    return list(graph.words)


def test_heuristics_come_first_and_nothing_comes_twice(engines: List[Engine]) -> None:
    engines += [Engine(knobs=(Knob(knob_type.TILE_SIZE, 0, 2),)), Engine()]
    fake.PROPOSED.update(A=[(0, {2: 1})], B=[(0, {2: 1}), (1, {})], FALLBACK=[(1, {})])
    found = look(changed(residual=False, dtype="float32"))
    assert [(plan.name, plan.source) for plan in found.plans] == [
        ("eng0 tile_size=1 bias=float32", "heuristic A"),
        ("eng1 bias=float32", "heuristic B"),
        ("eng0 bias=float32", "by index"),
        ("eng0 tile_size=0 bias=float32", "by index"),
        ("eng0 tile_size=2 bias=float32", "by index"),
    ]
    assert (found.refused, found.cut) == ({}, "")


def test_the_first_form_does_not_fill_the_limit_alone(engines: List[Engine]) -> None:
    """An engine that only the second form has may be the fastest."""
    engines += [
        Engine(knobs=(Knob(knob_type.KERNEL_CFG, 0, 19),)),
        Engine(lambda words: "bias:FLOAT" in words),
    ]
    fake.PROPOSED["A"] = [(1, {}), *((0, {24: value}) for value in range(20))]
    found = look(BASE, limit=8)
    assert [plan.form.bias_dtype for plan in found.plans] == ["float16"] * 4 + ["float32"] * 4
    assert found.plans[4].name == "eng1 bias=float32 first"
    assert "limit of 8" in found.note
    strict = look(changed(dtype="float32", residual=False), limit=8)
    assert {plan.source for plan in strict.plans} == {"heuristic A"}


def test_precompiled_engines_come_before_those_that_compile(engines: List[Engine]) -> None:
    engines += [
        Engine(compiled=True, knobs=(Knob(knob_type.KERNEL_CFG, 0, 3),)),
        Engine(knobs=(Knob(knob_type.TILE_SIZE, 0, 3),)),
    ]
    problem = changed(bias=False)
    compiled = [plan.runtime_compiled for plan in look(problem).plans]
    assert compiled == [False] * 5 + [True] * 5
    found = look(problem, limit=3)
    assert len(found.plans) == 3
    assert "limit of 3" in found.note
    assert look(problem, seconds=-1.0).plans == ()


def test_what_fails_is_left_out_and_counted(engines: List[Engine]) -> None:
    engines += [
        Engine(
            knobs=(Knob(knob_type.TILE_SIZE, 0, 3), Knob(knob_type.NOT_SET, 0, 1)),
            fails=lambda choice: choice.get(2, 0) > 1,
        ),
        Engine(workspace=1 << 21),
        Engine(lambda words: False),
    ]
    found = look(changed(bias=False))
    assert [plan.name for plan in found.plans] == ["eng0", "eng0 tile_size=0", "eng0 tile_size=1"]
    assert found.refused["cudnnFinalize Descriptor Failed"] == 2
    assert found.refused["workspace violation"] == 1
    assert found.refused["No valid engine configs for ___"] == 3
    assert "2 x cudnnFinalize Descriptor Failed" in found.note


@pytest.mark.parametrize("dtype", ["float16", "tf32", "float32"])
def test_one_that_makes_numbers_of_nan_is_left_out(engines: List[Engine], dtype: str) -> None:
    """Also where some sums are over the border alone, and so reach no NaN."""
    engines += [Engine(), Engine(loses_nan=True)]
    for problem in (changed(dtype=dtype), changed(dtype=dtype, padding=(4, 4))):
        found = look(problem)
        assert {plan.name.partition(" ")[0] for plan in found.plans} == {"eng0"}
        assert any("NaN" in reason for reason in found.refused)


@pytest.mark.parametrize("dtype", ["float16", "tf32", "float32"])
def test_one_that_makes_zeros_of_what_is_too_large_is_left_out(
    engines: List[Engine], dtype: str
) -> None:
    """After a ReLU they are zeros."""
    engines += [Engine(), Engine(loses_overflow=True)]
    for activation, kept in (("none", {"eng0"}), ("relu", {"eng0", "eng1"})):
        found = look(changed(dtype=dtype, activation=activation))
        assert {plan.name.partition(" ")[0] for plan in found.plans} == kept
        assert any("too large" in reason for reason in found.refused) == (activation == "none")


@pytest.mark.parametrize("dtype", ["float16", "tf32", "float32"])
def test_one_that_reads_what_nobody_wrote_is_left_out(engines: List[Engine], dtype: str) -> None:
    engines += [Engine(workspace=64), Engine(workspace=64, reads_workspace=True)]
    found = look(changed(dtype=dtype))
    assert {plan.name.partition(" ")[0] for plan in found.plans} == {"eng0"}
    assert any("was seen to" in reason for reason in found.refused)


def test_memory_that_runs_out_is_not_a_plan_left_out(engines: List[Engine]) -> None:
    def fails(choice: Dict[int, int]) -> bool:
        raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")

    engines.append(Engine(fails=fails))
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        look(BASE)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float16", ["eng0", "eng2", "eng3", "eng4"]),
        ("tf32", ["eng0", "eng2", "eng3", "eng4", "eng6"]),
        ("float32", ["eng0", "eng6"]),
    ],
)
def test_engines_that_compute_something_else_are_left_out(
    engines: List[Engine], dtype: str, kept: List[str]
) -> None:
    """Engine 4 rounds without a note, as engines that compile do; engine 3 is one of those."""
    engines += [
        Engine(),
        Engine(notes=("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION")),
        Engine(notes=("TENSOR_CORE",)),
        Engine(compiled=True),
        Engine(rounds=True),
        Engine(notes=("REDUCED_PRECISION_REDUCTION",)),
        Engine(notes=("WINOGRAD",)),
    ]
    found = look(changed(dtype=dtype, bias=False, activation="relu6", x_pixel=24))
    assert sorted(plan.name for plan in found.plans) == kept
    assert ("it was seen to round its operands" in found.note) == (dtype == "float32")


def test_slices_that_are_no_whole_vectors_are_refused_with_the_reason() -> None:
    found = look(changed(count=12, y_pixel=32, residual_pixel=12))
    assert found.plans == ()
    assert "y is 12 channels of 32" in found.note
    assert changed(count=12, y_pixel=12, residual_pixel=12).uncertain() == ""
    assert "x is 8 channels of 12" in changed(x_pixel=12).uncertain()
    assert changed(x_pixel=12, dtype="float32").uncertain() == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"activation": "gelu"}, "activation 'gelu'"),
        ({"groups": 3}, "3 groups do not divide"),
        ({"height": 1, "padding": (0, 0)}, "the output would be"),
        ({"y_pixel": 15}, "y_pixel is 15"),
    ],
)
def test_a_problem_that_is_none_is_refused(fields: Dict[str, Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        changed(**fields)


def test_operands_of_another_kind_are_refused(engines: List[Engine]) -> None:
    engines.append(Engine(workspace=1000))
    (plan, *_) = look(BASE).plans
    good = operands(BASE, plan)
    scratch = torch.zeros(2048, dtype=torch.uint8)
    scratch = scratch[-scratch.data_ptr() % 256 :]
    plan.start(**good, workspace=scratch)
    other: Dict[str, Any] = {
        "x": good["x"].float(),
        "w": good["w"].contiguous(),
        "bias": good["bias"].float(),
        "residual": None,
        "y": good["y"][:1],
    }
    for name, tensor in other.items():
        with pytest.raises(CudnnPlanError, match=name):
            plan.start(**{**good, name: tensor}, workspace=scratch)
    for short in (None, scratch[:999], scratch[1:]):
        with pytest.raises(CudnnPlanError, match="workspace"):
            plan.start(**good, workspace=short)
    shifted = torch.zeros(good["x"].numel() + 64, dtype=torch.float16)
    shifted = shifted[-shifted.data_ptr() % 16 // 2 + 1 :]
    with pytest.raises(CudnnPlanError, match="x is not what"):
        plan.start(**{**good, "x": shifted.as_strided(BASE.shape("x"), BASE.strides("x"))})


def test_a_stored_plan_is_the_one_that_was_stored(engines: List[Engine]) -> None:
    engines.append(Engine(knobs=(Knob(knob_type.TILE_SIZE, 0, 2),), workspace=0))
    fake.PROPOSED["A"] = [(0, {2: value}) for value in range(3)]
    found = look(changed(bias=False))
    plan = found.plans[1]
    blob = plan.blob()
    header, _, payload = blob.partition(b"\n")
    assert json.loads(payload)[:2] == [0, [[2, 1]]]
    library = CpuLibrary(fake)
    again = load(library, changed(bias=False), blob, CPU)
    assert (again.name, again.workspace, again.blob()) == (plan.name, 0, blob)
    assert json.loads(header)["found"]["source"] == "heuristic A"


def test_a_stored_plan_of_elsewhere_is_refused(engines: List[Engine]) -> None:
    engines.append(Engine())
    blob = look(BASE).plans[0].blob()
    library = CpuLibrary(fake)
    with pytest.raises(CudnnPlanError, match="another problem"):
        load(library, changed(batch=3), blob, CPU)
    for damaged in (blob[:-1], b"", b"{}\n", b"\xff" + blob, blob.replace(b"format", b"former")):
        with pytest.raises(CudnnPlanError, match="damaged"):
            load(library, BASE, damaged, CPU)
    library.gpu = "Other"
    with pytest.raises(CudnnPlanError, match="another GPU") as caught:
        load(library, BASE, blob, CPU)
    assert "Stand-in" in caught.value.why
    fake.VERSION[0] = 92000
    with pytest.raises(CudnnPlanError, match="another cuDNN"):
        load(CpuLibrary(fake), BASE, blob, CPU)


def test_knobs_are_tried_alone_and_then_together_none_twice() -> None:
    knobs = [Knob(knob_type.SPLIT_K_SLC, 1, 128), Knob(knob_type.KERNEL_CFG, 0, 19)]
    tried = [tuple(sorted((k.name, v) for k, v in each.items())) for each in choices(knobs)]
    assert tried[0] == ()
    assert tried[1:21] == [(("KERNEL_CFG", value),) for value in range(20)]
    assert tried[21:29] == [(("SPLIT_K_SLC", 1 << power),) for power in range(8)]
    assert len(tried) == len(set(tried)) == 1 + 20 + 8 + 20 * 8
    assert len({each[0] for each in tried[29:49]}) == 20  # spread, not one after another
    assert list(choices([])) == [{}]
    assert len(list(choices(knobs[:1]))) == 9


def test_a_tag_in_words() -> None:
    assert label("eng41_k2=5_k13=1_k27=8") == "eng41 tile_size=5 tilek=1 tile_cga_m=8"
    assert label("eng3_k24=2_k12=-1_k99=7") == "eng3 split_k_buf=-1 kernel_cfg=2 k99=7"
    assert label("eng0") == "eng0"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    cached = (cudnn.missing, cudnn._library)
    for each in cached:
        each.cache_clear()
    yield monkeypatch
    for each in cached:
        each.cache_clear()


def test_a_host_without_the_frontend_says_how_to_get_it(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "cudnn", None)
    assert cudnn.missing().startswith("nvidia-cudnn-frontend is not installed: pip install")
    with pytest.raises(EngineMissingError, match="no plans of cuDNN"):
        cudnn.plans(BASE, CPU)


@pytest.mark.parametrize(
    ("found", "beside", "message"),
    [
        (91900, None, ""),
        (91900, 91900, ""),
        (8907, None, "plans need 90000"),
        (92800, 91900, "beside torch's 91900"),
    ],
)
def test_the_cudnn_that_is_found_has_to_fit(
    fresh: pytest.MonkeyPatch, found: int, beside: Any, message: str
) -> None:
    fresh.setitem(sys.modules, "cudnn", fake)
    fresh.setattr(fake, "VERSION", [found])
    fresh.setattr(torch.backends.cudnn, "version", lambda: beside)
    assert message in cudnn.missing()
    if not message:
        assert cudnn.missing() == ""
        assert cudnn.version() == "nvidia-cudnn-frontend 1.23.0 with cuDNN 91900"


def test_a_frontend_of_another_interface_is_named(fresh: pytest.MonkeyPatch) -> None:
    other = types.SimpleNamespace(pygraph=type("pygraph", (), {}), __version__="1.32.0")
    fresh.setitem(sys.modules, "cudnn", other)
    assert cudnn.missing().startswith("nvidia-cudnn-frontend 1.32.0 has no build_plan_at_index")


def test_the_public_functions_search_and_load(
    fresh: pytest.MonkeyPatch, engines: List[Engine]
) -> None:
    engines.append(Engine())
    fresh.setattr(cudnn, "_library", lambda: CpuLibrary(fake))
    (plan, *_) = cudnn.plans(BASE, CPU)
    assert cudnn.rebuild(BASE, plan.blob(), CPU).name == plan.name
    assert cudnn.survey(BASE, CPU, limit=1).cut


def test_a_plan_that_is_held_serves_all_of_its_problem(
    fresh: pytest.MonkeyPatch, engines: List[Engine]
) -> None:
    """And is read anew for another problem, or once nobody holds it any more."""
    engines.append(Engine())
    library, read = CpuLibrary(fake), []
    fresh.setattr(cudnn, "_library", lambda: library)
    take = fake.pygraph.deserialize
    fresh.setattr(
        fake.pygraph, "deserialize", lambda graph, data: (read.append(1), take(graph, data))[1]
    )
    (plan, *_) = cudnn.plans(BASE, CPU)
    other = dataclasses.replace(BASE, batch=BASE.batch + 1)
    (beside, *_) = cudnn.plans(other, CPU)
    blob = plan.blob()

    first = cudnn.rebuild(BASE, blob, CPU)
    assert cudnn.rebuild(BASE, bytes(bytearray(blob)), CPU) is first
    assert len(read) == 1
    assert cudnn.rebuild(other, beside.blob(), CPU) is not first
    assert len(read) == 2
    with pytest.raises(CudnnPlanError, match="another problem"):
        cudnn.rebuild(other, blob, CPU)
    del first
    cudnn.rebuild(BASE, blob, CPU)
    assert len(read) == 3
