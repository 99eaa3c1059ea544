"""Networks that our GPU engine must not get wrong, though hardly anybody writes them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import operator
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, Optional

import pytest
import torch
from network_cases import everything, images
from own_cases import distance
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.own.gpu import libraries, tuning
from narrowgauge_lab.engines.own.gpu import runner as own_runner
from narrowgauge_lab.engines.own.gpu.candidate import Candidate, Launch
from narrowgauge_lab.engines.own.gpu.formats import FORMATS
from narrowgauge_lab.engines.own.gpu.libraries import convolutions, torch_step
from narrowgauge_lab.engines.own.gpu.lowered import Lowered, Observed, lowered
from narrowgauge_lab.engines.own.gpu.network import _Ready, _There
from narrowgauge_lab.engines.own.gpu.phases import Phases
from narrowgauge_lab.engines.own.gpu.reference import Reference
from narrowgauge_lab.engines.own.gpu.runner import OwnRunner
from narrowgauge_lab.engines.own.gpu.steps import ConvStep, LinearStep, TorchStep
from narrowgauge_lab.triton_hashes import Installation

CPU = torch.device("cpu")
SIZE = 8


class Written(nn.Module):
    """Some layers, put together by a function."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 3, 3, padding=1)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 8, 1)
        self.relu_ = nn.ReLU(inplace=True)
        self.shrink = nn.Conv2d(8, 4, 4, stride=4)
        self.square = nn.Linear(16, 16)
        self.register_buffer("shift", torch.ones(1, 8, SIZE, SIZE))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def made(model: nn.Module, name: str = "fp32") -> Lowered:
    x = images(2, height=SIZE, width=SIZE)
    return lowered(model.eval(), (3, SIZE, SIZE), FORMATS[name], [x], CPU)


def is_right(model: nn.Module) -> bool:
    """Whether the steps are what eager torch computes."""
    x = images(2, seed=5, height=SIZE, width=SIZE)
    with torch.no_grad():
        exact = copy.deepcopy(model).eval().double()(x.double())
    return distance(Reference(made(model))(x), exact) <= 1e-6


def of_kind(network: Lowered, kind: Any) -> List[Any]:
    return [step for step in network.plan.steps if isinstance(step, kind)]


# ---- layers that are called twice


def test_images_are_no_stem_s_where_its_weights_are_read_again() -> None:
    """They were packed for the last call alone: the first one read its images wrongly."""
    model = Written(lambda m, x: m.same(m.same(x)))
    network = made(model)
    one, other = of_kind(network, ConvStep)

    assert one.module == other.module
    assert network.stem is None
    assert not network.weights[one.module].stem
    assert network.memory(2).border == 0
    assert is_right(model)


