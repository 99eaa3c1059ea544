"""The kernels of an exit's decision on a GPU, beside torch's operators there; and the graphs that
they are in, when somebody clears cuBLAS's workspaces."""

from __future__ import annotations

from typing import Callable, List

import pytest
import torch
from exit_cases import Toy, fresh, require_mixed, splitting
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
from torch import nn

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime import buckets, device_exit
from narrowgauge_lab.anytime.adaptive import Adaptive, adaptive
from narrowgauge_lab.anytime.buckets import BucketedExits
from narrowgauge_lab.anytime.conditional import why_not
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.device_exit import (
    CapturedStages,
    ConditionalExits,
    SteppedExits,
    make_exits,
)
from narrowgauge_lab.anytime.fused import Fused, Launch, driver_launch, fused_or_why
from narrowgauge_lab.anytime.network import Answer, State
from narrowgauge_lab.anytime.policies import Memory, Threshold, parse
from narrowgauge_lab.engines.graph import capture

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def ieee() -> None:
    """Without TF32: batches of other sizes differ by its rounding, and who leaves with them."""
    precision.enter("fp32", CUDA)


@pytest.fixture(scope="module")
def launch() -> Launch:
    return driver_launch(CUDA)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [1, 2, 10, 33, 100, 1000, 1500])
@pytest.mark.parametrize("batch", [1, 5, 255, 1024])
def test_the_kernel_decides_as_the_operators_do(
    launch: Launch, kind: str, batch: int, classes: int
) -> None:
    logits = logits_like(batch, classes, seed=batch + classes).cuda()
    policy = gapped(kind, logits)
    wanted = policy.leaves(1, logits, Memory())
    assert decided(policy, launch, logits).tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [1, 10, 1000])
@pytest.mark.parametrize("batch", [1, 255, 1024])
def test_what_is_no_number_stays_whatever_the_threshold(
    launch: Launch, kind: str, batch: int, classes: int
) -> None:
    logits = spoilt(logits_like(batch, classes)).cuda()
    everybody = parse(f"{kind}:{'inf' if kind.startswith('entropy') else '0'}")
    assert isinstance(everybody, Threshold)
    wanted = everybody.leaves(1, logits, Memory())
    assert decided(everybody, launch, logits).tolist() == wanted.tolist()
    assert wanted.tolist() == [number % 3 != 0 for number in range(batch)]


@pytest.mark.parametrize(("text", "rows", "leaves"), exact_cases())
def test_thresholds_met_exactly_and_ties(
    launch: Launch, text: str, rows: List[List[float]], leaves: List[bool]
) -> None:
    policy, logits = parse(text), torch.tensor(rows).cuda()
    assert isinstance(policy, Threshold)
    if text != "max-probability:1e300":  # torch itself refuses to compare with that
        assert policy.leaves(1, logits, Memory()).tolist() == leaves
    assert decided(policy, launch, logits).tolist() == leaves


@pytest.mark.parametrize("kind", KINDS)
def test_measures_are_the_operators_but_for_the_order_of_sums(launch: Launch, kind: str) -> None:
    """Thresholds some units in the last place below and above what the operators measure."""
    logits = logits_like(64, 10).cuda()
    rule = parse(f"{kind}:0")
    assert isinstance(rule, Threshold)
    measured = rule.measure(logits).double()
    for number, value in enumerate(measured.tolist()):
        for limit in (value * (1 - 2e-6) - 1e-6, value * (1 + 2e-6) + 1e-6):
            policy = rule.with_thresholds([max(limit, 0.0)] * 2)
            one = logits[number : number + 1]
            wanted = policy.leaves(1, one, Memory()).tolist()
            assert decided(policy, launch, one).tolist() == wanted


def test_a_flag_of_many_blocks_is_right_launch_after_launch(launch: Launch) -> None:
    policy = parse("max-probability:0.5").for_exits(3)
    assert isinstance(policy, Threshold)
    kernel = Fused(policy, COSTS, launch, CUDA)
    sure = torch.tensor([[9.0] + [0.0] * 9]).repeat(1024, 1).cuda()
    for unsure in [0, 500, 1023, None] * 50:
        logits = sure.clone()
        if unsure is not None:
            logits[unsure] = 0.0
        undecided = torch.ones(1024, dtype=torch.bool, device=CUDA)
        flag = torch.tensor(unsure is None, device=CUDA)
        kernel.decide(1, Answer(logits, ()), outcome_of(1024, 10, CUDA), undecided, flag)
        assert bool(flag) == (unsure is not None)
        assert int(undecided.sum()) == int(unsure is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (5, 9), (40, 255), (255, 255), (1024, 1024)])
