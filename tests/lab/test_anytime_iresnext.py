"""IResNeXt: costs as published, exits alone and together, slices that nobody else touches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from anytime_cases import AnytimeCase, recipe

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab import checkpoint, torch_compat
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.network import select
from narrowgauge_lab.anytime.systems import iresnext as iresnext_system
from narrowgauge_lab.anytime.systems import iresnext_parts
from narrowgauge_lab.anytime.systems.iresnext import SharedIResNeXt, iresnext
from narrowgauge_lab.anytime.systems.iresnext_incremental import IncrementalIResNeXt
from narrowgauge_lab.anytime.systems.iresnext_parts import (
    Drawn,
    ExitNorm,
    across_groups,
    one_product,
    prefixes,
)
from narrowgauge_lab.errors import DataCorruptError

FORMS = ("shared", "incremental")


def _small(form: str, seed: int = 0) -> torch.nn.Module:
    """One block a stage, a quarter wide, normalisation that is not the identity."""
    torch.manual_seed(seed)
    net = iresnext(form, blocks=1, width=0.25, classes=5)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if "norm" in name and tensor.is_floating_point():
            spread = torch.rand_like(tensor) * 0.5
            tensor.data.copy_(spread + 0.75 if "weight" in name or "var" in name else spread - 0.25)
    return net.eval()


def _images(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def as_published() -> ExitCosts:
    return exit_costs(iresnext("shared", blocks=7), _images(1))


class TestCosts:
    """In MACs of one image; the notes' figures are in millions, of two decimals."""

    def test_of_the_papers_network(self, as_published: ExitCosts) -> None:
        measured = [15.88, 29.99, 44.09, 58.20, 72.31, 86.41, 100.52, 114.63]
        assert [round(each / 1e6, 2) for each in as_published.direct] == measured
        assert sum(p.numel() for p in iresnext("shared", blocks=7).parameters()) == 876_240

    def test_of_the_programs_default(self) -> None:
        costs = exit_costs(iresnext("shared", blocks=3), _images(1))

        assert round(costs.direct[0] / 1e6, 1) == 7.8
        assert round(costs.direct[-1] / 1e6, 1) == 50.1

    def test_all_exits_of_shared_cost_their_sum(self, as_published: ExitCosts) -> None:
        costs = as_published

        assert costs.cumulative[-1] == sum(costs.direct)
        assert round(costs.cumulative[-1] / 1e6) == 522
        assert costs.trunk == (0,) * 8  # without its head, nothing of an exit is of use

    def test_all_exits_of_incremental_cost_the_last_one_and_the_heads(self) -> None:
        costs = exit_costs(iresnext("incremental", blocks=1), _images(1))

        assert costs.cumulative[-1] == costs.direct[-1] + sum(costs.heads[:-1])
        assert costs.heads == tuple(32 * (k + 1) * 10 for k in range(8))

    def test_a_step_of_incremental_does_the_new_branchs_work_alone(self) -> None:
        costs = exit_costs(iresnext("incremental", blocks=2), _images(1))

        for group, found in enumerate(costs.trunk):
            reduce, grouped, expand = 8 * (group + 1) * 4, 4 * 4 * 9, 4 * 8
            assert found == 1024 * (3 * 9 * 8 + 3 * 2 * (reduce + grouped + expand))

    def test_are_not_those_of_zeros_between_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a GPU does beside the network's own work is not counted: a copy on a CPU is."""
        net, images = _small("shared"), _images(1)
        expected = exit_costs(net, images)

        with monkeypatch.context() as patched:
            patched.setattr(iresnext_system, "grouped_conv", one_product)
            more = exit_costs(net, images)
        elsewhere = SimpleNamespace(device=torch.device("cuda"), float=lambda: images)
        copied, example = net.double().train().counted(elsewhere)

        assert more.direct[-1] > expected.direct[-1]
        assert exit_costs(copied, example) == expected
        assert copied is not net
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
        assert net.counted(images) == (net, images)

    @pytest.mark.gpu
    @pytest.mark.parametrize("form", FORMS)
    def test_are_those_of_a_processor_on_a_gpu(self, form: str) -> None:
        net, images = _small(form), _images(1)
        expected = exit_costs(net, images)

        assert exit_costs(net.cuda().half(), images.cuda().half()) == expected
        assert all(parameter.is_cuda for parameter in net.parameters())

    @pytest.mark.parametrize("form", FORMS)
    def test_a_quarter_of_the_width(self, form: str) -> None:
        whole = exit_costs(iresnext(form, 1), _images(1)).direct[-1]
        quarter = exit_costs(iresnext(form, 1, width=0.25), _images(1)).direct[-1]

        assert whole / 16 < quarter < whole / 10  # the stem's images stay 3 channels