def test_a_linear_layer_is_packed_for_the_pixels_it_reads() -> None:
    """Called a second time, for features, its columns were those of the second call."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.square(torch.flatten(m.shrink(m.stem(x)), 1))
        return m.square(torch.relu(first))

    model = Written(forward)
    network = made(model)
    assert len(of_kind(network, LinearStep)) == 1
    assert [step.operator for step in of_kind(network, TorchStep)] == ["Linear"]
    assert is_right(model)


def test_a_linear_layer_may_read_features_twice() -> None:
    model = Written(lambda m, x: m.square(torch.relu(m.square(m.shrink(m.stem(x)).mean((2, 3))))))
    model.square = nn.Linear(4, 4)
    assert len(of_kind(made(model), LinearStep)) == 2


# ---- what is written over


def hoisted(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.stem(x)
    way = m.one(x)
    m.relu_(x)
    return m.two(way) + m.other(x)


def sliced(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.stem(x)
    nn.functional.relu(x[:, :4], inplace=True)
    return m.one(x)


def renamed(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.stem(x)
    same = x
    x += m.one(x)
    return m.two(x) + same


@pytest.mark.parametrize("forward", [hoisted, sliced, renamed])
def test_what_is_written_over_by_another_name_is_refused(forward: Any) -> None:
    """A shortcut was put before the write, a slice counted as a copy, and `+=` as `a = a + b`."""
    with pytest.raises(NotApplicableError, match="writes over what is read later"):
        made(Written(forward))


def test_a_shortcut_is_put_first_where_nothing_writes_over_what_it_reads() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.relu_(m.stem(x))
        return m.two(m.relu_(m.one(x))) + m.other(x)

    network = made(Written(forward))
    assert [step.module for step in network.plan.steps] == ["stem", "other", "one", "two"]


@pytest.mark.parametrize("write", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_what_nobody_reads_again_may_be_written_over(write: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        way = m.one(x).sigmoid() + 1
        if write is operator.iadd:
            x += way
        elif write is operator.isub:
            x -= way
        elif write is operator.imul:
            x *= way
        else:
            x /= way
        return m.other(x)

    model = Written(forward)
    assert any(step.node.target is write for step in of_kind(made(model), TorchStep))
    assert is_right(model)


def test_torch_does_not_write_over_what_lies_in_a_concatenation() -> None:
    """Nobody reads the value again by its name, but it is a part of what was put together."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        both = torch.cat([x, m.one(x)], 1)
        x *= 2.0
        return torch.cat([both, m.other(x)], 1)

    network = made(Written(forward))
    memory = network.memory(1)
    (step,) = of_kind(network, TorchStep)
    read = memory.view(step.sources[0])
    read.fill_(3.0)
    torch_step(memory, step, network.modules).start()

    assert memory.place(step.sources[0]).buffer == network.plan.output
    assert torch.equal(memory.view(step.output), torch.full_like(read, 6.0))
    assert torch.equal(read, torch.full_like(read, 3.0))


# ---- what is not what its class says


def doubled(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    del module, given
    return result * 2


@pytest.mark.parametrize("layer", ["stem", "relu_"])
def test_hooks_are_not_left_out(layer: str) -> None:
    model = Written(lambda m, x: m.one(m.relu_(m.stem(x))))
    getattr(model, layer).register_forward_hook(doubled)
    assert len(of_kind(made(model), TorchStep)) == 1
    assert is_right(model)


def test_a_function_that_drops_is_no_identity() -> None:
    always = made(Written(lambda m, x: nn.functional.dropout(m.stem(x))))
    never = made(Written(lambda m, x: nn.functional.dropout(m.stem(x), training=False)))
    assert len(of_kind(always, TorchStep)) == 1
    assert not of_kind(never, TorchStep)


def test_a_concatenation_with_a_tensor_of_the_model_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="more than values"):
        made(Written(lambda m, x: torch.cat([m.stem(x), m.shift], 1)))


# ---- torch's steps


def started(forward: Any, batch: int) -> torch.Tensor:
    """What the only step of torch makes of zeros and of what was counted into its source."""
    network = made(Written(forward))
    memory = network.memory(batch)
    (step,) = of_kind(network, TorchStep)
    source = memory.view(step.sources[0])
    source.copy_(torch.arange(source.numel(), dtype=torch.float32).view(source.shape))
    torch_step(memory, step, network.modules).start()
    return memory.view(step.output)


def test_a_view_of_pixels_is_in_the_order_of_channels() -> None:
    """Pixels lie channels last, where torch has no such view."""
    found = started(lambda m, x: m.square(m.shrink(m.stem(x)).view(-1, 16)), 2)
    assert found.flatten().tolist() == list(range(32))


