"""DDNN: sizes as published, masked aggregation, the uplink's slope, outages, losses and bytes."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.adaptive import adaptive
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.gradients import Weighted
from narrowgauge_lab.anytime.network import select
from narrowgauge_lab.anytime.policies import parse
from narrowgauge_lab.anytime.systems.ddnn import DDNN, Cut, Design, DeviceLosses, uplink_bytes
from narrowgauge_lab.anytime.systems.ddnn_parts import (
    AGGREGATIONS,
    BinaryConv,
    Uplink,
    masked_norm,
    quantise,
    sign,
)
from narrowgauge_lab.anytime.views import Packed, Tiles, pack
from narrowgauge_lab.compiling import Forward, compiled_call

TILE = (1, 16, 10)


def _tiles(design: Design) -> DDNN:
    torch.manual_seed(0)
    return DDNN(Tiles(), TILE, 10, design)


def _cameras(design: Design, absent: Tuple[Tuple[int, int], ...] = ()) -> Tuple[DDNN, torch.Tensor]:
    """A network of six packed views of 16×16 and a batch of four, of which some are absent."""
    torch.manual_seed(0)
    net = DDNN(Packed(6), (1, 16, 16), 10, design)
    present = torch.ones(4, 6, dtype=torch.bool)
    for sample, view in absent:
        present[sample, view] = False
    views = torch.randint(0, 256, (4, 6, 1, 16, 16), dtype=torch.uint8)
    packed = torch.from_numpy(pack(views.numpy(), present.numpy()))
    return net, packed.float() / 255.0


def _small(**changes: object) -> Design:
    return Design(**{"width": 0.25, "bits": 1, **changes})  # type: ignore[arg-type]


def test_sizes_and_costs_are_those_measured_of_the_published_program() -> None:
    """15.0 k parameters and 2.32 MMAC of a device, 1.07 M and 99.4 MMAC of all, 2,560 floats."""
    net = _tiles(Design())
    costs = exit_costs(net, torch.zeros(2, 1, 32, 32))
    device = net.devices[0]

    assert sum(p.numel() for p in device.parameters()) == 15026
    assert costs.cumulative[0] // 6 == 160 * 9 * (8 + 3 * 64 + 128 + 5 * 256) + 160
    assert costs.cumulative[0] / 6e6 == pytest.approx(2.32, rel=2e-3)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(1.07e6, rel=2e-3)
    assert costs.cumulative[1] / 1e6 == pytest.approx(99.4, rel=1e-3)
    assert (net.cut.filters, net.cut.pixels) == (16, 160)
    assert net.cut.map_bytes == 2560 * 4


def test_a_binary_device_halves_its_view_at_each_layer() -> None:
    """A view of 32×32 sends f maps of 16×16 bits: 32 · f bytes, as published."""
    for layers, pixels in ((1, 256), (2, 64)):
        design = Design(device="binary", bits=1, filters=4, layers=layers)
        net = DDNN(Packed(6), (3, 32, 32), 3, design)
        sent, _ = net.advance(0, net.begin(torch.rand(2, 24, 32, 32))).state
        assert sent.shape[:3] == (2, 6, 4)
        assert sent.shape[3] * sent.shape[4] == pixels == net.cut.pixels
        assert set(sent.unique().tolist()) <= {-1.0, 1.0}
    assert Cut(4, 256, 1).map_bytes == 32 * 4


@pytest.mark.parametrize("device", ["residual", "binary"])
@pytest.mark.parametrize("local", sorted(AGGREGATIONS))
def test_every_way_to_an_answer_gives_the_same_answer(device: str, local: str) -> None:
    cloud = {"mp": "cc", "ap": "attention", "cc": "mp", "attention": "ap"}[local]
    net, images = _cameras(_small(device=device, local=local, cloud=cloud), ((1, 2), (3, 0)))
    net.eval()
    with torch.no_grad():
        for norm in net.modules():  # or sums of ±1 would be exactly 0, and rounding their sign
            if isinstance(norm, nn.BatchNorm2d):
                norm.bias.uniform_(-0.1, 0.1)
        answers = net(images)
        state = net.advance(0, net.begin(images)).state
        alone = net.advance(1, select(state, torch.tensor([3]))).logits
        _, _, together = net.answers(images)

        assert [each.shape for each in answers] == [(4, 10), (4, 10)]
        for number in range(2):
            assert torch.allclose(net.forward_until(number, images), answers[number], atol=1e-4)
            assert torch.allclose(together[number], answers[number], atol=1e-4)
        assert torch.allclose(alone, answers[1][3:], atol=1e-4)
        left = adaptive(net, images, parse("entropy-normalised:0"))
    assert left.exits.tolist() == [1] * 4
    assert torch.allclose(left.logits, answers[1], atol=1e-4)
    assert adaptive(net, images[:0], parse("entropy-normalised:1")).logits.shape == (0, 10)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_what_is_absent_changes_nothing_whatever_its_values(name: str) -> None:
    torch.manual_seed(1)
    present = torch.tensor([[True, False, True], [True, True, True]])
    for shape in ((2, 3, 5), (2, 3, 5, 4, 4)):
        join = AGGREGATIONS[name](3, 5)
        values = torch.randn(shape)
        other = values.clone()
        other[0, 1] = 1e3
        with torch.no_grad():
            first, second = join(values, present), join(other, present)
            nobody = join(values, torch.zeros(2, 3, dtype=torch.bool))
        assert torch.equal(first, second)
        assert first.shape == (2, join.channels, *shape[3:])
        assert not nobody.any()


def test_aggregations_are_what_they_are_called() -> None:
    values = torch.randn(2, 3, 4)
    present = torch.tensor([[True, True, False], [True, True, True]])
    kept = [values[0, :2], values[1]]

    def of(name: str) -> torch.Tensor:
        return AGGREGATIONS[name](3, 4)(values, present)

    assert torch.equal(of("mp"), torch.stack([each.max(0)[0] for each in kept]))
    assert torch.allclose(of("ap"), torch.stack([each.mean(0) for each in kept]))
    assert torch.equal(of("cc")[1], values[1].reshape(-1))
    assert not of("cc")[0, 8:].any()
    join = AGGREGATIONS["attention"](3, 4)
    with torch.no_grad():
        weights = torch.softmax(join.score(kept[0])[:, 0], 0)  # type: ignore[operator]
        assert torch.allclose(join(values, present)[0], (weights[:, None] * kept[0]).sum(0))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_uplink_sends_so_many_values_and_lets_slopes_through(bits: int) -> None:
    values = torch.linspace(-1.5, 1.5, 4001, requires_grad=True)
    sent = quantise(values, bits)
    sent.sum().backward()
    inside = values.detach().abs() <= 1

    assert len(sent.detach().unique()) == 2**bits
    assert (float(sent.detach().min()), float(sent.detach().max())) == (-1.0, 1.0)
    error = (sent - values).detach()[inside].abs().max()
    assert float(error) <= 1 / (2**bits - 1) + 1e-5
    assert values.grad is not None
    assert torch.equal(values.grad, inside.float())


def test_the_sign_of_nothing_is_plus() -> None:
    assert sign(torch.tensor([-2.0, -1e-9, 0.0, 3.0])).tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_an_uplink_of_32_bits_sends_values_as_they_are() -> None:
    maps = torch.randn(2, 3, 4, 4)

    assert torch.equal(Uplink(3, 32)(maps, None), maps)
    assert not list(Uplink(3, 32).parameters())
    for bits in (0, 9, 31, 33, -1):
        with pytest.raises(BadValueError, match="bits"):
            Uplink(3, bits)


def test_normalisation_is_that_of_the_samples_that_are_there() -> None:
    """To torch's own over those samples: results, slopes and running statistics."""
    torch.manual_seed(2)
    ours, theirs = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    maps = torch.randn(5, 3, 4, 4) + 2
    present = torch.tensor([True, False, True, True, False])
    maps[~present] = 1e4
    mine, other = maps.clone().requires_grad_(), maps[present].clone().requires_grad_()
    wanted = torch.randn(3, 3, 4, 4)

    found, expected = masked_norm(ours, mine, present)[present], theirs(other)
    (found * wanted).sum().backward()
    (expected * wanted).sum().backward()
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(ours.running_mean, theirs.running_mean, atol=1e-5)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-4)
    assert mine.grad is not None
    assert other.grad is not None
    assert torch.allclose(mine.grad[present], other.grad, atol=1e-4)
    before = ours.running_mean.clone()
    nobody = masked_norm(ours, maps[:2], torch.zeros(2, dtype=torch.bool))
    assert torch.equal(ours.running_mean, before)
    assert bool(torch.isfinite(nobody).all())


