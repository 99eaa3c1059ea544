"""The kernels of an exit's decision without a GPU: their source compiled for the CPU, threads
taking turns, beside torch's operators; and what is left to these, with the reason."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Sequence, Tuple

import pytest
import torch
from exit_cases import fresh, images, record_graphs, require_mixed, splitting, toy
from fused_cases import (
    COSTS,
    KINDS,
    decided,
    exact_cases,
    gapped,
    logits_like,
    outcome_of,
    packed,
    same,
    spoilt,
)

from narrowgauge_kernels.errors import KernelBuildError
from narrowgauge_kernels.sparse.driver import Pointer
from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_kernels.sparse.nvrtc import Nvrtc, find_nvrtcs
from narrowgauge_lab.anytime import buckets, device_exit, fused
from narrowgauge_lab.anytime.adaptive import Adaptive, adaptive
from narrowgauge_lab.anytime.buckets import BucketedExits
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.decision_source import SOURCE, SOURCE_WITH_CONDITIONS
from narrowgauge_lab.anytime.device_exit import CapturedStages, SteppedExits
from narrowgauge_lab.anytime.fused import Fused, Given, Launch, why_not
from narrowgauge_lab.anytime.network import Answer, State
from narrowgauge_lab.anytime.policies import Entropy, Memory, Policy, Threshold, parse

HERE = Path(__file__).parent
EMULATED = HERE.parent / "kernels" / "emulated"
CPU = torch.device("cpu")


def compiled(folder: Path, source: str) -> ctypes.CDLL:
    """The kernels for the CPU."""
    (folder / "exit_decision.cuh").write_text(source)
    target = folder / "fused.so"
    command = ["g++", "-O1", "-std=c++14", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-Wno-unused-function", "-ffp-contract=off", "-shared", "-fPIC"]
    command += ["-I", str(EMULATED), "-I", str(folder), "-o", str(target)]
    done = subprocess.run(
        [*command, str(HERE / "exit_decision_emulation.cpp")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("fused"), SOURCE_WITH_CONDITIONS)


@pytest.fixture(scope="module")
def launch(library: ctypes.CDLL) -> Launch:
    """By a library of this machine."""
    return launching(library)


def launching(library: ctypes.CDLL) -> Launch:
    def call(name: str, blocks: int, threads: int, given: Sequence[Given]) -> None:
        tensors = [each for each in given if not isinstance(each, int)]
        numbers = [each for each in given if isinstance(each, int)]
        assert all(each is None or each.is_contiguous() for each in tensors)
        at = (ctypes.c_void_p * len(tensors))(
            *(None if each is None else each.data_ptr() for each in tensors)
        )
        assert threads % 32 == 0
        values = (ctypes.c_uint * len(numbers))(*numbers)
        getattr(library, f"launch_{name}")(blocks, threads, at, values)

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "classes"),
    [(1, 1), (1, 10), (1, 1000), (5, 2), (13, 3), (255, 10), (40, 33), (9, 1000), (1024, 10)],
)
def test_the_kernel_decides_as_the_operators_do(
    launch: Launch, kind: str, batch: int, classes: int
) -> None:
    logits = logits_like(batch, classes, seed=batch + classes)
    policy = gapped(kind, logits)
    wanted = policy.leaves(1, logits, Memory())
    if batch > 4 and classes > 1:
        assert 0 < int(wanted.sum()) < batch
    assert decided(policy, launch, logits).tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [1, 10, 70])
def test_what_is_no_number_stays_whatever_the_threshold(
    launch: Launch, kind: str, classes: int
) -> None:
    logits = spoilt(logits_like(28, classes))
    everybody = parse(f"{kind}:{'inf' if kind.startswith('entropy') else '0'}")
    assert isinstance(everybody, Threshold)
    wanted = everybody.leaves(1, logits, Memory())
    assert wanted.tolist() == [number % 3 != 0 for number in range(28)]
    assert decided(everybody, launch, logits).tolist() == wanted.tolist()


@pytest.mark.parametrize(("text", "rows", "leaves"), exact_cases())
def test_thresholds_met_exactly_and_ties(
    launch: Launch, text: str, rows: List[List[float]], leaves: List[bool]
) -> None:
    policy, logits = parse(text), torch.tensor(rows)
    assert isinstance(policy, Threshold)
    if text != "max-probability:1e300":  # torch itself refuses to compare with that
        assert policy.leaves(1, logits, Memory()).tolist() == leaves
    assert decided(policy, launch, logits).tolist() == leaves


def test_extreme_logits_neither_overflow_nor_vanish(launch: Launch) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38] * 3, [1e-45, 0.0, -1e-45]])
    for kind in KINDS:
        for limit in (0.01, 0.9):
            policy = parse(f"{kind}:{limit}")
            assert isinstance(policy, Threshold)
            wanted = policy.leaves(1, logits, Memory())
            assert decided(policy, launch, logits).tolist() == wanted.tolist(), (kind, limit)


@pytest.mark.parametrize("undecided", [[True, False, True, False, True], [False] * 5])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_who_has_left_keeps_what_it_left_with(
    launch: Launch, number: int, undecided: List[bool]
) -> None:
    logits = logits_like(5, 10)
    policy = gapped("margin", logits).for_exits(3)
    leaves = policy.leaves(0, logits, Memory())
    here, outcome = torch.tensor(undecided), outcome_of(5, 10, CPU)
    flag, macs = torch.tensor(True), torch.arange(5).double()
    Fused(policy, COSTS, launch, CPU).decide(number, Answer(logits, (), macs), outcome, here, flag)
    came = torch.ones(5, dtype=torch.bool) if number == 0 else torch.tensor(undecided)
    assert outcome.exits.tolist() == [number if each else -1 for each in came.tolist()]
    begun = 0.0 if number == 0 else 0.5
    assert outcome.macs.tolist() == (begun + macs * came).tolist()
    assert torch.equal(outcome.logits, torch.where(came[:, None], logits, torch.tensor(-1.0)))
    if number == 2:
        assert (here.tolist(), bool(flag)) == (undecided, True)
    else:
        assert here.tolist() == (came & ~leaves).tolist()
        assert bool(flag) == bool((came & ~leaves).any())


def test_a_flag_of_many_blocks_is_set_by_one_sample_and_then_reset(launch: Launch) -> None:
    policy = parse("max-probability:0.5").for_exits(3)
    assert isinstance(policy, Threshold)
    kernel = Fused(policy, COSTS, launch, CPU)
    sure = torch.tensor([[9.0] + [0.0] * 9]).repeat(1024, 1)
    for unsure in (0, 500, 1023, None):
        logits = sure.clone()
        if unsure is not None:
            logits[unsure] = 0.0
        undecided, flag = torch.ones(1024, dtype=torch.bool), torch.tensor(unsure is None)
        kernel.decide(1, Answer(logits, ()), outcome_of(1024, 10, CPU), undecided, flag)
        assert bool(flag) == (unsure is not None)
        assert undecided.nonzero().flatten().tolist() == ([] if unsure is None else [unsure])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "batch", "classes"),
    [(1, 1, 10), (5, 9, 3), (5, 255, 10), (40, 255, 10), (1024, 1024, 5)],
)
def test_who_goes_on_is_packed_as_the_operators_do_it(
    launch: Launch, kind: str, rows: int, batch: int, classes: int
) -> None:
    logits = logits_like(rows, classes, seed=rows)
    policy = gapped(kind, logits)
    drawn = torch.randperm(batch, generator=torch.Generator().manual_seed(3))[:rows].sort()[0]
    nobody = rows // 5
    rest = [*drawn[: rows - nobody].tolist(), *[batch] * nobody]
    outcome, order = packed(policy, launch, logits, rest, batch)

    comes = torch.tensor(rest) < batch
    onward = ~policy.leaves(1, logits, Memory()) & comes
    count, went = int(onward.sum()), torch.tensor(rest)[onward].tolist()
    assert int(order.count) == count
    assert order.next_rest.tolist() == [*went, *[batch] * (batch + 1 - count)]
    places = iter(range(count))
    assert order.place.tolist() == [next(places) if each else batch for each in onward.tolist()]
    wanted = outcome_of(batch + 1, classes, CPU)
    for row, sample in enumerate(rest[: rows - nobody]):
        wanted.logits[sample] = logits[row]
        wanted.exits[sample] = 1
        wanted.macs[sample] += COSTS.stages[1]
    for got, expected in zip(vars(outcome).values(), vars(wanted).values()):
        assert same(got.double(), expected.double())


def test_spoilt_samples_are_packed_too_and_the_last_stage_packs_nobody(launch: Launch) -> None:
    logits = spoilt(logits_like(30, 10))
    policy = parse("max-probability:0").for_exits(3)
    assert isinstance(policy, Threshold)
    outcome, order = packed(policy, launch, logits, list(range(30)), 30)
    assert order.next_rest.tolist() == [*range(0, 30, 3), *[30] * 21]
    assert same(outcome.logits[:30], logits)
    order = dataclasses.replace(order, sizes=torch.tensor([30]), cell=torch.tensor(0))
    before = [each.clone() for each in vars(order).values()]
    outcome = outcome_of(31, 10, CPU)
    macs = torch.arange(30).double()
    Fused(policy, COSTS, launch, CPU).pack(2, Answer(logits, (), macs), outcome, order)
    assert outcome.exits.tolist() == [2] * 30 + [-1]
    assert outcome.macs.tolist() == [0.5 + each for each in range(30)] + [0.5]
    for was, now in zip(before, vars(order).values()):
        assert torch.equal(was, now)


def require_alike(got: Adaptive, wanted: Adaptive) -> None:
    assert got.exits.tolist() == wanted.exits.tolist()
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert got.macs.tolist() == wanted.macs.tolist()


@pytest.fixture
def by_kernel(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures of a CPU, whose decisions are the emulated kernels'."""

    def always(policy: Policy, costs: ExitCosts, logits: torch.Tensor) -> Tuple[Fused, str]:
        assert isinstance(policy, Threshold)
        return Fused(policy, costs, launch, CPU), fused.BY_KERNEL

    record_graphs(monkeypatch)
    for module in (device_exit, buckets):
        monkeypatch.setattr(module, "fused_or_why", always)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_a_kernel_ends_answer_as_the_plain_pass(kind: str) -> None:
    net, x = fresh(exits=8), images(16)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    stages = CapturedStages(net, images(16, seed=9), policy, costs)
    states: List[State] = [()] * 9

    def replay(number: int) -> None:
        # What is recorded are torch's operators: a launch of the emulation is none of them.
        with torch.no_grad():
            states[number + 1] = stages._stage(number, states[number], Memory())

    stages.graphs = tuple(SimpleNamespace(replay=lambda n=n: replay(n)) for n in range(8))
    exits = SteppedExits(stages)
    assert exits.description == "host read between captured stages, one kernel decides"
    for given in (x, images(16, seed=5), x):
        wanted = adaptive(net, given, policy, costs)
        require_alike(exits(given), wanted)
    require_mixed(wanted.exits)