def test_what_mixes_the_images_is_refused() -> None:
    """Of one channel, [1, B, H, W] has as many elements as [B, 1, H, W]."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        one = m.stem(x).mean(1, keepdim=True)
        return one.permute(1, 0, 2, 3)

    network = made(Written(forward))
    step = of_kind(network, TorchStep)[-1]
    with pytest.raises(OperatorNotTakenError, match="not the batch"):
        torch_step(network.memory(2), step, network.modules).start()


# ---- libraries and tuning


def test_cudnn_is_not_asked_about_values_that_begin_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of 12, 8 and 12 channels fills whole vectors, but begins within one."""
    asked: List[Any] = []
    monkeypatch.setattr(libraries.cudnn, "missing", lambda: "")
    monkeypatch.setattr(
        libraries.cudnn, "plans", lambda problem, *_, **__: asked.append(problem) or []
    )

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        return torch.cat([m.first(x), m.one(x), m.last(x)], 1)

    model = Written(forward)
    model.first, model.last = nn.Conv2d(8, 12, 1), nn.Conv2d(8, 12, 1)
    network = made(model, "fp16")
    memory, answers = network.memory(1), {}
    for step in of_kind(network, ConvStep):
        asked.clear()
        theirs = convolutions(
            memory, memory.lane(beside=False), step, network.modules[step.module],
            network.weights[step.module],
        )  # fmt: skip
        theirs.candidates(1.0)
        answers[step.module] = (len(asked), memory.place(step.output).offset)
        if step.module == "one":
            assert theirs._problem().uncertain() == ""

    assert answers == {"stem": (1, 0), "first": (1, 0), "one": (0, 12), "last": (0, 20)}


def test_threads_that_compile_launch_where_their_caller_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another stream they would share partial sums and tickets with kernels still running."""
    of_thread = threading.local()
    of_thread.stream = "the caller's"
    seen: List[Any] = []
    both = threading.Barrier(2)

    @contextlib.contextmanager
    def stream(given: Any) -> Iterator[None]:
        before, of_thread.stream = getattr(of_thread, "stream", None), given
        yield
        of_thread.stream = before

    def start() -> None:
        seen.append((getattr(of_thread, "stream", None), threading.current_thread().name))
        both.wait(timeout=60.0)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: of_thread.stream)
    monkeypatch.setattr(tuning, "_starts", lambda candidate: candidate.start() or True)
    ways = [Candidate("triton", name, dict, start) for name in "ab"]
    assert tuning._compile([ways], math.inf) == set(map(id, ways))

    assert {where for where, _ in seen} == {"the caller's"}
    assert len({name for _, name in seen}) == 2


@pytest.fixture
def _tuned_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are called; the clock goes on by a second whenever it is looked at; and of two
    candidates the one with the later name is faster."""
    clock = itertools.count()
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(tuning, "_starts", lambda candidate: candidate.start() or True)
    monkeypatch.setattr(
        tuning, "_ranked", lambda usable: sorted(usable, key=lambda each: each.kernel)[::-1]
    )


def _problems(log: List[str], count: int, ways: int) -> List[Launch]:
    def way(name: str) -> Candidate:
        return Candidate("triton", name, lambda: {"name": name}, lambda: log.append(name))

    return [
        Launch(f"layer{i}", "conv2d", (i,), [way(f"{j} of {i}") for j in range(ways)])
        for i in range(count)
    ]


@pytest.mark.usefixtures("_tuned_without_a_gpu")
def test_the_likeliest_of_every_problem_are_compiled_first_while_there_is_time() -> None:
    log: List[str] = []
    launches = _problems(log, 3, 4)
    settled: tuning.Settled = {}
    fresh = tuning.restore([*launches, *launches], settled)
    phases = Phases()
    done = tuning.tune(launches, fresh, settled, lambda: log.append("run"), 25.0, phases)

    assert sorted(log[:3]) == ["0 of 0", "0 of 1", "0 of 2"]
    assert log[3] == "run"
    compiled = set(log[4:])
    assert (done.problems, done.left_out) == (3, 9 - len(compiled))
    network: Any = SimpleNamespace(tunings=[done, done])
    assert OwnRunner(network).searched() == {"problems": 6, "left_out": 2 * done.left_out}
    assert 0 < len(compiled) < 9
    assert {name[0] for name in log[4:7]} <= {"1", "2"}
    assert set(phases.seconds) == {"first", "compile", "search", "measure"}
    assert all(launch.chosen is not None for launch in launches)
    assert tuning.restore(launches, settled) == {}


