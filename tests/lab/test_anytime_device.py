"""Decisions on the device, as far as a host without one can tell: the chain of nodes is put
together by the real calls, against a driver compiled here that runs what it was given."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator, List, Sequence, Union

import pytest
import torch
from exit_cases import Toy, fresh, images, require_mixed, splitting, toy

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_kernels.sparse.nvrtc import Nvrtc, find_nvrtcs
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime import conditional, device_exit
from narrowgauge_lab.anytime.adaptive import Adaptive, adaptive
from narrowgauge_lab.anytime.buckets import BucketedExits
from narrowgauge_lab.anytime.chains import Chain, Switches, chained, switched
from narrowgauge_lab.anytime.conditional import SOURCE, DriverGraphs, why_no_switch, why_not
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.decision_source import SOURCE_WITH_CONDITIONS
from narrowgauge_lab.anytime.device_exit import (
    CapturedStages,
    ConditionalExits,
    EagerExits,
    SteppedExits,
    make_exits,
)
from narrowgauge_lab.anytime.network import Answer, State
from narrowgauge_lab.anytime.policies import parse
from narrowgauge_lab.graphs import CaptureError

CUDA = torch.device("cuda", 0)


class Fake:
    def __init__(self, path: Path) -> None:
        self.path, self.library = str(path), ctypes.CDLL(str(path))
        self.flag = ctypes.c_bool(True)

    def graphs(self, tmp_path: Path) -> DriverGraphs:
        code = tmp_path / "code.cubin"
        code.write_bytes(b"code")
        return DriverGraphs(CUDA, self.path, lambda source, arch: code)

    def launched(self, chain: Chain, flags: Sequence[bool]) -> List[int]:
        """Which pieces a launch runs, where each leaves the next of `flags`."""
        told = (ctypes.c_bool * len(flags))(*flags)
        self.library.fake_script(ctypes.byref(self.flag), told, len(flags))
        chain.launch()
        return self._ran()

    def setting(self, made: Union[Chain, Switches], to: Sequence[int]) -> List[int]:
        """Which pieces a launch runs, where each sets the condition of its cell to the next of
        `to`, whatever that cell holds."""
        handles = (ctypes.c_longlong * len(to))(*made._cells.tolist()[: len(to)])
        values = (ctypes.c_uint * len(to))(*to)
        self.library.fake_set(handles, values, len(to))
        made.launch()
        return self._ran()

    def _ran(self) -> List[int]:
        pieces = (ctypes.c_size_t * 16)()
        return list(pieces[: self.library.fake_ran(pieces)])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("fake_graph_driver.cpp")
    path = tmp_path_factory.mktemp("driver") / "libfake_graphs.so"
    command = ["g++", "-std=c++14", "-shared", "-fPIC", "-O0", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *given: stream)
    made = Fake(library)
    yield made
    made.library.fake_refuse(0)
    made.library.fake_version(12040)


def pieces_of(*numbers: int) -> List[SimpleNamespace]:
    return [SimpleNamespace(raw_cuda_graph=lambda number=number: number) for number in numbers]


def chain_of(fake: Fake, tmp_path: Path, *numbers: int, decides: bool = True) -> Chain:
    flag = SimpleNamespace(data_ptr=lambda: ctypes.addressof(fake.flag)) if decides else None
    return Chain(fake.graphs(tmp_path), pieces_of(*numbers), flag)


@pytest.mark.parametrize(
    ("flags", "ran"),
    [
        ((True, True, True), [11, 12, 13]),
        ((False, True, True), [11]),
        ((True, False, True), [11, 12]),
        ((True, True, False), [11, 12, 13]),
    ],
)
def test_pieces_run_until_one_leaves_a_flag_of_false(
    fake: Fake, tmp_path: Path, flags: Sequence[bool], ran: List[int]
) -> None:
    assert fake.launched(chain_of(fake, tmp_path, 11, 12, 13), flags) == ran


def test_each_launch_decides_anew(fake: Fake, tmp_path: Path) -> None:
    chain = chain_of(fake, tmp_path, 1, 2)
    assert fake.launched(chain, [False]) == [1]
    assert fake.launched(chain, [True]) == [1, 2]
    assert fake.launched(chain, [False]) == [1]


def test_without_a_flag_all_of_them_run(fake: Fake, tmp_path: Path) -> None:
    chain = chain_of(fake, tmp_path, 1, 2, 3, decides=False)
    assert fake.launched(chain, [False, False, False]) == [1, 2, 3]


def test_one_piece_has_nothing_to_decide(fake: Fake, tmp_path: Path) -> None:
    assert fake.launched(chain_of(fake, tmp_path, 7), [False]) == [7]


def test_eight_exits_are_nested_seven_deep(fake: Fake, tmp_path: Path) -> None:
    chain = chain_of(fake, tmp_path, *range(1, 9))
    assert fake.launched(chain, [True] * 8) == list(range(1, 9))
    assert fake.launched(chain, [True] * 5 + [False]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("to", "ran"), [((1, 1), [11, 12, 13]), ((0, 1), [11]), ((1, 0), [11, 12])]
)
def test_pieces_may_set_the_conditions_themselves(
    fake: Fake, tmp_path: Path, to: Sequence[int], ran: List[int]
) -> None:
    cells = torch.zeros(3, dtype=torch.int64)
    chain = Chain(fake.graphs(tmp_path), pieces_of(11, 12, 13), None, cells)
    assert cells[2] == 0
    assert len(set(cells.tolist())) == 3
    assert fake.setting(chain, to) == ran


@pytest.mark.parametrize(
    ("to", "ran"),
    [
        ((2, 0), [10, 23, 31]),
        ((0, 1), [10, 21, 32]),
        ((3, 0), [10]),
        ((1,), [10, 22]),
        ((), [10]),
        ((1, 7), [10, 22]),
    ],
)
def test_of_the_pieces_of_a_switch_the_one_runs_that_was_chosen(
    fake: Fake, tmp_path: Path, to: Sequence[int], ran: List[int]
) -> None:
    fake.library.fake_version(12080)
    cells = torch.zeros(2, dtype=torch.int64)
    later = [pieces_of(21, 22, 23), pieces_of(31, 32)]
    switches = Switches(fake.graphs(tmp_path), pieces_of(10)[0], later, cells)
    assert fake.setting(switches, (1, 1)) == [10, 22, 32]
    assert fake.setting(switches, to) == ran


def test_a_driver_without_switches_refuses_them(fake: Fake, tmp_path: Path) -> None:
    graphs, cells = fake.graphs(tmp_path), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(DeviceError, match="cuGraphAddNode failed"):
        Switches(graphs, pieces_of(1)[0], [pieces_of(2, 3)], cells)


def test_pieces_of_another_graph_are_refused(fake: Fake, tmp_path: Path) -> None:
    cells = torch.zeros(2, dtype=torch.int64)
    kept = Chain(fake.graphs(tmp_path), pieces_of(1, 2), None, cells)
    gc.collect()  # chains of other tests
    before = fake.library.fake_alive()
    with pytest.raises(BadValueError, match="another graph's already"):
        Chain(fake.graphs(tmp_path), pieces_of(1, 2), None, cells)
    assert fake.library.fake_alive() == before
    assert fake.setting(kept, [1]) == [1, 2]


def test_a_handle_that_would_be_none_is_refused(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = fake.graphs(tmp_path)
    monkeypatch.setattr(graphs, "_check", lambda *given: None)
    with pytest.raises(DeviceError, match="the handle 0"):
        graphs.new_condition(1)


def test_a_handle_of_64_bits_fits_into_its_cell() -> None:
    class Driver:
        def __getattr__(self, name: str):
            return {
                "new_condition": lambda *given, **first: 2**64 - 2,
                "add_switch": lambda *given: (5, [6]),
            }.get(name, lambda *given: 1)

    cells = torch.zeros(1, dtype=torch.int64)
    Switches(Driver(), pieces_of(1)[0], [pieces_of(2)], cells)
    assert cells.tolist() == [-2]


def test_a_chain_lets_go_of_its_graph(fake: Fake, tmp_path: Path) -> None:
    before = fake.library.fake_alive()
    chain = chain_of(fake, tmp_path, 1, 2)
    assert fake.library.fake_alive() == before + 1
    del chain
    gc.collect()
    assert fake.library.fake_alive() == before


@pytest.mark.parametrize("call", [1, 2])
def test_what_the_driver_refuses_is_said_with_its_reason(
    fake: Fake, tmp_path: Path, call: int
) -> None:
    fake.library.fake_refuse(call)
    gc.collect()  # chains of other tests
    before = fake.library.fake_alive()
    with pytest.raises(DeviceError, match="failed with") as error:
        chain_of(fake, tmp_path, 1, 2)
    assert fake.library.fake_alive() == before
    assert error.value.why == "refused for a test"


class Noted:
    """What is asked of a driver."""

    def __init__(self) -> None:
        self.said: List[tuple] = []

    def create(self) -> int:
        return 100

    def add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        self.said.append(("child", graph, list(after), child))
        return child + 1

    def new_condition(self, graph: int, at_first: int = -1) -> int:
        self.said.append(("condition", graph, at_first))
        return graph + 8

    def add_setter(self, graph: int, after: Sequence[int], handle: int, flag: int) -> int:
        self.said.append(("set", graph, list(after), handle, flag))
        return graph + 7

    def add_if(self, graph: int, after: Sequence[int], handle: int) -> int:
        self.said.append(("if", graph, list(after), handle))
        return graph + 100

    def add_switch(self, graph: int, after: Sequence[int], handle: int, size: int):
        self.said.append(("switch", graph, list(after), handle))
        return graph + 9, [graph + 100 + place for place in range(size)]


def test_nodes_are_put_in_order_with_the_bodies_inside_each_other() -> None:
    noted = Noted()
    assert chained(noted, [10, 20], flag=5) == (100, [108])
    assert noted.said == [
        ("child", 100, [], 10),
        ("condition", 100, -1),
        ("set", 100, [11], 108, 5),
        ("if", 100, [107], 108),
        ("child", 200, [], 20),
    ]


def test_a_condition_that_a_piece_sets_needs_no_node_of_its_own() -> None:
    noted = Noted()
    assert chained(noted, [10, 20], flag=5, by_cells=True) == (100, [108])
    assert [said[0] for said in noted.said] == ["child", "condition", "if", "child"]
    assert noted.said[2] == ("if", 100, [11], 108)


def test_switches_stand_one_behind_another() -> None:
    noted = Noted()
    assert switched(noted, 10, [[20, 21], [30]]) == (100, [108, 108])
    assert noted.said == [
        ("child", 100, [], 10),
        ("condition", 100, 2),
        ("switch", 100, [11], 108),
        ("child", 200, [], 20),
        ("child", 201, [], 21),
        ("condition", 100, 1),
        ("switch", 100, [109], 108),
        ("child", 200, [], 30),
    ]


@pytest.mark.parametrize("library", find_nvrtcs() or [None])
@pytest.mark.parametrize(
    ("source", "kernel"), [(SOURCE, b"go_on"), (SOURCE_WITH_CONDITIONS, b"decide")]
)
def test_kernels_compile_and_leave_the_condition_to_the_driver(
    library: Path, source: str, kernel: bytes
) -> None:
    if library is None:
        pytest.skip("no NVRTC is installed")
    compiler = Nvrtc(library)
    if compiler.version() < (12, 4) or not compiler.knows("8.0"):
        pytest.skip(f"{library} is older than conditional nodes")
    code = compiler.compile(source, "kernels.cu", "8.0")
    assert kernel in code
    assert b"cudaGraphSetConditional" in code


class TestWhyThereAreNone:
    def test_on_a_cpu(self) -> None:
        assert why_not(torch.device("cpu")) == "a cpu has no CUDA graphs"

    def test_with_a_torch_that_keeps_its_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object, raising=False)
        assert "2.8" in why_not(CUDA)

    def test_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", SimpleNamespace(raw_cuda_graph=0), raising=False
        )
        assert "driver is not here" in why_not(CUDA, "libnone_such.so")

    def test_with_an_old_driver(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", SimpleNamespace(raw_cuda_graph=0), raising=False
        )
        assert why_not(CUDA, fake.path) == ""
        assert why_no_switch(CUDA, fake.path) == "the driver is of CUDA 12.4, not 12.8"
        fake.library.fake_version(12080)
        assert why_no_switch(CUDA, fake.path) == ""
        fake.library.fake_version(12020)
        assert why_not(CUDA, fake.path) == "the driver is of CUDA 12.2, not 12.4"


class TestTheFallbackIsNamed:
    def test_a_cpu_is_the_host(self) -> None:
        net, x = toy(), torch.randn(4, 3, 6, 6)
        exits = make_exits(net, x, parse("max-probability:0.3"))
        assert exits.description.startswith("host read")
        assert "cpu is the host" in exits.description
        wanted = adaptive(net, x, parse("max-probability:0.3"))
        got = exits(x)
        assert torch.equal(got.logits, wanted.logits)
        assert got.macs.tolist() == wanted.macs.tolist()
        # Another size is as good, with nothing captured.
        assert exits(x[:1]).exits.shape == (1,)
        assert exits(x[:0]).exits.shape == (0,)

    @pytest.mark.parametrize("kind", [CaptureError, DeviceError, NotApplicableError])
    def test_what_cannot_be_captured_runs_launch_by_launch(
        self, monkeypatch: pytest.MonkeyPatch, kind: type
    ) -> None:
        def refuses(*given: object) -> None:
            raise kind("stage 1 of the network could not be captured", why="it read")

        monkeypatch.setattr(device_exit, "CapturedStages", refuses)
        exits = make_exits(toy(), OnCuda(torch.randn(1, 3, 6, 6)), parse("entropy:1"))
        assert isinstance(exits, EagerExits)
        assert exits.description.endswith("stage 1 of the network could not be captured: it read")

    def test_without_conditional_nodes_the_host_reads_a_flag(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flags = iter([True, False])
        ran: List[int] = []
        stages = SimpleNamespace(
            images=OnCuda(torch.zeros(1, 3, 6, 6)),
            graphs=[SimpleNamespace(replay=lambda n=n: ran.append(n)) for n in range(3)],
            flag=SimpleNamespace(item=lambda: next(flags)),
            decides="one kernel decides",
            load=lambda images: None,
            answer="answer",
        )
        monkeypatch.setattr(device_exit, "CapturedStages", lambda *given: stages)
        monkeypatch.setattr(device_exit, "why_not", lambda device: "the driver is of CUDA 12.2")
        exits = make_exits(toy(), stages.images, parse("entropy:1"))
        assert exits.description.startswith(
            "host read between captured stages, one kernel decides: "
        )
        assert exits.description.endswith("the driver is of CUDA 12.2")
        assert exits(torch.zeros(1, 3, 6, 6)) == "answer"
        assert ran == [0, 1]

    def test_a_driver_that_refuses_the_chain_is_named_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuses(*given: object) -> None:
            raise DeviceError("cuGraphAddNode failed with 1", why="invalid argument")

        images = OnCuda(torch.zeros(1, 3, 6, 6))
        stages = SimpleNamespace(images=images, graphs=[], flag=None, decides="told")
        monkeypatch.setattr(device_exit, "CapturedStages", lambda *given: stages)
        monkeypatch.setattr(device_exit, "why_not", lambda device: "")
        monkeypatch.setattr(device_exit, "DriverGraphs", refuses)
        exits = make_exits(toy(), images, parse("entropy:1"))
        assert exits.description.endswith("cuGraphAddNode failed with 1: invalid argument")


class OnCuda:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.device, self.shape = tensor, CUDA, tensor.shape

    def __getitem__(self, key: object) -> torch.Tensor:
        return self._tensor[key]


def test_bad_input_is_refused_before_anything_is_captured() -> None:
    x = torch.randn(2, 3, 6, 6)
    with pytest.raises(BadValueError, match="thresholds for a network of 3 exits"):
        make_exits(toy(), x, parse("entropy:1,1,1"))
    with pytest.raises(BadValueError, match="training mode"):
        make_exits(toy().train(), x, parse("entropy:1"))
    with pytest.raises(BadValueError, match="no image"):
        make_exits(toy(), x[:0], parse("entropy:1"))
    with pytest.raises(NotApplicableError, match="cannot be captured here"):
        CapturedStages(toy(), x, parse("entropy:1"), exit_costs(toy(), x[:1]))


def test_the_layouts_are_those_of_cuda_h() -> None:
    assert ctypes.sizeof(conditional._Conditional) == 256
    assert conditional._Conditional.handle.offset == 16
    assert conditional._Conditional.bodies.offset == 32
    assert ctypes.sizeof(conditional._Kernel) == 56
    assert conditional._Kernel.parameters.offset == 40


def ran(stages: CapturedStages) -> List[int]:
    """How often each stage was replayed so far."""
    return [graph.replays for graph in stages.graphs]


def require_alike(got: Adaptive, wanted: Adaptive) -> None:
    assert got.exits.tolist() == wanted.exits.tolist()
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("text", ["entropy:1.37", "patience:1", "margin:0", "margin:inf"])
def test_stages_in_place_answer_as_the_plain_pass(batch: int, text: str) -> None:
    net, policy = toy(exits=4), parse(text)
    costs = exit_costs(net, images(1))
    stages = CapturedStages(net, images(batch), policy, costs)
    for seed in (4, 5, 4):
        x = images(batch, seed)
        wanted, before = adaptive(net, x, policy, costs), ran(stages)
        require_alike(SteppedExits(stages)(x), wanted)
        last = int(wanted.exits.max())
        assert ran(stages) == [each + (n <= last) for n, each in enumerate(before)]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
def test_some_of_a_batch_leave_and_some_go_on_at_eight_exits(kind: str) -> None:
    net, x = fresh(exits=8), images(16)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    # Captured with other images: what they began with must not be what is answered.
    exits = SteppedExits(CapturedStages(net, images(16, seed=9), policy, costs))
    wanted = adaptive(net, x, policy, costs)
    require_mixed(wanted.exits)
    for _ in range(2):
        require_alike(exits(x), wanted)
        other = images(16, seed=5)
        require_alike(exits(other), adaptive(net, other, policy, costs))


@pytest.mark.usefixtures("recorded")
def test_what_a_network_begins_with_is_made_anew_from_the_images() -> None:
    net, policy = fresh(exits=2), parse("margin:inf")
    stages = CapturedStages(net, images(3, seed=9), policy, exit_costs(net, images(1)))
    for seed in (4, 5):
        got = SteppedExits(stages)(images(3, seed)).logits
        assert torch.allclose(got, net(images(3, seed))[1], atol=1e-5)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_that_leaves_in_the_middle_runs_no_stage_beyond(batch: int) -> None:
    net, policy = fresh(exits=8), parse("margin:inf,inf,inf,0,inf,inf,inf")
    stages = CapturedStages(net, images(batch), policy, exit_costs(net, images(1)))
    got = SteppedExits(stages)(images(batch, seed=5))
    assert got.exits.tolist() == [3] * batch
    assert ran(stages) == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.usefixtures("recorded")
def test_images_of_another_batch_are_refused_and_none_are_answered() -> None:
    net, x = toy(), images(2)
    stages = CapturedStages(net, x, parse("entropy:1"), exit_costs(net, x[:1]))
    with pytest.raises(BadValueError, match="captured with"):
        SteppedExits(stages)(x[:1])
    conditional_exits = ConditionalExits.__new__(ConditionalExits)
    conditional_exits._stages = stages
    wanted = adaptive(net, x[:0], parse("entropy:1"))
    for way in (SteppedExits(stages), conditional_exits):
        got = way(x[:0])
        assert got.logits.shape == wanted.logits.shape == (0, 4)
        assert (got.exits.dtype, got.macs.dtype) == (wanted.exits.dtype, wanted.macs.dtype)
        assert got.exits.tolist() == got.macs.tolist() == []
    assert ran(stages) == [0, 0, 0]
    with pytest.raises(BadValueError, match="for no image"):
        CapturedStages(net, x[:0], parse("entropy:1"), exit_costs(net, x[:1]))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("way", [CapturedStages, BucketedExits])
def test_workspaces_are_cleared_after_all_that_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, way: type
) -> None:
    said: List[str] = []

    class Says(Toy):
        def advance(self, exit: int, state: State, head: bool = True) -> Answer:
            said.append("stage")
            return super().advance(exit, state, head)

    net, costs, capture = Says().eval(), exit_costs(toy(), images(1)), torch.cuda.graph
    monkeypatch.setattr(torch_compat, "clear_cublas_workspaces", lambda: said.append("clear"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))

    def graph(*given: object, **named: object) -> object:
        said.append("graph")
        return capture(*given, **named)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    way(net, images(4), parse("entropy:1"), costs)

    cleared = said.index("clear")
    assert said[cleared - 1] == "wait"
    assert "stage" in said[:cleared]
    captures = (len(said) - cleared - 1) // 2
    assert captures >= 3
    assert said[cleared:] == ["clear", *["graph", "stage"] * captures]


@pytest.mark.usefixtures("recorded")
def test_a_network_that_reads_the_device_cannot_be_captured() -> None:
    class Reads(Toy):
        def advance(self, exit: int, state: State, head: bool = True) -> Answer:
            float(state[0].sum())
            return super().advance(exit, state, head)

    net = Reads().eval()
    with pytest.raises(CaptureError, match="stage 0 of the network"):
        CapturedStages(net, images(1), parse("entropy:1"), exit_costs(net, images(1)))