def _published(net: SharedIResNeXt, images: torch.Tensor, exit: int) -> torch.Tensor:
    """An exit in the plainest words, its last convolution padded with zeros as in the program."""
    stream = F.conv2d(images, net.stem, padding=1)
    for block in net.blocks:
        if block.shape.narrows:
            stream = F.avg_pool2d(stream, 2)
            stream = torch.cat((stream, torch.zeros_like(stream)), 1)
        width = block.shape.branch * (exit + 1)
        hidden = _norm(block.norm1, stream, exit)
        hidden = _norm(block.norm2, F.conv2d(hidden, block.reduce[:width]), exit)
        hidden = F.conv2d(hidden, block.grouped[:width], padding=1, groups=exit + 1)
        hidden = _norm(block.norm3, hidden, exit)
        filled = torch.zeros(len(images), block.shape.inner, *hidden.shape[2:])
        filled[:, :width] = hidden
        stream = stream + F.conv2d(filled, block.expand)
    pooled = F.avg_pool2d(_norm(net.norm, stream, exit), 8).flatten(1)
    return F.linear(pooled, net.weight[exit], net.bias[exit])


def _norm(norm: ExitNorm, images: torch.Tensor, exit: int) -> torch.Tensor:
    start = sum(norm.sizes[:exit])
    own, size = slice(start, start + norm.sizes[exit]), norm.sizes[exit]
    mean, var = norm.running_mean[exit, :size], norm.running_var[exit, :size]
    shape = (1, -1, 1, 1)
    normal = (images - mean.view(shape)) / (var.view(shape) + norm.eps).sqrt()
    return torch.relu(normal * norm.weight[own].view(shape) + norm.bias[own].view(shape))


class TestShared:
    @pytest.mark.parametrize("exit", [0, 3, 7])
    def test_an_exit_is_the_published_network(self, exit: int) -> None:
        net = _small("shared")
        images = _images()

        found = net.forward_until(exit, images)

        assert torch.allclose(found, _published(net, images, exit), atol=1e-5)

    def test_all_exits_are_each_exit_alone(self) -> None:
        net = _small("shared")
        together = net(_images())

        assert len(together) == net.exits == 8
        for exit, logits in enumerate(together):
            assert torch.allclose(logits, net.forward_until(exit, _images()), atol=1e-6)

    def test_training_an_exit_moves_its_statistics_alone(self) -> None:
        net = _small("shared").train()
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}

        net.answers(_images(), (3,))

        for name, buffer in net.named_buffers():
            if "running" in name:
                rows = [k for k in range(8) if not torch.equal(buffer[k], before[name][k])]
                assert rows == [3], name

    def test_exits_share_convolutions_and_nothing_else(self) -> None:
        net = _small("shared").train()
        net.answers(_images(), (1,))[0].sum().backward()
        block = net.blocks[0]

        width = 2 * block.shape.branch
        assert torch.count_nonzero(block.reduce.grad[:width]) > 0
        assert torch.count_nonzero(block.reduce.grad[width:]) == 0
        assert torch.count_nonzero(block.expand.grad[:, width:]) == 0
        moved = torch.nonzero(block.norm2.weight.grad).flatten().tolist()
        assert set(moved) <= set(range(block.shape.branch, 3 * block.shape.branch))
        assert torch.count_nonzero(net.weight.grad[2:]) == 0

    def test_stages_carry_the_images_alone(self) -> None:
        net = _small("shared")
        images = _images()
        answer = net.advance(2, net.begin(images), head=False)

        assert answer.logits.shape == (3, 0)
        assert len(answer.state) == 1
        assert answer.state[0] is images