@pytest.mark.usefixtures("_tuned_without_a_gpu")
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_libraries_are_asked_for_what_is_left_of_the_time(seconds: float) -> None:
    """Without time the likeliest of our own kernels is taken, and no library is waited for."""
    log: List[str] = []
    asked: List[float] = []
    launches = _problems(log, 2, 2)
    for launch in launches:
        launch.others = lambda given: asked.append(given) or []  # type: ignore[func-returns-value]
    settled: tuning.Settled = {}
    fresh = tuning.restore(launches, settled)
    done = tuning.tune(launches, fresh, settled, lambda: None, seconds, Phases())

    assert asked == ([0.0, 0.0] if not seconds else [tuning._MOST_EACH] * 2)
    assert done.left_out == (2 if not seconds else 0)
    chosen = [launch.running().kernel for launch in launches]
    assert chosen == [f"{0 if not seconds else 1} of {i}" for i in range(2)]


def test_images_are_copied_unless_they_lie_where_the_first_lay() -> None:
    """By address, strides, size and dtype; what is in them is read anew."""
    images, given = torch.zeros(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    there: Any = _There(given, lambda: "there")
    ready: Any = _Ready(images, None, None, lambda: "copied", (), there)

    assert [ready(given), ready(given[:]), ready(given.add_(1))] == ["there"] * 3
    assert not images.any()
    others = (given.clone(), given.transpose(2, 3), given.view(torch.int32))
    for other in others:
        assert ready(other) == "copied"
        assert torch.equal(images, other.to(images.dtype))
    assert ready(given) == "there"


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_what_was_observed_is_kept_and_the_network_not_run_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images(2, height=SIZE, width=SIZE)
    model = everything(SIZE, SIZE, torch_step=name == "fp32").eval()

    def again(observed: Optional[Observed]) -> Lowered:
        return lowered(model, (3, SIZE, SIZE), FORMATS[name], [x], CPU, observed=observed)

    first = again(None)
    kept = Observed.of_document(json.loads(json.dumps(first.observed.document(), sort_keys=True)))
    monkeypatch.setattr("narrowgauge_lab.engines.own.gpu.lowered.sizes_of", None)
    monkeypatch.setattr("narrowgauge_lab.engines.own.gpu.lowered.calibrate", None)
    second = again(kept)

    assert (second.sizes, second.scales) == (first.sizes, first.scales)
    assert repr(second.plan) == repr(first.plan)
    assert torch.equal(Reference(second)(x), Reference(first)(x))


@pytest.mark.parametrize(
    "payload",
    [
        b"\x00no JSON", b"[1, 2]", b'{"problem": {}}', b'{"settled": {"a": 3}, "observed": {}}',
        b'{"settled": {}}', b'{"settled": {}, "observed": {"sizes": {}}}',
        b'{"settled": {}, "observed": {"sizes": {"x": 3}, "scales": {}}}',
        b'{"settled": {}, "observed": {"sizes": {"x": ["a"]}, "scales": {}}}',
        b'{"settled": {}, "observed": {"sizes": {}, "scales": {"x": null}}}',
        b'{"settled": {}, "observed": {"sizes": {}, "scales": {}}}',
        b'{"settled": {}, "observed": {"sizes": {}, "scales": {}}, "compiler": {"stamp": ""}}',
    ],
)  # fmt: skip
def test_what_is_no_engine_is_built_anew(payload: bytes) -> None:
    assert own_runner._unusable(payload).startswith("what was kept is no engine")


def test_what_an_engine_keeps_is_read_again(tmp_path: Path) -> None:
    network: Any = SimpleNamespace(network=made(everything(SIZE, SIZE), "int8"), settled={"a": {}})
    module = SimpleNamespace(
        __file__=str(tmp_path / "runtime" / "cache.py"), triton_key=lambda: "3.6-of-files"
    )
    installation = Installation([module])
    payload = json.dumps(own_runner._document(network, installation), sort_keys=True).encode()

    assert own_runner._unusable(payload) == ""
    found = own_runner._read(payload)
    assert (found.settled, found.observed) == ({"a": {}}, network.network.observed)
    assert found.compiler == {"stamp": installation.stamp(), "hash": "3.6-of-files"}
