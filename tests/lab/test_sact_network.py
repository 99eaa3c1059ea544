"""Networks of adaptive depth: shapes, costs, masks and training by the ponder cost."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import pytest
import torch
import torch.nn.functional as F
from sact_cases import images_of, lively

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.systems.pondering import PonderLoss
from narrowgauge_lab.anytime.systems.sact import KINDS, AdaptiveResNet, dilated
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.shared_weights import load_weights
from narrowgauge_scores.areas import RANGES

CPU = torch.device("cpu")


def test_plain_resnet_32_takes_the_macs_of_the_facts() -> None:
    net = AdaptiveResNet("plain").eval()
    image = torch.zeros(1, 3, 32, 32)

    assert count(lambda given: net(given), image).macs == 68_862_592
    assert exit_costs(net, image).cumulative == (68_862_592,)
    assert net.think(image).macs.tolist() == [68_862_592.0]
    assert net.advance(0, net.begin(image)).macs is None


@pytest.mark.parametrize(("data", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_ranges_of_cifar_end_where_plain_resnet_32_does(data: str, classes: int) -> None:
    net = AdaptiveResNet("plain", classes=classes).eval()

    assert RANGES[data].high == count(lambda given: net(given), torch.zeros(1, 3, 32, 32)).macs


@pytest.mark.parametrize("kind", ["act", "sact"])
def test_where_nobody_halts_all_is_needed_that_is_computed(kind: str) -> None:
    net = lively(kind, bias=-50.0)
    images = images_of(2)

    thought = net.think(images)

    assert thought.macs.tolist() == [count(lambda x: net(x), images[:1]).macs] * 2
    assert thought.active.tolist() == [[1.0] * 9] * 2
    assert all(bool((each == 3).all()) for each in thought.steps)


def test_macs_are_those_of_active_positions_counted_by_hand() -> None:
    net = lively()
    images = images_of(3)
    thought = net.think(images)

    for sample in range(3):
        macs = net.conv.weight.numel() * 256 + net.linear.weight.numel()
        for number, block in enumerate(net.blocks):
            steps = thought.steps[number][sample, 0]
            side = steps.shape[0]
            for depth, unit in enumerate(block.units):
                ran = {(i, j) for i in range(side) for j in range(side) if steps[i, j] > depth}
                near = {
                    (i + down, j + across) for i, j in ran
                    for down in (-1, 0, 1) for across in (-1, 0, 1)
                    if 0 <= i + down < side and 0 <= j + across < side
                }  # fmt: skip
                macs += len(near) * unit.conv1.weight.numel()
                macs += len(ran) * unit.conv2.weight.numel()
                if depth < len(block.heads):
                    head = block.heads[depth]
                    macs += len(ran) * head.near_conv.weight.numel()
                    macs += bool(ran) * head.all_conv.weight.numel()
        assert float(thought.macs[sample]) == macs
    assert 0.1 < float(thought.active[:, 1:].mean()) < 0.95


def test_a_position_that_halted_keeps_its_state() -> None:
    unit = lively().blocks[1].units[1]
    x = torch.randn(2, 16, 8, 8)
    mask = torch.zeros(2, 1, 8, 8)
    mask[:, :, 2:5, 3:6] = 1.0

    with torch.no_grad():
        masked, whole = unit(x, mask), unit(x)

    assert torch.equal(masked, torch.where(mask > 0, whole, x))


def test_the_second_convolution_reads_the_dilated_mask_only() -> None:
    """What the account leaves out of the first one is not needed."""
    unit = lively().blocks[0].units[1]
    mask = torch.zeros(1, 1, 8, 8)
    mask[0, 0, 3, 3] = 1.0
    hidden = torch.randn(1, 8, 8, 8)
    spoiled = torch.where(dilated(mask) > 0, hidden, torch.full_like(hidden, 1e6))

    with torch.no_grad():
        right, found = unit.conv2(hidden) * mask, unit.conv2(spoiled) * mask

    assert torch.equal(right, found)
    assert int(dilated(mask).sum()) == 9


def test_the_output_weighs_states_by_the_halting_distribution() -> None:
    """ACT, where states do not depend on who halted, by a loop of its own."""
    net = lively("act")
    images = images_of(4)
    with torch.no_grad():
        hidden = net.conv(images)
        for block in net.blocks:
            x, left = hidden, torch.ones(4)
            output = torch.zeros(())
            running = torch.ones(4, dtype=torch.bool)
            for depth, unit in enumerate(block.units):
                x = unit(x)
                h = block.heads[depth](x).view(4) if depth < 2 else torch.ones(4)
                halts = running & ((left - h <= 0.01) | torch.tensor(depth == 2))
                p = torch.where(halts, left, torch.where(running, h, torch.zeros(4)))
                output = output + p.view(4, 1, 1, 1) * x
                left, running = left - h, running & ~halts
            hidden = output
        wanted = net.answer(hidden.mean((2, 3)))

        assert torch.allclose(net(images)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_one_and_none_are_answered(kind: str, batch: int) -> None:
    net = lively(kind)

    answer = net.advance(0, net.begin(images_of(batch)))

    assert answer.logits.shape == (batch, 10)
    assert (answer.macs is None) == (kind == "plain")
    assert answer.macs is None or answer.macs.shape == (batch,)
    assert net.advance(0, net.begin(images_of(batch)), head=False).logits.shape == (batch, 0)


@pytest.mark.parametrize("size", [12, 24])
def test_other_sizes_of_images_have_maps_of_their_own(size: int) -> None:
    thought = lively().think(images_of(2, size))

    assert [tuple(each.shape[2:]) for each in thought.ponder] == [
        (size, size), (size // 2, size // 2), (size // 4, size // 4)
    ]  # fmt: skip
    assert all(bool((rho >= n).all()) for rho, n in zip(thought.ponder, thought.steps))


@pytest.mark.parametrize(
    ("kind", "units", "width"), [("deep", 5, 16), ("sact", 1, 16), ("act", 5, 0)]
)
def test_networks_that_there_are_not_are_refused(kind: str, units: int, width: int) -> None:
    with pytest.raises(BadValueError, match="no adaptive network"):
        AdaptiveResNet(kind, units, width)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    torch.save(lively("act").state_dict(), tmp_path / "weights.pt")

    with pytest.raises(DataCorruptError):
        load_weights(lively("sact"), tmp_path / "weights.pt")


@pytest.mark.parametrize("kind", ["act", "sact"])
def test_the_price_of_pondering_drives_its_cost_down(kind: str) -> None:
    """A few updates by the ponder cost alone would halt everything at once."""
    net = lively(kind, bias=-2.0).train()
    images, labels = images_of(4), torch.arange(4)
    loss = PonderLoss(1.0, 0, CPU)
    heads = [p for name, p in net.named_parameters() if "heads" in name]
    optimizer = torch.optim.SGD(heads, lr=1.0)
    costs = []
    for _ in range(6):
        found = loss.losses(net, images, labels)
        assert found.extra is not None
        costs.append(float(found.extra.detach()))
        optimizer.zero_grad()
        found.total(loss.weights).backward()
        optimizer.step()

    assert costs[-1] < 0.8 * costs[0]


def test_the_loss_is_cross_entropy_with_the_priced_ponder_cost() -> None:
    net, images, labels = lively(), images_of(4), torch.arange(4)
    loss = PonderLoss(0.02, 4, CPU)
    loss.begin_epoch(3)
    thought = net.think(images)

    found = loss.losses(net, images, labels)

    assert found.extra is not None
    ponder = sum(float(each.detach().mean()) for each in thought.ponder)
    assert float(found.extra.detach()) == pytest.approx(0.015 * ponder, rel=1e-5)
    task = F.cross_entropy(thought.logits, labels)
    assert float(found.total(loss.weights).detach()) == pytest.approx(
        float(task.detach()) + 0.015 * ponder, rel=1e-5
    )


@pytest.mark.parametrize(
    ("warm_up", "wanted"), [(0, (0.5, 0.5, 0.5)), (2, (0.0, 0.25, 0.5)), (1, (0.0, 0.5, 0.5))]
)
def test_the_price_rises_during_the_warm_up(warm_up: int, wanted: Tuple[float, ...]) -> None:
    loss = PonderLoss(0.5, warm_up, CPU)

    assert tuple(loss.price(epoch) for epoch in range(3)) == wanted


@pytest.mark.parametrize(
    ("tau", "warm_up"), [(-1.0, 0), (float("nan"), 0), (float("inf"), 0), (0.1, -1)]
)
def test_prices_that_are_none_are_refused(tau: float, warm_up: int) -> None:
    with pytest.raises(BadValueError, match="price of thinking"):
        PonderLoss(tau, warm_up, CPU)