def test_binary_weights_compute_as_signs_and_stay_within_one() -> None:
    conv = BinaryConv(2, 3)
    with torch.no_grad():
        conv.weight.mul_(4.0)
    maps = torch.randn(1, 2, 5, 5)
    signs = torch.where(conv.weight.detach() < 0, -1.0, 1.0)

    result = conv(maps)
    assert torch.allclose(result, F.conv2d(maps, signs, padding=1), atol=1e-5)
    assert float(conv.weight.detach().abs().max()) <= 1.0
    result.sum().backward()
    assert conv.weight.grad is not None
    assert bool(conv.weight.grad.abs().sum() > 0)


def test_a_view_that_is_lost_is_as_one_that_was_never_there() -> None:
    net, images = _cameras(_small())
    net.eval()
    _, without = _cameras(_small(), ((0, 2), (1, 2), (2, 2), (3, 2)))
    with torch.no_grad():
        whole = net(images)
        with net.losing([2]):
            lost = net(images)
        other = net(without)
        assert net.lost == ()
        for mine, theirs in zip(lost, other):
            assert torch.allclose(mine, theirs, atol=1e-5)
        assert not torch.allclose(lost[1], whole[1], atol=1e-3)
        with net.losing(range(6)):
            nobody = net(images)
    assert all(bool(torch.isfinite(each).all()) for each in nobody)
    assert float(nobody[0].softmax(1).max()) == pytest.approx(0.1, abs=1e-6), "no view knows"
    with pytest.raises(BadValueError, match="views"), net.losing([6]):
        pass


