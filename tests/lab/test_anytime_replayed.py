"""Stages as graphs, captured by a double: what is replayed, what it leaves, what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import List

import pytest
import torch
from exit_cases import Told, Toy, fresh, images, require_mixed, splitting, toy

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.adaptive import adaptive
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.deadline import deadline, measure_stages
from narrowgauge_lab.anytime.network import Answer, State
from narrowgauge_lab.anytime.replayed import ReplayedStages, replayed_or_why


def replays(stages: ReplayedStages) -> List[int]:
    return [graph.replays for graph in stages._graphs]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("batch", [1, 5])
def test_every_exit_answers_as_the_network_for_each_images(batch: int) -> None:
    # Begins with a tensor of its own, which has to follow the images.
    net = fresh(exits=4)
    stages = ReplayedStages(net, images(batch, seed=9))
    for seed in (4, 5, 4):
        x = images(batch, seed)
        for got, wanted in zip(stages(x), net(x)):
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert replays(stages) == [3] * 4


@pytest.mark.usefixtures("recorded")
def test_earlier_answers_stay_while_later_stages_run() -> None:
    net, x = toy(), images(2)
    stages = ReplayedStages(net, x)
    state = stages.begin(x)
    first = stages.advance(0, state)
    before = first.logits.clone()
    stages.advance(2, stages.advance(1, first.state).state)
    assert torch.equal(first.logits, before)
    assert torch.allclose(before, net(x)[0], atol=1e-5)


@pytest.mark.usefixtures("recorded")
def test_one_exit_without_the_heads_before_it() -> None:
    net, x = toy(), images(2)
    stages = ReplayedStages(net, x)
    assert torch.allclose(stages.forward_until(1, x), net(x)[1], atol=1e-5)
    assert stages.advance(2, (stages._images,), head=False).logits.shape == (2, 0)


@pytest.mark.usefixtures("recorded")
def test_a_deadline_runs_the_stages_that_fit() -> None:
    net, x = toy(), images(1)
    stages = ReplayedStages(net, x)
    times = measure_stages(stages, x, passes=3)
    passes = replays(stages)[0]
    got = deadline(stages, x, 60_000, times)
    assert got.exit == 2
    assert torch.allclose(got.logits, net(x)[2], atol=1e-5)
    late = deadline(stages, x, 0, times)
    assert (late.exit, late.late) == (0, True)
    assert torch.allclose(late.logits, net(x)[0], atol=1e-5)
    assert replays(stages) == [passes + 2, passes + 1, passes + 1]
    assert deadline(stages, x[:0], 5).logits.shape == (0, 4)


@pytest.mark.usefixtures("recorded")
def test_macs_of_each_sample_are_those_of_the_pass() -> None:
    logits = torch.arange(12.0).reshape(2, 3, 2)
    net = Told(logits, macs=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).eval()
    stages = ReplayedStages(net, net.images())
    state = stages.begin(net.images().flip(0))
    found = stages.advance(0, state).macs
    assert found is not None
    assert found.tolist() == [3.0, 2.0, 1.0]


@pytest.mark.usefixtures("recorded")
def test_what_graphs_cannot_do_is_refused() -> None:
    net, x = toy(), images(3)
    stages = ReplayedStages(net, x)
    with pytest.raises(BadValueError, match="captured with"):
        stages(x[:1])
    # Cast or carried over they would be answered, but by the clock of another device.
    with pytest.raises(BadValueError, match=r"float64 on cpu for stages captured with .*float32"):
        deadline(stages, x.double(), 5)
    state = stages.begin(x)
    with pytest.raises(BadValueError, match="stage 1 cannot run here"):
        stages.advance(1, state)
    stages.advance(0, state)
    with pytest.raises(BadValueError, match="stage 0 cannot run here"):
        stages.advance(0, state)
    with pytest.raises(BadValueError, match="no exit 7"):
        stages.advance(7, state)
    # Who is selected away would be computed all the same, and others be taken for them.
    stages.begin(x)
    with pytest.raises(BadValueError, match="whole batch"):
        stages.advance(0, (x[:2],))
    with pytest.raises(BadValueError, match="for no image"):
        ReplayedStages(net, x[:0])
    with pytest.raises(BadValueError, match="training mode"):
        ReplayedStages(toy().train(), x)
    with pytest.raises(BadValueError, match="training mode"):
        deadline(stages.train(), x, 5)


@pytest.mark.usefixtures("recorded")
def test_nobody_can_be_selected_away() -> None:
    net, x = fresh(exits=3), images(16)
    policy, costs = splitting(net, x, "margin"), exit_costs(net, x[:1])
    require_mixed(adaptive(net, x, policy, costs).exits)
    with pytest.raises(BadValueError, match="whole batch"):
        adaptive(ReplayedStages(net, x), x, policy, costs)


@pytest.mark.usefixtures("recorded")
def test_a_network_that_reads_the_device_runs_itself_and_it_is_said() -> None:
    class Reads(Toy):
        def advance(self, exit: int, state: State, head: bool = True) -> Answer:
            float(state[0].sum())
            return super().advance(exit, state, head)

    net = Reads().eval()
    found, way = replayed_or_why(net, images(1))
    assert found is net
    assert way.startswith("launch by launch: stage 0 of the network")


def test_without_graphs_the_network_runs_itself_and_it_is_said() -> None:
    net = toy()
    found, way = replayed_or_why(net, images(1))
    assert found is net
    assert "no CUDA graphs on cpu" in way


@pytest.mark.usefixtures("recorded")
def test_the_network_is_kept_while_graphs_read_its_weights() -> None:
    net = toy()
    alive, stages = weakref.ref(net), ReplayedStages(net, images(1))
    del net
    gc.collect()
    assert alive() is not None
    assert list(stages.parameters()) == [], "moving these would move weights away from the graphs"