class TestDrawn:
    """An exit that only the device knows gives what it gives where the host knows it too."""

    @pytest.mark.parametrize(("exit", "within"), [(1, 3), (3, 3), (5, 6), (0, 7), (7, 7)])
    @pytest.mark.parametrize("form", FORMS)
    def test_logits_gradients_and_statistics(self, form: str, exit: int, within: int) -> None:
        found = []
        for drawn in (False, True):
            net = _small(form).train()
            unknown = Drawn(torch.tensor([exit]), within)
            logits = net.answers(_images(), (), [unknown]) if drawn else net.answers(
                _images(), (exit,)
            )  # fmt: skip
            (logits[0] ** 2).sum().backward()
            found.append((logits[0], net))

        (known, one), (unknown_logits, other) = found
        assert torch.allclose(known, unknown_logits, atol=1e-5)
        for (name, parameter), again in zip(one.named_parameters(), other.parameters()):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            given = torch.zeros_like(again) if again.grad is None else again.grad
            assert torch.allclose(expected, given, rtol=1e-3, atol=1e-4), name
        assert _used_statistics_agree(one, other, exit)

    def test_other_exits_can_be_trained_in_the_same_step(self) -> None:
        net = _small("shared").train()
        drawn = [Drawn(torch.tensor([2]), 3), Drawn(torch.tensor([5]), 6)]

        logits = net.answers(_images(), (0, 7), drawn)
        sum(each.sum() for each in logits).backward()

        known = _small("shared").train().answers(_images(), (0, 7, 2, 5))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(logits, known))


def _used_statistics_agree(one: torch.nn.Module, other: torch.nn.Module, exit: int) -> bool:
    pairs = [
        (a, b)
        for a, b in zip(one.modules(), other.modules())
        if isinstance(a, (ExitNorm, torch.nn.BatchNorm2d))
    ]
    agreed = []
    for a, b in pairs:
        used = (exit, slice(a.sizes[exit])) if isinstance(a, ExitNorm) else (slice(None),)
        agreed.append(torch.allclose(a.running_mean[used], b.running_mean[used], atol=1e-6))
        agreed.append(torch.allclose(a.running_var[used], b.running_var[used], atol=1e-5))
    return bool(agreed) and all(agreed)


class TestIncremental:
    def test_step_by_step_is_each_exit_alone_bit_for_bit(self) -> None:
        net = _small("incremental")
        with torch.no_grad():
            stepped = net(_images())
            alone = [net.forward_until(exit, _images()) for exit in range(8)]

        assert all(torch.equal(a, b) for a, b in zip(stepped, alone))

    @pytest.mark.parametrize("training", [False, True])
    def test_all_branches_at_once_are_the_branches_one_by_one(self, training: bool) -> None:
        net = _small("incremental").train(training)
        fused = net.answers(_images(), range(8))
        again = _small("incremental").train(training)
        state, stepped = again.begin(_images()), []
        for exit in range(8):
            answer = again.advance(exit, state)
            state = answer.state
            stepped.append(answer.logits)

        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(fused, stepped))
        assert _used_statistics_agree(net, again, 7)

    @pytest.mark.parametrize("together", [False, True])
    def test_a_branch_sees_no_later_one(self, together: bool) -> None:
        net, other = _small("incremental"), _small("incremental")
        _disturb_from(other, 4)
        with torch.no_grad():
            one, two = (
                each.answers(_images(), range(8)) if together else each(_images())
                for each in (net, other)
            )

        equal = [torch.equal(a, b) for a, b in zip(one, two)]
        assert equal == [True] * 4 + [False] * 4

    def test_an_exit_alone_is_a_network_without_the_later_branches(self) -> None:
        """In the plainest words: dense convolutions whose weights have zeros elsewhere."""
        net = _small("incremental")
        images = _images()

        found = net.forward_until(5, images)

        assert torch.allclose(found, _dense(net, images, 5), atol=1e-5)

    def test_survivors_go_on_with_what_was_computed(self) -> None:
        net = _small("incremental")
        chosen = torch.tensor([2, 0])
        with torch.no_grad():
            state = net.begin(_images(4))
            for exit in range(3):
                state = net.advance(exit, state).state
            part = net.advance(3, select(state, chosen)).logits
            whole = net.advance(3, state).logits

        assert torch.allclose(part, whole[chosen], atol=1e-6)

    def test_without_a_head_only_the_logits_are_missing(self) -> None:
        net = _small("incremental")
        with torch.no_grad():
            bare = net.advance(0, net.begin(_images()), head=False)
            full = net.advance(0, net.begin(_images()))

        assert bare.logits.shape == (3, 0)
        assert all(torch.equal(a, b) for a, b in zip(bare.state, full.state))