@pytest.mark.usefixtures("by_kernel")
def test_each_stage_sets_the_condition_of_its_own_cell(library: ctypes.CDLL) -> None:
    net, x = fresh(exits=3), images(6)
    policy = parse("margin:inf,0")
    stages = CapturedStages(net, x, policy, exit_costs(net, x[:1]))
    assert stages.cells is not None
    assert stages.cells.tolist() == [0, 0, 0]
    stages.cells[:2] = torch.tensor([11, 12])
    for handle in (11, 12):
        library.reset_condition(handle, 99)
    state: State = ()
    with torch.no_grad():
        for number in range(3):
            state = stages._stage(number, state, Memory())
    assert [library.condition(handle) for handle in (11, 12)] == [1, 0]


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_a_kernel_packs_answers_as_the_plain_one(kind: str) -> None:
    net, x = fresh(exits=8), images(19)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    exits = BucketedExits(net, images(19, seed=9), policy, costs)
    assert ", one kernel decides; the device does not choose: " in exits.description

    def replay(number: int, size: int) -> None:
        with torch.no_grad():
            exits._stage(number, size)

    exits._graphs = [
        [
            SimpleNamespace(replay=lambda n=number, s=size: replay(n, s))
            for size in (exits.sizes if number else exits.sizes[-1:])
        ]
        for number in range(8)
    ]  # type: ignore[misc]
    for given in (x, images(19, seed=5), x):
        wanted = adaptive(net, given, policy, costs)
        require_alike(exits(given), wanted)
    require_mixed(wanted.exits)


