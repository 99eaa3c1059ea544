"""The sandwich rule for IResNeXt."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.systems import iresnext as iresnext_system
from narrowgauge_lab.anytime.systems import iresnext_incremental as incremental_system
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.iresnext_parts import Drawn, one_product
from narrowgauge_lab.anytime.systems.iresnext_training import Sandwich
from narrowgauge_lab.augment import Augmentation, Feed
from narrowgauge_lab.data import synthetic_data

CPU = torch.device("cpu")
#: Eager updates of the published form by the loss of all its exits, as trainings of two sizes of
#: batch make them on a GPU. Tensors have memory of their own, so that what reads beyond one faults.
_UPDATES = """
import sys, torch
from narrowgauge_lab.anytime.systems.iresnext import iresnext
torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
blocks, form, dtype = int(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
net = iresnext(form, blocks=blocks, width=1.0, classes=10).train().cuda()
for size in (256, 200, 256, 200):
    images = torch.randn(size, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        answers = net(images)
    labels = torch.arange(size, device="cuda") % 10
    loss = sum(torch.nn.functional.cross_entropy(each.float(), labels) for each in answers)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    torch.cuda.synchronize()
    assert all(bool(torch.isfinite(each).all()) for each in grads)
print("updated")
"""
FORMS = ("shared", "incremental")
PLAIN = Augmentation()


def _net(form: str = "shared") -> torch.nn.Module:
    torch.manual_seed(0)
    return iresnext(form, blocks=1, width=0.25, classes=4).train()


def _batch(count: int = 8) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return images, torch.arange(count) % 4


def _draws(objective: Sandwich, epoch: int) -> torch.Tensor:
    objective.begin_epoch(epoch, torch.nn.Identity())
    return objective._table.clone()


class _OnDevice(Sandwich):
    """As it answers on a GPU, where the host does not know which exits were drawn."""

    def _answers(self, model: torch.nn.Module, images: torch.Tensor, pair: torch.Tensor) -> Any:
        drawn = [Drawn(one, last) for one, last in zip(pair.split(1), (3, 6))]
        return [each.float() for each in model.answers(images, (0, 7), drawn)]  # type: ignore[operator]


class TestSandwich:
    @pytest.mark.parametrize("form", FORMS)
    def test_the_losses_are_of_the_widest_the_narrowest_and_two_between(self, form: str) -> None:
        net, objective = _net(form), Sandwich(seed=3, updates=5, device=CPU)
        pair = objective._table[0].tolist()
        images, labels = _batch()

        losses = objective.losses(net, images, labels)

        narrowest, widest, *between = _net(form).answers(images, (0, 7, *pair))
        teacher = F.softmax(widest, 1).detach()
        by_teacher = [
            torch.mean(torch.sum(-teacher * F.log_softmax(each, 1), 1))
            for each in (narrowest, *between)
        ]
        assert [loss is not None for loss in losses.per_exit] == [True] + [False] * 6 + [True]
        assert torch.allclose(losses.per_exit[0], by_teacher[0])
        assert torch.allclose(losses.per_exit[7], F.cross_entropy(widest, labels))
        assert losses.extra is not None
        assert torch.allclose(losses.extra, by_teacher[1] + by_teacher[2])
        assert torch.allclose(losses.logits, widest)

    def test_the_teacher_learns_nothing_from_those_it_teaches(self) -> None:
        net, objective = _net(), Sandwich(seed=0, updates=1, device=CPU)

        losses = objective.losses(net, *_batch())
        assert losses.per_exit[0] is not None
        assert losses.extra is not None
        (losses.per_exit[0] + losses.extra).backward()

        assert torch.count_nonzero(net.weight.grad[7]) == 0
        assert torch.count_nonzero(net.weight.grad[0]) > 0

    def test_one_exit_is_drawn_from_each_half_with_equal_odds(self) -> None:
        table = _draws(Sandwich(seed=0, updates=3000, device=CPU), 0).numpy()

        for half, exits in enumerate(((1, 2, 3), (4, 5, 6))):
            counts = np.bincount(table[:, half], minlength=8)
            assert counts.sum() == counts[list(exits)].sum() == 3000
            # Six deviations of a binomial count of 3,000 with odds 1/3.
            assert all(abs(counts[exit] - 1000) < 6 * 26 for exit in exits)

    def test_a_resumed_epoch_has_the_same_draws_and_no_other_has(self) -> None:
        going, resumed = (Sandwich(seed=4, updates=40, device=CPU) for _ in range(2))
        first, second = _draws(going, 0), _draws(going, 1)

        assert torch.equal(_draws(resumed, 1), second)
        assert not torch.equal(first, second)
        assert not torch.equal(_draws(Sandwich(seed=5, updates=40, device=CPU), 1), second)

    def test_each_update_has_the_next_draw_and_an_epoch_begins_with_its_first(self) -> None:
        net, objective = _net(), Sandwich(seed=0, updates=3, device=CPU)
        seen = []
        real = net.answers
        net.answers = lambda images, exits: seen.append(exits[2:]) or real(images, exits)

        for _ in range(4):  # one more than was said: it begins again, and never reads beyond
            objective.losses(net, *_batch())
        objective.begin_epoch(0, net)
        objective.losses(net, *_batch())

        table = [tuple(row) for row in objective._table.tolist()]
        assert seen == [*table, table[0], table[0]]

    def test_its_metrics_say_what_is_not_of_one_exit(self) -> None:
        metrics = Sandwich(seed=0, updates=1, device=CPU).metrics()

        assert metrics["random_exits_train_loss"] == ("nat", "computed")
        assert "exit7_test_accuracy" in metrics

    def test_the_widest_learns(self) -> None:
        net, objective = _net(), Sandwich(seed=0, updates=14, device=CPU)
        data = synthetic_data(0, channels=3, size=32, classes=4, train=16, test=1)
        feed = Feed(data.train_images, data.train_labels, (0.5,) * 3, (0.2,) * 3, CPU)
        images, labels = feed.batch(torch.arange(16))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found = []
        for _ in range(14):
            optimizer.zero_grad()
            losses = objective.losses(net, images, labels)
            losses.total(objective.weights).backward()
            optimizer.step()
            found.append(losses.per_exit[7].item())

        assert found[-1] < 0.6 * found[0]

    @pytest.mark.gpu
    def test_a_captured_step_is_the_step_of_the_host(self) -> None:
        device = torch.device("cuda")
        images, labels = (each.to(device) for each in _batch())
        net = _net().to(device)
        objective = Sandwich(seed=0, updates=4, device=device)
        wanted = list(net.parameters())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                losses = objective.losses(net, images, labels)
                torch.autograd.grad(losses.total(objective.weights), wanted)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # On the warm-up's stream: gradients would wait for that one, which captures nothing.
        with torch.cuda.graph(graph, stream=stream):
            losses = objective.losses(net, images, labels)
            torch.autograd.grad(losses.total(objective.weights), wanted)
        objective.begin_epoch(1, net)
        for row in objective._table.tolist():
            graph.replay()
            exits = (0, 7, *row)
            _, widest, *between = net.answers(images, exits)
            teacher = F.softmax(widest, 1).detach()
            expected = sum(-(teacher * F.log_softmax(b, 1)).sum(1).mean() for b in between)
            assert torch.allclose(losses.extra, expected, rtol=1e-3)

    @pytest.mark.filterwarnings("ignore")  # what a compiler warns of is no fault of ours
    @pytest.mark.parametrize(
        "form", [pytest.param("shared", marks=pytest.mark.slow), "incremental"]
    )
    def test_a_compiler_takes_all_of_it(self, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In one graph, which -p compile=true asks for; here without making kernels of it. An
        update that reads which exits were drawn, as a CPU's does by itself, would fall apart."""
        if not torch_compat.compiler_available() or torch_compat.torch_version() < (2, 3):
            pytest.skip("this torch has no torch.compile, or none that says when it reads")
        for system in (iresnext_system, incremental_system):
            monkeypatch.setattr(system, "grouped_conv", one_product)
        net, objective = _net(form), Sandwich(seed=3, updates=5, device=CPU)

        def parts(images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
            found = objective.losses(net, images, labels)
            assert found.extra is not None
            return found.total((1.0,) * 8), found.extra

        expected = parts(*_batch())
        objective.begin_epoch(0, net)
        torch._dynamo.reset()
        compiled = torch.compile(parts, fullgraph=True, dynamic=False, backend="eager")
        got = compiled(*_batch())

        assert torch.allclose(got[0], expected[0], atol=1e-5)
        assert torch.allclose(got[1], expected[1], atol=1e-5)
        assert int(objective._at) == 1


class TestAllExits:
    @pytest.mark.gpu
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("blocks", "form", "dtype"),
        [
            (1, "shared", "bfloat16"),
            (1, "shared", "float16"),
            (1, "shared", "float32"),
            (1, "incremental", "bfloat16"),
            (7, "shared", "bfloat16"),
        ],
    )
    def test_updates_of_either_size_keep_to_their_memory(
        self, blocks: int, form: str, dtype: str
    ) -> None:
        """Twice a training ended in an illegal memory access in its third epoch, by kernels of
        cuDNN that go beyond a grouped convolution's filters (see `grouped_conv`). That is rarely
        nobody's memory: run this under compute-sanitizer, as the job `iresnext-memcheck` does. In a
        process of its own, which a fault of the GPU takes along."""
        paths = os.pathsep.join(sys.path)
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", _UPDATES, str(blocks), form, dtype],
            env=env, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

        assert done.stdout == "updated\n", done.stderr[-2000:]