def test_a_device_learns_from_the_views_that_it_has() -> None:
    """And its loss is the mean over those; the published program ignores the target -1 likewise."""
    net, images = _cameras(_small(), ((0, 1), (2, 1), (0, 4), (1, 4), (2, 4), (3, 4)))
    labels = torch.tensor([3, 1, 4, 1])
    losses = DeviceLosses().losses(net, images, labels)
    torch.manual_seed(0)
    again, _ = _cameras(_small())
    vectors, present, answers = again.answers(images)
    expected = sum(
        F.cross_entropy(vectors[present[:, view], view], labels[present[:, view]])
        for view in (0, 1, 2, 3, 5)
    )

    assert losses.extra is not None
    assert torch.allclose(losses.extra, torch.as_tensor(expected), atol=1e-4)
    assert torch.allclose(losses.per_exit[1], F.cross_entropy(answers[1], labels), atol=1e-4)
    losses.total((1.0, 1.0)).backward()
    assert bool(torch.isfinite(losses.per_exit[1])), "a blind device's maps must not grow"
    blind = [p.grad for p in net.devices[4].parameters()]
    assert all(grad is None or not grad.any() for grad in blind)
    assert bool(torch.isfinite(torch.cat([p.grad.view(-1) for p in net.cloud.parameters()])).all())


def test_losses_are_of_the_exits_and_weights_of_them_act() -> None:
    objective = DeviceLosses(Weighted((1.0, 0.0)))
    net = _tiles(_small(bits=32))
    images, labels = torch.randn(3, 1, 32, 32), torch.tensor([0, 1, 2])

    assert objective.metrics()["devices_train_loss"] == ("nat", "computed")
    objective.losses(net, images, labels).total(objective.weights).backward()
    assert all(p.grad is None or not p.grad.any() for p in net.cloud.parameters())
    with pytest.raises(BadValueError, match="weights"):
        DeviceLosses(Weighted((1.0, 0.5, 0.2)))


def test_views_are_left_out_in_training_only_and_never_all() -> None:
    net = _tiles(_small(view_dropout=0.9))
    present = torch.ones(500, 6, dtype=torch.bool)
    net.train()
    torch.manual_seed(3)
    kept = net._drop(present)

    assert bool(kept.any(1).all())
    fallen_back = kept.all(1)
    assert 0.05 < float(kept[~fallen_back].float().mean()) < 0.35
    assert torch.equal(net.eval()._drop(present), present)
    assert torch.equal(_tiles(_small())._drop(present), present)


def test_bytes_are_by_the_papers_formula() -> None:
    """4 |C| + (1 - l) f o / 8."""
    cut = Cut(filters=4, pixels=256, bits=1)

    assert uplink_bytes(3, cut, 1.0) == 12
    assert uplink_bytes(3, cut, 0.0) == 12 + 4 * 256 / 8
    assert uplink_bytes(3, cut, 0.608) == pytest.approx(12 + 0.392 * 128)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(BadValueError, match="share"):
            uplink_bytes(3, cut, share)


def test_designs_that_there_are_not() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Design(cloud="ccc")
    assert caught.value.nearest == "cc"
    with pytest.raises(UnknownNameError):
        Design(device="residua")
    for wrong in (
        {"view_dropout": 1.0}, {"view_dropout": float("nan")}, {"width": 0.0}, {"filters": 0},
        {"layers": 0}, {"device": "binary", "bits": 2},
    ):  # fmt: skip
        with pytest.raises(BadValueError, match="no network"):
            Design(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow  # the compiler takes a minute for each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("design", [Design(), Design(device="binary", bits=1)], ids=str)
def test_compiled_losses_and_their_gradients_are_the_plain_ones(design: Design) -> None:
    """As `-p compile=true` has them: as one piece, with the slopes through the signs."""
    if not torch_compat.compiler_available():
        pytest.skip("this torch does not compile")
    net, objective = _tiles(design).double().train(), DeviceLosses()
    images, labels = torch.randn(8, 1, 32, 32).double(), torch.arange(8)

    def parts(images: torch.Tensor, labels: torch.Tensor) -> Any:
        found = objective.losses(net, images, labels)
        return found.per_exit, found.logits, found.extra

    found = []
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for compiles in (False, True):
        net.load_state_dict(before)
        net.zero_grad()
        forward = Forward(parts, 8, compiled_call(net, parts) if compiles else None)
        per_exit, _, extra = forward(images, labels)
        total = sum(per_exit) + extra
        total.backward()
        found.append([total.detach(), *(each.grad.clone() for each in net.parameters())])
    for plain, compiled in zip(*found):
        assert torch.allclose(compiled, plain, rtol=1e-4, atol=1e-5)