def test_kernels_without_conditions_decide_the_same(tmp_path: Path) -> None:
    plain = launching(compiled(tmp_path, SOURCE))
    logits = logits_like(40, 10)
    policy = gapped("margin", logits)
    wanted = policy.leaves(1, logits, Memory())
    assert decided(policy, plain, logits).tolist() == wanted.tolist()


@pytest.mark.parametrize("batch", [5, 200])
@pytest.mark.parametrize("everybody", [False, True])
def test_the_condition_of_a_cell_is_what_the_flag_is(
    launch: Launch, library: ctypes.CDLL, batch: int, everybody: bool
) -> None:
    policy = parse(f"max-probability:{0 if everybody else 2}").for_exits(3)
    assert isinstance(policy, Threshold)
    kernel, cells = Fused(policy, COSTS, launch, CPU), torch.tensor([0, 5])
    for cell, before in ((cells[0], 9), (cells[1], 9), (None, 7)):
        library.reset_condition(5, before)
        undecided, flag = torch.ones(batch, dtype=torch.bool), torch.tensor(everybody)
        answer = Answer(logits_like(batch, 10), ())
        kernel.decide(1, answer, outcome_of(batch, 10, CPU), undecided, flag, cell)
        assert bool(flag) == (not everybody)
        told = cell is not None and int(cell) == 5
        assert library.condition(5) == (int(not everybody) if told else before)


