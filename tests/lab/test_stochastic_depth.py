"""Residual branches that are left out at random in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.graphs import make_step
from narrowgauge_lab.networks.cifar_resnet import BasicBlock, cifar_resnet
from narrowgauge_lab.stochastic_depth import (
    RandomBlock,
    add_stochastic_depth,
    fold_stochastic_depth,
    survival,
)

WIDTH = 0.0625


def _net(depth: int = 18) -> nn.Module:
    torch.manual_seed(depth)
    return cifar_resnet(depth, WIDTH)


def _images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class TestSurvival:
    def test_it_falls_linearly_to_that_of_the_last_block(self) -> None:
        # Huang et al. 2016, equation 4: p_l = 1 - l / L (1 - p_L).
        assert survival(5, 0.5) == pytest.approx((0.9, 0.8, 0.7, 0.6, 0.5))

    def test_one_is_plain_training(self) -> None:
        assert survival(3, 1.0) == (1.0, 1.0, 1.0)

    @pytest.mark.parametrize("last", [0.0, -0.1, 1.1, float("nan")])
    def test_what_is_no_probability_is_refused(self, last: float) -> None:
        with pytest.raises(BadValueError, match="survival"):
            survival(3, last)


class TestBlock:
    @staticmethod
    def _block(stays: float) -> RandomBlock:
        torch.manual_seed(0)
        return RandomBlock(BasicBlock(4, 4, 1), stays)

    def test_a_training_batch_has_its_branch_or_its_shortcut_alone(self) -> None:
        block = self._block(0.5).train()
        images = torch.rand(3, 4, 6, 6)
        whole = F.relu(block.block.residual(images) + images)
        left_out = 0

        for _ in range(40):
            answer = block(images)
            out = torch.equal(answer, images)
            left_out += out
            assert out or torch.allclose(answer, whole, atol=1e-6)

        assert 8 < left_out < 32

    def test_eval_multiplies_the_branch_by_its_probability(self) -> None:
        block = self._block(0.7).eval()
        images = torch.rand(3, 4, 6, 6)

        wanted = F.relu(0.7 * block.block.residual(images) + images)
        assert torch.allclose(block(images), wanted, atol=1e-6)

    def test_no_gradient_goes_through_a_branch_that_is_left_out(self) -> None:
        block = self._block(1e-9).train()

        block(torch.rand(3, 4, 6, 6)).sum().backward()

        assert all(not each.grad.any() for each in block.block.parameters())


class TestNetwork:
    @pytest.mark.parametrize("depth", [18, 50])
    def test_every_block_gets_its_probability_and_keeps_its_weights(self, depth: int) -> None:
        net = _net(depth)
        weights = [each.clone() for each in net.parameters()]

        blocks = add_stochastic_depth(net, 0.5)

        found = [m.stays for m in net.modules() if isinstance(m, RandomBlock)]
        assert found == list(survival(blocks, 0.5))
        assert blocks == {18: 8, 50: 16}[depth]
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights))

    @pytest.mark.parametrize("depth", [18, 50])
    def test_folded_it_is_a_plain_network_of_the_same_answers(self, depth: int) -> None:
        net = _net(depth)
        names = list(net.state_dict())
        add_stochastic_depth(net, 0.4)
        net.train()
        net(_images())
        before = net.eval()(_images())

        folded = fold_stochastic_depth(net)

        assert folded == {18: 8, 50: 16}[depth]
        assert list(net.state_dict()) == names
        assert not any(isinstance(m, RandomBlock) for m in net.modules())
        assert torch.allclose(net(_images()), before, rtol=1e-4, atol=1e-5)

    def test_of_a_plain_network_there_is_nothing_to_fold(self) -> None:
        net = _net()
        before = net.eval()(_images())

        assert fold_stochastic_depth(net) == 0
        assert torch.equal(net(_images()), before)

    def test_the_seed_says_which_blocks_are_left_out(self) -> None:
        def answer(seed: int) -> torch.Tensor:
            net = _net()
            add_stochastic_depth(net, 0.2)
            torch.manual_seed(seed)
            return torch.stack([net.train()(_images()) for _ in range(3)])

        assert torch.equal(answer(3), answer(3))
        assert not torch.equal(answer(3), answer(4))


@pytest.mark.gpu
def test_each_replay_of_a_captured_step_draws_anew() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    block = RandomBlock(BasicBlock(4, 4, 1), 0.5).to(device).train()
    images = torch.rand(8, 4, 6, 6, device=device)
    out = torch.zeros((), device=device)

    def body(indices: torch.Tensor) -> None:
        chosen = images.index_select(0, indices)
        with torch.no_grad():
            out.add_((block(chosen) == chosen).all())

    step = make_step("auto", body, 8, device)
    for _ in range(60):
        step(torch.arange(8, device=device))

    assert step.description == "cuda-graph"
    assert 10 < float(out) < 50
