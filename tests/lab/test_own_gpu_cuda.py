"""Our GPU engine on a GPU: every kernel against the reference, whole networks against float64."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Tuple

import engine_cases
import pytest
import torch
from engine_cases import differently_laid
from network_cases import everything, images, tiny
from own_cases import Bench, distance
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import engines, tf32_flags, torch_compat
from narrowgauge_lab.engines import EngineCache, Preparation, registry
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.own.gpu import ahead
from narrowgauge_lab.engines.own.gpu.candidate import Candidate
from narrowgauge_lab.engines.own.gpu.formats import FORMATS
from narrowgauge_lab.engines.own.gpu.launches import Launches
from narrowgauge_lab.engines.own.gpu.lowered import Lowered, lowered
from narrowgauge_lab.engines.own.gpu.network import OwnNetwork
from narrowgauge_lab.engines.own.gpu.reference import Reference
from narrowgauge_lab.measure.probe import precision_ran
from narrowgauge_lab.networks import TINY, build, network, scale_activations

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FLOATS = [name for name in FORMATS if not FORMATS[name].scaled]


@pytest.fixture(autouse=True)
def _strict_float32() -> Any:
    with tf32_flags.tf32_set_to(False):
        yield


def require(precision: str) -> None:
    reason = engines.missing("narrowgauge", CUDA) or registry.refuses(
        "narrowgauge", precision, CUDA
    )
    if reason:
        pytest.skip(reason)


def on_gpu(model: nn.Module, name: str, few: torch.Tensor) -> Lowered:
    require(name)
    return lowered(model, tuple(few.shape[1:]), FORMATS[name], [few], CUDA)


def tiny_on_gpu(name: str, height: int = 37, width: int = 33) -> Lowered:
    return on_gpu(tiny(), name, images(16, seed=7, height=height, width=width))


def exact(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def usable(candidates: List[Candidate]) -> List[bool]:
    """Which of them this GPU has the shared memory and registers for; they compile side by side."""
    from triton.runtime.errors import OutOfResources

    def starts(candidate: Candidate) -> bool:
        try:
            candidate.start()
        except OutOfResources:
            return False
        return True

    ours = [each for each in candidates if each.provider == "triton"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(starts, ours))
    found = [starts(each) for each in candidates]
    torch.cuda.synchronize()
    return found


def compiled(network: Lowered, batch: int) -> Lowered:
    """The network, once the kernels that run unless others are chosen are there: compiled side by
    side, they take a fraction of the time."""
    made, memory = network, network.memory(batch)
    makes = Launches(memory, made.modules, made.weights, made.affines, made.scales)
    usable([launch.own[0] for step in made.plan.steps for launch in makes.of(step)])
    return network


# ---- every way to run every step


@pytest.mark.parametrize("size", [(39, 33, 3), (129, 120, 5)], ids=["few pixels", "many pixels"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_candidate_of_every_step_is_right(name: str, size: Tuple[int, int, int]) -> None:
    """Poisoned before each; also with a NaN in one image, and twice alike."""
    height, width, batch = size
    if batch == 5 and name not in ("int8", "fp16"):
        pytest.skip("the tiles for many pixels are the same code in other formats")
    model = everything(height, width, torch_step=not FORMATS[name].scaled)
    few = images(16, seed=7, height=height, width=width)
    x = images(batch, seed=3, height=height, width=width)
    if name != "int8":
        x[1, 0, height // 2, width // 2] = float("nan")
    bench = Bench(on_gpu(model, name, few), x)
    bench.check_images()
    ways = [way for step in bench.plan.steps for way in bench.ways(step, libraries=batch == 3)]
    wrong: Dict[str, str] = {}
    right = 0
    for way, fits in zip(ways, usable([way.candidate for way in ways])):
        if not fits:
            continue
        try:
            first = bench.check(way)
            again = bench.run(way)
            assert same_bits(first, again), "another result when it ran again"
            right += 1
        except AssertionError as error:
            wrong[str(way)] = str(error)
    print(f"{name}: {right} of {len(ways)} ways are right")

    assert not wrong, "\n".join(f"{way}: {error}" for way, error in wrong.items())
    assert right > 3 * len(bench.plan.steps)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_candidate_of_single_images_is_right(name: str, batch: int) -> None:
    """One image has linear layers of its own, and sums are divided most."""
    model = engine_cases.network("residual")
    few = engine_cases.images(8, seed=4)
    bench = Bench(on_gpu(model, name, few), engine_cases.images(batch, seed=5))
    ways = [way for step in bench.plan.steps for way in bench.ways(step)]
    count = 0
    for way, fits in zip(ways, usable([way.candidate for way in ways])):
        if fits:
            assert same_bits(bench.check(way), bench.run(way)), str(way)
            count += 1

    assert count > 2 * len(bench.plan.steps)
    kernels = {way.candidate.kernel.partition(" ")[0] for way in ways}
    assert ("linear_kernel" in kernels) == (batch == 1)


# ---- whole networks


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("size", [(37, 33), (64, 64)])
def test_int8_is_exact_but_for_ties(batch: int, size: Tuple[int, int]) -> None:
    made = tiny_on_gpu("int8", *size)
    x = images(batch, seed=3, height=size[0], width=size[1])
    found = OwnNetwork(compiled(made, batch), tuned=False)(x.to(CUDA))

    assert distance(found, Reference(made)(x)) <= 2e-3


def test_every_stored_value_of_int8_is_within_one_unit() -> None:
    """Step after step, each on what the ones before it really wrote."""
    made, x = tiny_on_gpu("int8"), images(4, seed=3)
    bench = Bench(compiled(made, 4), x)
    bench.read()
    for step in made.plan.steps:
        for launch in bench.makes.of(step):
            launch()
        if made.plan.is_result(step):
            assert distance(bench.memory.result(), bench.logits) <= 2e-3
            continue
        found = bench.memory.view(step.output).cpu().double()
        difference = (found - bench.reference.stored[step.output].double()).abs()
        assert float(difference.max()) <= 1, step
        assert float((difference > 0).double().mean()) <= 0.01


#: In norm, of what a network of that depth gives in float64.
NEAR = {"fp32": 2e-5, "tf32": 1.5e-2, "fp16": 1e-2, "bf16": 8e-2}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("which", TINY)
def test_networks_of_every_family_are_near_float64(which: str, name: str) -> None:
    if name in ("tf32", "bf16") and which not in ("resnet50-tiny", "mobilenet-tiny"):
        pytest.skip("what differs between formats differs there")
    size = network(which).size
    few = images(16, seed=1, height=size, width=size)
    model = scale_activations(build(which), few)
    made = on_gpu(model, name, few)
    x = images(3, seed=2, height=size, width=size)
    own = OwnNetwork(compiled(made, 3), tuned=False)
    found = own(x.to(CUDA, FORMATS[name].dtype))

    assert found.dtype == torch.float32
    assert distance(found, exact(model, x.to(FORMATS[name].dtype))) <= NEAR[name]
    tf32 = {"conv": name == "tf32", "matmul": name == "tf32"}
    assert precision_ran(own.observations(), tf32) == name
    assert {each.device.type for each in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", FORMATS)
def test_all_steps_together_are_near_float64(name: str) -> None:
    """Tuned: whatever it is that runs in the end."""
    model = everything(39, 33, torch_step=not FORMATS[name].scaled)
    few, x = images(16, 7, 39, 33), images(3, 3, 39, 33)
    made = on_gpu(model, name, few)
    found = OwnNetwork(made)(x.to(CUDA))

    if name in NEAR:
        assert distance(found, exact(model, x)) <= NEAR[name]
    else:
        assert distance(found, Reference(made)(x)) <= {"int8": 5e-3, "fp8": 0.25}[name]


@pytest.mark.parametrize("which", ["densenet-tiny", "mobilenet-tiny", "squeezenet-tiny"])
def test_int8_of_other_families_is_its_reference(which: str) -> None:
    few = images(16, seed=1, height=32, width=32)
    model = scale_activations(build(which), few)
    made, x = on_gpu(model, "int8", few), images(3, seed=2, height=32, width=32)
    found = OwnNetwork(compiled(made, 3), tuned=False)(x.to(CUDA))

    assert distance(found, Reference(made)(x)) <= 1e-2


def test_fp8_is_near_its_reference() -> None:
    made, x = tiny_on_gpu("fp8"), images(8, seed=3)
    found = OwnNetwork(compiled(made, 8), tuned=False)(x.to(CUDA))

    assert distance(found, Reference(made)(x)) <= 0.1


# ---- inputs


@pytest.mark.parametrize("name", ["int8", "fp16", "fp32"])
def test_any_strides_and_float_types_of_the_input_give_the_same(name: str) -> None:
    x = images(5, seed=3).half().float().to(CUDA)
    own = OwnNetwork(compiled(tiny_on_gpu(name), 5), tuned=False)
    first = own(x).clone()
    for label, laid in differently_laid(x).items():
        assert torch.equal(own(laid), first), label
    assert torch.equal(own(x.half()), first)
    bound = own.bound(x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(bound(), first)


@pytest.mark.parametrize("name", [*FLOATS, "fp8"])
def test_nan_comes_out_where_it_went_in_and_is_gone_with_the_next_call(name: str) -> None:
    if name not in FORMATS:
        pytest.skip(f"this torch has no {name}")
    model = everything(39, 33, torch_step=not FORMATS[name].scaled)
    own = OwnNetwork(on_gpu(model, name, images(16, 7, 39, 33)))
    x = images(3, 3, 39, 33).to(CUDA)
    clean = own(x).clone()
    dirty = x.clone()
    dirty[1, 2, 20, 15] = float("nan")
    found = own(dirty).clone()

    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert torch.equal(own(x), clean)


@pytest.mark.parametrize("name", ["int8", "fp16"])
def test_inference_mode_may_come_and_go(name: str) -> None:
    model = everything(39, 33, torch_step=name == "fp16")
    made, x = on_gpu(model, name, images(16, 7, 39, 33)), images(2, 3, 39, 33).to(CUDA)
    for graph in (True, False):
        own = OwnNetwork(compiled(made, 2), graph=graph, tuned=False)
        with torch_compat.inference_mode():
            first = own(x).clone()
        assert torch.equal(own(x), first)


def test_a_second_call_forgets_the_first_and_sizes_alternate() -> None:
    made = tiny_on_gpu("int8")
    own = OwnNetwork(made, tuned=False)
    for batch in (2, 7, 3):
        compiled(made, batch)
    seen = {batch: own(images(batch, seed=batch).to(CUDA)).clone() for batch in (2, 7, 3)}
    for batch in (3, 2, 7):
        assert torch.equal(own(images(batch, seed=batch).to(CUDA)), seen[batch])


def test_what_is_bound_is_read_where_it_lies() -> None:
    own = OwnNetwork(compiled(tiny_on_gpu("fp16"), 4), tuned=False)
    x = images(4, seed=1).to(CUDA)
    other = images(4, seed=2).to(CUDA)
    call = own.bound(x)
    first = call().clone()
    x.copy_(other)
    second = call().clone()

    assert not torch.equal(first, second)
    assert torch.equal(own(other), second)
    assert torch.equal(x, other)
    assert own.layers()
    assert precision_ran(own.observations(), {}) == "fp16"


@pytest.mark.parametrize("name", ["int8", "fp16", "fp32"])
def test_images_where_the_first_lay_are_read_there(name: str) -> None:
    """Whatever is in them by then; others, and the same memory in another order, are copied."""
    made = tiny_on_gpu(name, 33, 33)
    own = OwnNetwork(compiled(made, 4), tuned=False)
    x = images(4, seed=1, height=33, width=33).to(CUDA)
    wanted = {seed: own(images(4, seed, 33, 33).to(CUDA).contiguous()).clone() for seed in (1, 2)}
    there = OwnNetwork(made, tuned=False)
    assert torch.equal(there(x), wanted[1])
    ready = there._ready[4, x.dtype]
    assert ready.there is not None
    with torch_compat.inference_mode():
        ready.images.fill_(float("nan"))
    assert torch.equal(there(x), wanted[1])
    assert torch.isnan(ready.images).all(), "nothing was copied"
    x.copy_(images(4, seed=2, height=33, width=33))
    assert torch.equal(there(x), wanted[2])
    for other in (x.clone(), x.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(there(other), wanted[2])
    turned = x.transpose(2, 3)
    assert torch.equal(there(turned), own(turned.contiguous()))
    assert torch.equal(there(x), wanted[2])


def test_reading_images_where_they_lie_may_have_steps_beside_others() -> None:
    """Tuned: whichever way it was settled."""
    made = tiny_on_gpu("fp16")
    x = images(2, seed=1).to(CUDA)
    own = OwnNetwork(made)
    first = own(x).clone()
    assert torch.equal(own(x.clone()), first)
    assert all(torch.equal(own(x), first) for _ in range(20))


@pytest.mark.parametrize("graph", [True, False])
def test_a_network_on_a_second_gpu_is_run_while_the_first_is_current(graph: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    require("fp16")
    model, few = tiny(), images(16, seed=7, height=37, width=33)
    x = images(2, seed=1, height=37, width=33)
    found = {}
    for index in (0, 1):
        device = torch.device("cuda", index)
        made = lowered(model, tuple(few.shape[1:]), FORMATS["fp16"], [few], device)
        own = OwnNetwork(made, graph=graph, tuned=False)
        found[index] = own(x.to(device)).clone()
        assert torch.cuda.current_device() == 0
        assert found[index].device == device
        assert torch.equal(own(x.to(device)), found[index])
    assert torch.equal(found[0].cpu(), found[1].cpu())


# ---- the same again


@pytest.mark.parametrize("name", FORMATS)
def test_graph_and_launches_give_the_same_bits(name: str) -> None:
    made = tiny_on_gpu(name)
    captured = OwnNetwork(compiled(made, 2), tuned=False)
    launched = OwnNetwork(made, graph=False, tuned=False)
    for seed in range(3):
        x = images(2, seed=seed).to(CUDA)
        assert torch.equal(captured(x), launched(x))
    assert captured.layers() == launched.layers()
    assert captured.observations() == launched.observations()
    modules = {getattr(step, "module", "") for step in made.plan.steps} - {""}
    assert modules <= {fact.layer for fact in captured.layers()}
    assert {fact.precision for fact in captured.layers()} == {name}


@pytest.mark.parametrize("name", ["int8", "fp16", "fp32"])
@pytest.mark.parametrize("beside", [False, True])
def test_divided_sums_are_the_same_bit_for_bit(name: str, beside: bool) -> None:
    """As many parts as there are to choose from, and steps beside each other."""
    made = tiny_on_gpu(name)
    own = OwnNetwork(compiled(made, 1), graph=False, tuned=False)
    x = images(1, seed=3).to(CUDA)
    own(x)
    work = own._made[-1].work
    divided = 0
    for launch in work.launches():
        parts = [int(each.store().get("parts", 1)) for each in launch.own]
        launch.chosen = launch.own[parts.index(max(parts))]
        divided += max(parts) > 1
    work.beside = beside and work.has_besides
    first = own(x).clone()
    alike = [torch.equal(own(x), first) for _ in range(50)]

    assert divided > 0
    assert all(alike)
    assert (
        distance(first, exact(tiny(), x.cpu())) <= {"int8": 0.1, "fp16": 1e-2, "fp32": 2e-5}[name]
    )


@pytest.mark.parametrize("name", ["int8", "fp16", "fp32"])
@pytest.mark.parametrize("beside", [False, True])
def test_kernels_launched_ahead_of_their_turn_give_the_same_bits(
    name: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs and launch by launch, cuDNN's kernels and torch's between them; `everything` has
    all that we launch, and memory that is used again and again."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches ahead of their turn are of capability 9.0")
    model = everything(39, 33, torch_step=not FORMATS[name].scaled)
    made = on_gpu(model, name, images(16, 7, 39, 33))
    x = {seed: images(2, seed, 39, 33).to(CUDA) for seed in range(3)}
    monkeypatch.setattr(ahead, "LAUNCHED_AHEAD", False)
    plain = OwnNetwork(made, {"beside 2": {"beside": beside}})
    wanted = {seed: plain(given).clone() for seed, given in x.items()}
    monkeypatch.setattr(ahead, "LAUNCHED_AHEAD", True)
    assert ahead.ahead(CUDA) == {"AHEAD": True, "launch_pdl": True}
    for graph in (True, False):
        own = OwnNetwork(made, dict(plain.settled), graph=graph)
        alike = [torch.equal(own(x[turn % 3]), wanted[turn % 3]) for turn in range(150)]
        assert all(alike), f"graph {graph}: {alike.count(False)} of 150 differ"
        assert own.measured == 0
        seconds = {each: _seconds_a_call(net, x[0]) for each, net in (("on", own), ("off", plain))}
        print(f"{name}, graph {graph}: {seconds['on'] * 1e6:.1f} µs ahead, "
              f"{seconds['off'] * 1e6:.1f} µs in turn, as a graph")  # fmt: skip


def _seconds_a_call(network: OwnNetwork, x: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(100):
        network(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e5


@pytest.mark.parametrize("name", ["int8", "fp16"])
def test_what_was_settled_is_found_again(name: str) -> None:
    made, x = tiny_on_gpu(name), images(2, seed=3).to(CUDA)
    first = OwnNetwork(made)
    wanted = first(x).clone()
    kept = json.loads(json.dumps(first.settled))
    again = OwnNetwork(made, kept)

    assert torch.equal(again(x), wanted)
    assert first.measured > 3
    assert again.measured == 0
    assert again.layers() == first.layers()
    strange = {key: {"kernel": "gone", "plan": "no plan"} for key in kept}
    third = OwnNetwork(made, strange)
    assert distance(third(x), wanted.cpu()) <= 2e-3
    assert third.measured == first.measured


# ---- by the registry


def prepared(name: str, precision: str, **wanted: Any) -> Any:
    require(precision)
    example = engine_cases.images(2).to(CUDA, DTYPES[precision])
    calibration = (engine_cases.images(8, seed=4),) if FORMATS[precision].scaled else ()
    asked = Preparation(precision, CUDA, calibration=calibration, **wanted)
    return engines.prepare("narrowgauge", engine_cases.network(name), example, asked)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*(("residual", precision) for precision in FLOATS), ("concatenated", "fp32"),
     ("concatenated", "fp16")],
)  # fmt: skip
def test_the_engine_agrees_with_float64(name: str, precision: str) -> None:
    """TF32 is allowed while it is called, which must not reach what it makes ready then."""
    runner = prepared(name, precision, batches=(0, 2, 4), options={"tune_s": 0.0})
    model = engine_cases.network(name)
    for count in (2, 3, 0, 2):
        x = engine_cases.images(count, seed=5).to(CUDA, DTYPES[precision])
        for laid in differently_laid(x).values():
            with tf32_flags.tf32_set_to(True):
                found = runner(laid)
            assert found.shape == (count, engine_cases.CLASSES)
            assert found.device.type == "cuda"
            if count:
                right = engine_cases.exact(model, x)
                assert engine_cases.relative_error(found, right) <= NEAR[precision]
    tf32 = {"conv": precision == "tf32", "matmul": precision == "tf32"}
    assert precision_ran(runner.observations(), tf32) == precision
    assert runner.memory_bytes() > 0
    assert runner.build_seconds > 0
    runner.close()
    runner.close()


def test_what_has_no_kernel_in_8_bits_is_refused_by_name() -> None:
    with pytest.raises(NotApplicableError) as caught:
        prepared("concatenated", "int8")
    assert "narrowgauge" in str(caught.value)


def test_threads_are_for_cpus() -> None:
    with pytest.raises(BadValueError, match="CPUs"):
        prepared("residual", "fp16", options={"threads": 2})


def test_the_second_engine_is_from_the_cache_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    x = engine_cases.images(2, seed=6).to(CUDA)
    first = prepared("residual", "int8", cache=cache)
    wanted = first(x).clone()
    second = prepared("residual", "int8", cache=EngineCache(tmp_path))
    (kept,) = tmp_path.glob("*.engine")

    assert (first.from_cache, second.from_cache) == (False, True)
    assert torch.equal(second(x), wanted)
    assert second.layers() == first.layers()
    assert second.cache_key == first.cache_key
    kept.write_bytes(kept.read_bytes()[:-3] + b"xxx")
    third = prepared("residual", "int8", cache=cache)
    assert not third.from_cache
    assert "damaged" in third.cache_note
    assert distance(third(x), wanted.cpu()) <= 1e-5
    assert prepared("residual", "int8", cache=cache).from_cache


@pytest.mark.parametrize(
    "payload",
    [b"\x00no JSON", b"[1, 2]", b'{"settled": {}}', b'{"settled": {}, "compiler": {"stamp": 1}}'],
)
def test_a_payload_that_is_no_engine_is_built_anew(
    tmp_path: Path, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole by its sha256, and yet not what this engine keeps."""
    asked: List[Any] = []
    put = EngineCache.put

    def spy(self: EngineCache, key: Any, what: bytes) -> str:
        asked.append(key)
        return put(self, key, what)

    monkeypatch.setattr(EngineCache, "put", spy)
    cache = EngineCache(tmp_path)
    prepared("residual", "fp16", cache=cache, options={"tune_s": 0.0})
    put(cache, asked[0], payload)
    again = prepared("residual", "fp16", cache=cache, options={"tune_s": 0.0})

    assert not again.from_cache
    assert again.cache_note.startswith("rebuilt: what was kept")


def test_fp8_is_refused_where_the_card_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(NotApplicableError, match="fp8"):
        prepared_unchecked("fp8")


def prepared_unchecked(precision: str) -> Any:
    asked = Preparation(precision, CUDA, calibration=(engine_cases.images(8),))
    example = engine_cases.images(2).to(CUDA)
    return engines.prepare("narrowgauge", engine_cases.network("residual"), example, asked)


def test_old_cards_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))

    assert "8.0" in engines.missing("narrowgauge", CUDA)