def test_who_goes_on_is_packed_in_order(launch: Launch, kind: str, rows: int, batch: int) -> None:
    logits = spoilt(logits_like(rows, 10, seed=rows)).cuda()
    policy = gapped(kind, logits_like(rows, 10, seed=rows).cuda())
    drawn = torch.randperm(batch, generator=torch.Generator().manual_seed(3))[:rows].sort()[0]
    nobody = rows // 5
    rest = [*drawn[: rows - nobody].tolist(), *[batch] * nobody]
    outcome, order = packed(policy, launch, logits, rest, batch)

    onward = ~policy.leaves(1, logits, Memory()).cpu() & (torch.tensor(rest) < batch)
    count = int(onward.sum())
    assert int(order.count) == count
    went = torch.tensor(rest)[onward].tolist()
    assert order.next_rest.tolist() == [*went, *[batch] * (batch + 1 - count)]
    places = iter(range(count))
    assert order.place.tolist() == [next(places) if each else batch for each in onward.tolist()]
    for row, sample in enumerate(rest[: rows - nobody]):
        assert same(outcome.logits[sample], logits[row])
    came = [sample in set(rest[: rows - nobody]) for sample in range(batch)]
    assert outcome.exits.tolist() == [*(1 if each else -1 for each in came), -1]
    assert outcome.macs.tolist() == [*(0.5 + COSTS.stages[1] * each for each in came), 0.5]


def images(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 6, 6, generator=generator).cuda()


def require_alike(got: Adaptive, wanted: Adaptive) -> None:
    assert got.exits.tolist() == wanted.exits.tolist()
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-3, atol=1e-4)
    assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_with_the_kernel_answer_as_those_of_the_operators(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = fresh(exits=8).cuda(), images(16)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    assert fused_or_why(policy.for_exits(8), costs, net(x)[0])[1] == "one kernel decides"
    wanted = adaptive(net, x, policy, costs)
    require_mixed(wanted.exits)
    made: List[Callable[[torch.Tensor], Adaptive]] = []
    for by_operators in (False, True):
        if by_operators:
            for module in (device_exit, buckets):
                monkeypatch.setattr(module, "fused_or_why", lambda *given: (None, "operators"))
        stages = CapturedStages(net, images(16, seed=9), policy, costs)
        made += [SteppedExits(stages), BucketedExits(net, images(16, seed=9), policy, costs)]
        if not why_not(CUDA):
            own = CapturedStages(net, images(16, seed=9), policy, costs)
            made.append(ConditionalExits(own))
    for _ in range(3):
        for way in made:
            require_alike(way(x), wanted)


class Wide(Toy):
    """Heads of long products, which cuBLAS splits: these are what works in a workspace."""

    def __init__(self) -> None:
        super().__init__(exits=3, classes=16)
        self.wide = nn.ModuleList(nn.Linear(8 * 36, 4096) for _ in range(3))
        self.ends = nn.ModuleList(nn.Linear(4096, 16) for _ in range(3))

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        answer = super().advance(exit, state, head)
        if not head:
            return answer
        hidden = torch.relu(self.wide[exit](answer.state[0].flatten(1)))
        return Answer(self.ends[exit](hidden), answer.state)


@pytest.mark.parametrize("batch", [1, 64])
def test_stages_survive_that_somebody_clears_the_workspaces(batch: int) -> None:
    """As the next capture does, with memory given back and taken by somebody else."""
    torch.manual_seed(0)
    net, x = Wide().cuda().eval(), images(batch)
    policy, costs = parse("max-probability:inf"), exit_costs(net, x[:1])
    stages = make_exits(net, x, policy)
    ways: List[Callable[[torch.Tensor], Adaptive]] = [stages, BucketedExits(net, x, policy, costs)]
    with torch.no_grad():
        whole = capture(lambda: net.forward_until(2, x), CUDA)
        wanted = net.forward_until(2, x)
    torch_compat.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    litter = [torch.full((1 << 22,), 7.0, device=CUDA) for _ in range(16)]
    for _ in range(3):
        for way in ways:
            assert torch.allclose(way(x).logits, wanted, rtol=1e-4, atol=1e-5)
        assert torch.allclose(whole(), wanted, rtol=1e-4, atol=1e-5)
    torch.cuda.synchronize()
    assert all(bool((each == 7.0).all()) for each in litter)