def _disturb_from(net: IncrementalIResNeXt, first: int) -> None:
    """Change every weight of the branches from `first` on."""
    for name, parameter in net.named_parameters():
        listed = [part for part in name.split(".") if part.isdigit()]
        if "reduce" in name or "heads" in name:
            if int(listed[-1]) >= first:
                parameter.data.add_(1.0)
        else:
            parameter.data[parameter.shape[0] // 8 * first :].add_(1.0)


def _dense(net: IncrementalIResNeXt, images: torch.Tensor, exit: int) -> torch.Tensor:
    groups = exit + 1
    stream = F.conv2d(images, _first(net.stem, groups), padding=1)
    for block in net.blocks:
        if block.shape.narrows:
            parts = F.avg_pool2d(stream, 2).chunk(groups, 1)
            stream = torch.cat([torch.cat((p, torch.zeros_like(p)), 1) for p in parts], 1)
        reduce = torch.zeros(block.shape.branch * groups, stream.shape[1], 1, 1)
        for group in range(groups):
            part = block.reduce[group]
            rows = slice(group * len(part), (group + 1) * len(part))
            reduce[rows, : part.shape[1]] = part
        hidden = F.conv2d(_batch_norm(block.norm1, stream), reduce)
        grouped = _first(block.grouped, groups)
        hidden = F.conv2d(_batch_norm(block.norm2, hidden), grouped, padding=1, groups=groups)
        expand = _first(block.expand, groups)
        stream = stream + F.conv2d(_batch_norm(block.norm3, hidden), expand, groups=groups)
    return net.heads[exit](_batch_norm(net.norm, stream).mean((2, 3)))


def _first(weight: torch.Tensor, groups: int) -> torch.Tensor:
    return weight[: len(weight) // 8 * groups]


def _batch_norm(norm: torch.nn.BatchNorm2d, images: torch.Tensor) -> torch.Tensor:
    count = images.shape[1]
    four = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return torch.relu(F.batch_norm(images, *(each[:count] for each in four)))


class TestBoth:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("count", [0, 1])
    def test_batches_of_one_and_none(self, form: str, count: int) -> None:
        with torch.no_grad():
            logits = _small(form)(_images(count))

        assert [tuple(each.shape) for each in logits] == [(count, 5)] * 8

    @pytest.mark.parametrize("form", FORMS)
    def test_an_exit_that_there_is_not(self, form: str) -> None:
        with pytest.raises(BadValueError, match="exit 8"):
            _small(form).forward_until(8, _images())

    @pytest.mark.parametrize(
        ("asked", "named"),
        [
            ({"blocks": 0}, "0 blocks"),
            ({"width": 0.3}, "width 0.3"),
            ({"width": float("nan")}, "width nan"),
            ({"classes": 1}, "1 classes"),
        ],
    )
    def test_sizes_that_it_cannot_have(self, asked: dict, named: str) -> None:
        with pytest.raises(BadValueError, match=named):
            iresnext("shared", **asked)

    def test_a_form_that_there_is_not(self) -> None:
        with pytest.raises(UnknownNameError, match="nested"):
            iresnext("nested")

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("changed", ["variant", "blocks", "width", "classes"])
    def test_a_checkpoint_of_another_architecture_is_refused(
        self, tmp_path: Path, form: str, changed: str
    ) -> None:
        asked: dict = {"variant": form, "blocks": 1, "width": 0.25, "classes": 5}
        other = {"variant": FORMS[form == "shared"], "blocks": 2, "width": 0.5, "classes": 4}
        weights = tmp_path / "weights.pt"
        checkpoint.write_weights(weights, iresnext(**{**asked, changed: other[changed]}))
        case, net = AnytimeCase(tmp_path / "row"), iresnext(**asked)

        with pytest.raises(DataCorruptError) as caught:
            case.run(recipe(), net=net, weights=weights)
        assert caught.value.what == f"{weights} does not hold weights of this {type(net).__name__}"
        assert "state dict of the same network" in caught.value.next_step
        assert case.row().metric("train_loss") is None

    @pytest.mark.parametrize("form", FORMS)
    def test_weights_come_back(self, form: str) -> None:
        net, again = _small(form, 0), _small(form, 3)
        again.load_state_dict(net.state_dict())
        with torch.no_grad():
            pairs: List[Tuple[torch.Tensor, ...]] = list(zip(net(_images()), again(_images())))

        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dim", [0, 1])
def test_prefixes_add_their_gradients(dim: int) -> None:
    weights = np.random.RandomState(0).randn(6, 6).astype(np.float32)
    found = []
    for own in (True, False):
        weight = torch.from_numpy(weights.copy()).requires_grad_()
        sizes = (2, 6, 4)
        parts = prefixes(weight, dim, sizes) if own else [weight.narrow(dim, 0, s) for s in sizes]
        assert all(part.data_ptr() == weight.data_ptr() for part in parts)
        loss = sum((part**2).sum() * (k + 1) for k, part in enumerate(parts))
        found.append(torch.autograd.grad(loss, weight)[0])

    assert torch.allclose(*found)


def test_prefixes_of_which_one_is_not_used() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    first, _ = prefixes(weight, 0, (1, 4))

    first.sum().backward()

    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0] * 3] + [[0.0] * 3] * 3