@pytest.mark.parametrize(
    ("onward", "place"), [(0, 4), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (40, 3)]
)
def test_the_condition_of_a_packed_stage_is_the_smallest_size_that_holds_all(
    launch: Launch, library: ctypes.CDLL, onward: int, place: int
) -> None:
    sizes = torch.tensor([1, 3, 5, 40])
    logits = torch.zeros(40, 10)
    logits[onward:, 0] = 9.0
    policy = parse("max-probability:0.5").for_exits(3)
    assert isinstance(policy, Threshold)
    outcome, order = packed(policy, launch, logits, list(range(40)), 40)
    for handle in (0, 6):
        library.reset_condition(6, 99)
        told = dataclasses.replace(order, sizes=sizes, cell=torch.tensor(handle))
        kernel = Fused(policy, COSTS, launch, CPU)
        kernel.pack(1, Answer(logits, ()), outcome, told)
        assert int(told.count) == onward
        assert library.condition(6) == (place if handle else 99)


class Chosen:
    """Stages that run as SWITCH nodes would have them run, and which of them did."""

    def __init__(self, exits: BucketedExits, library: ctypes.CDLL) -> None:
        self._exits, self._library = exits, library
        self.ran: List[Tuple[int, int]] = []
        exits._cells[:] = torch.arange(1, exits._cells.shape[0] + 1)

    def launch(self) -> None:
        sizes, cells = self._exits.sizes, self._exits._cells.tolist()
        for handle in cells:
            self._library.reset_condition(handle, len(sizes))
        self.ran = []
        self._run(0, len(sizes) - 1)
        for number in range(1, len(cells)):
            place = self._library.condition(cells[number - 1])
            if place < len(sizes):
                self._run(number, place)

    def _run(self, number: int, place: int) -> None:
        self.ran.append((number, self._exits.sizes[place]))
        with torch.no_grad():
            self._exits._stage(number, self._exits.sizes[place])


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_the_device_chooses_the_smallest_size_that_holds_who_comes(
    library: ctypes.CDLL, kind: str
) -> None:
    net, x = fresh(exits=8), images(19)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    exits = BucketedExits(net, images(19, seed=9), policy, costs)
    chosen = Chosen(exits, library)
    exits._switches = chosen  # type: ignore[assignment]
    for given in (x, images(19, seed=5), x):
        wanted = adaptive(net, given, policy, costs)
        require_alike(exits(given), wanted)
        came = [int((wanted.exits >= number).sum()) for number in range(8)]
        ladder = [min(size for size in exits.sizes if size >= each) for each in came if each]
        assert chosen.ran == list(enumerate([19, *ladder[1:]]))
    require_mixed(wanted.exits)


@pytest.mark.usefixtures("by_kernel")
def test_stages_behind_one_that_all_leave_do_not_run(library: ctypes.CDLL) -> None:
    net, policy = fresh(exits=8), parse("margin:inf,inf,0,inf,inf,inf,inf")
    exits = BucketedExits(net, images(9), policy, exit_costs(net, images(1)))
    chosen = Chosen(exits, library)
    exits._switches = chosen  # type: ignore[assignment]
    assert exits(images(9, seed=5)).exits.tolist() == [2] * 9
    assert chosen.ran == [(0, 9), (1, 9), (2, 9)]


class TestWhyTheOperatorsDecide:
    def test_where_the_kernel_does_not(self) -> None:
        logits = torch.zeros(2, 10)

        class Other(Entropy):
            pass

        assert "patience holds no measure" in why_not(parse("patience:1"), logits)
        assert "other holds no measure" in why_not(Other([0.5]), logits)
        assert "float64" in why_not(parse("margin:0"), logits.double())
        assert "1025 samples" in why_not(parse("margin:0"), torch.zeros(1025, 2))
        assert "on a cpu" in why_not(parse("margin:0"), logits)

    @pytest.mark.usefixtures("recorded")
    def test_the_record_says_so(self) -> None:
        net, x = toy(), images(2)
        for text in ("margin:0", "patience:1"):
            stages = CapturedStages(net, x, parse(text), exit_costs(net, x[:1]))
            packs = BucketedExits(net, x, parse(text), exit_costs(net, x[:1]))
            for said in (SteppedExits(stages).description, packs.description):
                assert ", torch's operators decide: " in said

    def test_where_it_cannot_be_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(device: torch.device) -> Tuple[Launch, bool]:
            raise DeviceError("the driver refused", why="told")

        monkeypatch.setattr(fused, "driver_launch", refuses)
        monkeypatch.setattr(fused, "why_not", lambda *given: "")
        policy = parse("margin:0")
        found = fused.fused_or_why(policy, COSTS, torch.zeros(2, 10))
        assert found == (None, "torch's operators decide: the driver refused: told")


