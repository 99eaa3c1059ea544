"""Small networks with several exits, which the tests of their drivers run, and doubles of the
CUDA graphs that the drivers capture."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, List, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.policies import Threshold, parse

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # torch 1.8, which has no CUDA graphs either
    TorchDispatchMode = None

__all__ = [
    "Fresh", "Recorded", "Told", "Toy", "fresh", "images", "logits_of", "record_graphs",
    "require_mixed", "splitting", "toy",
]  # fmt: skip


class Toy(AnytimeNetwork):
    """Convolutions of eight channels, each with a head as small as can be."""

    def __init__(self, exits: int = 3, classes: int = 4, channels: int = 8) -> None:
        super().__init__()
        self.exits, self.classes = exits, classes
        widths = [3] + [channels] * exits
        self.trunk = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in zip(widths, widths[1:])
        )
        self.heads = nn.ModuleList(nn.Linear(channels, classes) for _ in range(exits))
        #: Images that each stage was given, in order: what compaction saves.
        self.given: List[int] = []

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork."""
        (x,) = state
        self.given.append(x.shape[0])
        x = torch.relu(self.trunk[exit](x))
        if not head:
            return Answer(x.new_zeros((x.shape[0], 0)), (x,))
        return Answer(self.heads[exit](x.mean(dim=(2, 3))), (x,))


class Fresh(Toy):
    """Begins with a tensor of its own: a view of the images would follow them by itself."""

    def begin(self, images: torch.Tensor) -> State:
        """See AnytimeNetwork."""
        return (images * 2.0,)


class Told(AnytimeNetwork):
    """Answers with logits that it was told, sample by sample; `macs` [exits, N] likewise."""

    def __init__(self, logits: torch.Tensor, macs: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        self.exits, _, self.classes = logits.shape
        self.register_buffer("logits", logits)
        self.register_buffer("macs", macs)

    def begin(self, images: torch.Tensor) -> State:
        """Which samples they are: the images' first value."""
        return (images.reshape(len(images), -1)[:, 0].long(),)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork."""
        (samples,) = state
        macs = None if self.macs is None else self.macs[exit][samples]
        return Answer(self.logits[exit][samples], state, macs)

    def images(self) -> torch.Tensor:
        """One for each sample that it was told of."""
        return torch.arange(self.logits.shape[1]).float().reshape(-1, 1, 1, 1)


def images(batch: int, seed: int = 4) -> torch.Tensor:
    """For `Toy`."""
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def toy(exits: int = 3, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy(exits).eval()


def fresh(exits: int = 8, seed: int = 0) -> Fresh:
    """With weights large enough that samples differ behind many convolutions too."""
    torch.manual_seed(seed)
    net = Fresh(exits).eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2.5)
    return net


def splitting(net: AnytimeNetwork, x: torch.Tensor, kind: str) -> Threshold:
    """The policy by which some of those who come leave at each exit and some go on, by the widest
    gap in the middle of the network's own confidences; nobody leaves alone."""
    rule = parse(f"{kind}:0")
    assert isinstance(rule, Threshold)
    with torch.no_grad():
        measured = [rule.measure(logits).double().cpu() for logits in net(x)[:-1]]
    here = torch.arange(x.shape[0])
    thresholds: List[float] = []
    for values in measured:
        ordered, count = values[here].sort()[0], here.shape[0]
        if count < 2:
            thresholds.append(0.0 if rule.below else float("inf"))
            continue
        gaps = ordered[1:] - ordered[:-1]
        first, beyond = (count - 1) // 4, max((count - 1) // 4 + 1, 3 * (count - 1) // 4)
        place = first + int(gaps[first:beyond].argmax())
        # Another batch size sums in another order: nobody may be as near as that.
        assert float(gaps[place]) > 1e-5
        thresholds.append(float(ordered[place : place + 2].mean()))
        leaves = values[here] < thresholds[-1]
        here = here[~leaves if rule.below else leaves]
    return rule.with_thresholds(thresholds)


def require_mixed(exits: torch.Tensor) -> None:
    """Some leave at the first exit and some go on, and these do not all leave together."""
    survivors = int((exits > 0).sum())
    assert 0 < survivors < exits.shape[0]
    assert len(set(exits.tolist())) > 2


class Recorded:
    """A captured graph on a CPU: a replay does to the same tensors what the capture did, and runs
    no Python."""

    def __init__(self) -> None:
        self.calls: List[Tuple[Any, tuple, dict, Any]] = []
        self.replays = 0

    def capture_end(self) -> None:
        """See torch.cuda.CUDAGraph; whoever counts work looks for it."""

    def replay(self) -> None:
        """See torch.cuda.CUDAGraph."""
        self.replays += 1
        with torch.no_grad():
            for function, given, named, made in self.calls:
                again = function(*given, **named)
                for old, new in zip(_tensors(made), _tensors(again)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is captured from here on be captured by Recorded."""
    if TorchDispatchMode is None:
        pytest.skip("this torch cannot record what it does, and has no CUDA graphs to double")

    class Recorder(TorchDispatchMode):
        def __init__(self, graph: Recorded) -> None:
            super().__init__()
            self.graph = graph

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.aten._local_scalar_dense.default:
                raise RuntimeError("operation not permitted when stream is capturing")
            made = function(*args, **(kwargs or {}))
            self.graph.calls.append((function, args, kwargs or {}, made))
            return made

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch_compat, "graphs_available", lambda device: True)
    doubles = {
        "CUDAGraph": Recorded,
        "Stream": lambda device: stream,
        "current_stream": lambda *given: stream,
        "graph": lambda graph, pool=None, stream=None: Recorder(graph),
        "graph_pool_handle": lambda: None,
        "stream": lambda given: contextlib.nullcontext(),
        "synchronize": lambda *given: None,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double, raising=False)


def _tensors(made: Any) -> List[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [each for each in made if isinstance(each, torch.Tensor)] if made is not None else []


def logits_of(*exits: Sequence[float], classes: int = 2) -> torch.Tensor:
    """[exits, N, classes]: for each exit and sample how sure it is of class 0 (a logit)."""
    told = torch.zeros(len(exits), len(exits[0]), classes)
    told[:, :, 0] = torch.tensor(exits)
    return told