class TestGroupedConvolution:
    """By one product of all channels, as a GPU gets it; see `grouped_conv`."""

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize(
        ("groups", "before", "after"), [(1, 4, 4), (3, 4, 4), (8, 8, 8), (7, 1, 1), (8, 4, 3)]
    )
    def test_across_groups_it_is_the_same_with_the_same_gradients(
        self, groups: int, before: int, after: int, size: int, layout: Any
    ) -> None:
        x, weight, given = _grouped_case(groups, before, after, size)
        x = x.contiguous(memory_format=layout).requires_grad_()

        expected = F.conv2d(x, weight, padding=size // 2, groups=groups)
        found = one_product(x, weight, groups)

        assert torch.allclose(found, expected, atol=1e-12)
        for one, other in zip(
            torch.autograd.grad(found, (x, weight), given),
            torch.autograd.grad(expected, (x, weight), given),
        ):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=1e-11)

    def test_between_groups_there_are_zeros(self) -> None:
        """Of views too, as an exit has of the whole's filters."""
        _, weight, _ = _grouped_case(3, 2, 2, 3)

        whole = across_groups(weight[:4], 2).detach()

        assert whole.shape == (4, 4, 3, 3)
        assert torch.equal(whole[:2, :2], weight[:2])
        assert torch.equal(whole[2:, 2:], weight[2:4])
        assert not whole[:2, 2:].any()
        assert not whole[2:, :2].any()

    @pytest.mark.parametrize(("groups", "branch"), [(3, 4), (7, 1)])
    def test_no_images(self, groups: int, branch: int) -> None:
        _, weight, _ = _grouped_case(groups, branch, branch, 3)

        found = one_product(torch.empty(0, groups * branch, 5, 5).double(), weight, groups)

        assert found.shape == (0, groups * branch, 5, 5)

    @pytest.mark.skipif(torch_compat.torch_version() < (2, 0), reason="meta tensors")
    def test_elsewhere_than_on_a_processor_it_is_one_product(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: List[int] = []
        watched = lambda weight, groups: (seen.append(groups), across_groups(weight, groups))[1]  # noqa: E731
        monkeypatch.setattr(iresnext_parts, "across_groups", watched)
        x, weight, _ = (each.detach().to("meta") for each in _grouped_case(3, 4, 4, 3))

        assert iresnext_parts.grouped_conv(x, weight, 3).shape == x.shape
        assert iresnext_parts.grouped_conv(x[:, :4], weight[:4], 1).shape == x[:, :4].shape
        assert seen == [3]

    def test_a_processor_goes_group_by_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(iresnext_parts, "across_groups", None)
        x, weight, _ = _grouped_case(3, 4, 4, 3)

        found = iresnext_parts.grouped_conv(x, weight, 3)

        assert torch.equal(found, F.conv2d(x, weight, padding=1, groups=3))

    @pytest.mark.gpu
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        ("groups", "before", "after", "size"), [(3, 4, 4, 3), (8, 4, 8, 1), (7, 1, 1, 3)]
    )
    def test_a_gpu_gives_what_a_processor_does(
        self, groups: int, before: int, after: int, size: int, dtype: torch.dtype, layout: Any
    ) -> None:
        x, weight, given = _grouped_case(groups, before, after, size)
        expected = F.conv2d(x, weight, padding=size // 2, groups=groups)
        expected_gradient = torch.autograd.grad(expected, weight, given)[0]

        images = x.to("cuda", dtype).contiguous(memory_format=layout)
        filters = weight.detach().cuda().requires_grad_()
        found = iresnext_parts.grouped_conv(images, filters.to(dtype), groups)
        gradient = torch.autograd.grad(found, filters, given.to("cuda", dtype))[0]

        room = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
        assert torch.allclose(found.double().cpu(), expected, atol=room, rtol=room)
        assert torch.allclose(gradient.cpu(), expected_gradient, atol=10 * room, rtol=room)


def _grouped_case(
    groups: int, before: int, after: int, size: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, filters [groups * after, before, size, size] and a gradient, in float64."""
    drawn = torch.Generator().manual_seed(groups)
    filters = (groups * after, before, size, size)
    shapes = ((5, groups * before, 9, 7), filters, (5, groups * after, 9, 7))
    x, weight, given = (torch.randn(s, generator=drawn, dtype=torch.float64) for s in shapes)
    return x, weight.requires_grad_(), given