@pytest.mark.parametrize(
    ("lacking", "source"), [("", SOURCE_WITH_CONDITIONS), ("an old driver", SOURCE)]
)
def test_a_launch_goes_to_the_current_stream_with_addresses_and_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str, source: str
) -> None:
    said: List[Any] = []

    class Driver:
        def __init__(self, library: str) -> None:
            said.append(library)

        def make_current(self, device: int) -> None:
            said.append(device)

        def function(self, code: Path, name: str, shared: int, device: int) -> str:
            return f"{name} of {code.name} on {device}"

        def launch(self, *given: Any) -> None:
            said.append(given)

    monkeypatch.setattr(fused, "CudaDriver", Driver)
    monkeypatch.setattr(fused, "why_no_conditions", lambda device, library: lacking)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    streams = iter([11, 12])
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=next(streams))
    )
    asked: List[Tuple[str, str]] = []

    def compile_for(source: str, arch: str) -> Path:
        asked.append((source, arch))
        return tmp_path / "code.cubin"

    start, conditions = fused.driver_launch(torch.device("cuda", 1), "libdriver.so", compile_for)
    assert conditions == (not lacking)
    tensor = torch.zeros(3)
    start("decide", 2, 128, [tensor, None, 7])
    start("pack", 1, 32, [])
    assert asked == [(source, "9.0")]
    numbers = [Pointer(tensor.data_ptr()), Pointer(0), 7]
    assert said == [
        "libdriver.so", 1,
        ("decide of code.cubin on 1", (2, 1), 128, 0, 11, numbers),
        ("pack of code.cubin on 1", (1, 1), 32, 0, 12, []),
    ]  # fmt: skip


def test_a_compiler_older_than_conditions_makes_kernels_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fused, "CudaDriver", lambda library: SimpleNamespace(
        make_current=lambda device: None, function=lambda *given: None))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(fused, "why_no_conditions", lambda device, library: "")
    asked: List[str] = []

    def compile_for(source: str, arch: str) -> Path:
        asked.append(source)
        if source == SOURCE_WITH_CONDITIONS or len(asked) > 2:
            raise KernelBuildError("a kernel does not compile", why="unresolved extern function")
        return tmp_path / "code.cubin"

    device = torch.device("cuda", 1)
    assert not fused.driver_launch(device, "libdriver.so", compile_for)[1]
    assert asked == [SOURCE_WITH_CONDITIONS, SOURCE]
    with pytest.raises(KernelBuildError):
        fused.driver_launch(device, "libdriver.so", compile_for)


@pytest.mark.parametrize("source", [SOURCE, SOURCE_WITH_CONDITIONS])
@pytest.mark.parametrize("arch", ["7.0", "8.0", "9.0"])
@pytest.mark.parametrize("library", find_nvrtcs() or [None])
def test_the_kernels_compile(library: Path, arch: str, source: str) -> None:
    if library is None:
        pytest.skip("no NVRTC is installed")
    compiler = Nvrtc(library)
    if not compiler.knows(arch):
        pytest.skip(f"{library} makes nothing for {arch}")
    if source == SOURCE_WITH_CONDITIONS and compiler.version() < (12, 4):
        pytest.skip(f"{library} is older than conditional nodes")
    code = compiler.compile(source, "decision.cu", arch)
    for name in (b"decide", b"pack"):
        assert b".text." + name in code


@pytest.mark.parametrize("text", [SOURCE, SOURCE_WITH_CONDITIONS])
@pytest.mark.parametrize("arch", ["80", "90"])
def test_the_kernels_compile_with_nvcc_without_a_warning(
    tmp_path: Path, arch: str, text: str
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source, target = tmp_path / "decision.cu", tmp_path / "code.cubin"
    source.write_text(text)
    command = [nvcc, "-std=c++14", "-cubin", "-Werror=all-warnings", "-o", str(target)]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
