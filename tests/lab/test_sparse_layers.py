"""`SparseConv2d`, `convert` and `calibrate` on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import operator
import types

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_kernels.errors import KernelBuildError, ToolchainMissingError
from narrowgauge_kernels.library import has_kernels
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.layers.sparse import (
    Crossover,
    Point,
    SparseConv2d,
    backends,
    calibrate,
    calibration,
    convert,
)
from narrowgauge_lab.layers.sparse.calibration import crossing, map_with_zeros
from narrowgauge_lab.layers.sparse.prepared import Prepared
from narrowgauge_lab.layers.sparse.relus import Relus
from narrowgauge_lab.layers.sparse.settings import key_of
from narrowgauge_lab.networks import registry


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    assert has_kernels("cpu"), "python -m narrowgauge_kernels.build"


def image(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chain():
    """A ReLU in place, one that is read twice, one after which zeros go through pooling, and one
    whose input is read beside it."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.relu = nn.ReLU(inplace=True)
            self.second = nn.Conv2d(8, 8, 3, padding=1)
            self.third = nn.Conv2d(8, 8, 1)
            self.pool = nn.MaxPool2d(2)
            self.fourth = nn.Conv2d(8, 6, 3)
            self.last = nn.Conv2d(6, 4, 1, bias=False)

        def forward(self, x):
            x = self.second(self.relu(self.first(x)))
            shared = functional.relu(x)
            x = self.third(shared) + shared
            x = self.fourth(self.pool(torch.relu(x)))
            return self.last(x.relu()) + x.mean()

    torch.manual_seed(0)
    return Chain().eval()


def settings_of(converted):
    return {
        each.name: (each.settings.relu_input, each.settings.relu_output)
        for each in converted.replaced
    }


def test_each_relu_goes_where_nothing_else_reads_it():
    model = chain()
    converted = convert(model)
    assert settings_of(converted) == {
        "second": (True, True),
        "third": (False, False),
        "fourth": (False, False),
        "last": (True, False),
    }
    assert [each.name for each in converted.left_alone] == ["first"]
    assert "not the output of a ReLU" in converted.left_alone[0].reason


@pytest.mark.parametrize("backend", ["auto", "sparse", "dense", "reference"])
def test_a_converted_model_computes_the_same(backend):
    model = chain()
    wanted = copy.deepcopy(model).double()(image(2, 3, 12, 11).double())
    converted = convert(model, backend=backend).model
    with torch.no_grad():
        result = converted(image(2, 3, 12, 11))
    assert (result.double() - wanted).abs().max().item() <= 1e-5
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert not converted.training
    assert type(model.second) is nn.Conv2d


def test_gradients_of_a_converted_model_are_those_of_the_model():
    model = chain()
    converted = convert(model, backend="sparse").model
    for each in (model, converted):
        each(image(2, 3, 8, 8)).square().sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in converted.named_parameters():
        scale = wanted[name].grad.abs().max().item()
        assert (parameter.grad - wanted[name].grad).abs().max().item() <= 1e-4 * max(scale, 1)


@pytest.mark.parametrize(
    ("name", "replaced"), [("resnet18", 16), ("densenet121", 58), ("vgg-tiny", 4)]
)
def test_networks_convert_and_keep_their_results(name, replaced):
    model = registry.build(name)
    converted = convert(model, kernel_sizes=(3,))
    assert len(converted.replaced) == replaced
    x = image(1, 3, 64, 64)
    with torch.no_grad():
        wanted, result = model(x), converted.model(x)
    assert (result - wanted).abs().max().item() <= 1e-4 * wanted.abs().max().item()
    choices = converted.choices(x)
    assert {each["chosen"] for each in choices} == {"sparse"}
    assert all(0 < each["zeros"] < 1 for each in choices)


def test_patterns_and_kernel_sizes_are_left_alone():
    converted = convert(chain(), exclude=["sec*"], kernel_sizes=(1,))
    assert settings_of(converted).keys() == {"third", "last"}
    reasons = {each.name: each.reason for each in converted.left_alone}
    assert reasons["second"] == "excluded"
    assert "(3, 3)" in reasons["fourth"]
    with pytest.raises(UnknownNameError, match="sekond"):
        convert(chain(), exclude=["sekond"])
    with pytest.raises(BadValueError, match="can be converted"):
        convert(nn.Sequential(nn.Conv2d(3, 3, 3)))
    with pytest.raises(UnknownNameError, match="spars"):
        convert(chain(), backend="spars")


def test_what_torch_fx_cannot_trace_is_refused():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(NotApplicableError, match=r"torch\.fx cannot trace this Branching"):
        convert(Branching())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "2 groups"),
        (nn.Conv2d(4, 4, 3, dilation=2), "dilation"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "reflect"),
    ],
    ids=["groups", "dilation", "reflect"],
)
def test_other_convolutions_stay(layer, reason):
    model = nn.Sequential(nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(4, 4, 1))
    converted = convert(model)
    assert settings_of(converted).keys() == {"3"}
    assert reason in converted.left_alone[0].reason


def test_relus_in_place_on_memory_that_others_read_stay():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x):
            half = x[:, :2]
            return self.conv(half.relu_()) + x[:, 2:].sum() + x.sum()

    model = Viewing()
    converted = convert(model)
    assert settings_of(converted) == {"conv": (False, False)}
    assert torch.equal(converted.model(image(1, 4, 3, 3)), model(image(1, 4, 3, 3)))


class _Around(nn.Module):
    """`body` of a convolution, its map and another."""

    def __init__(self, body, channels=2):
        super().__init__()
        self.before = nn.Conv2d(2, 2, 1)
        self.conv = nn.Conv2d(channels, 2, 1)
        self.body = body

    def forward(self, x, z):
        return self.body(self, x, z)


def _written_after(self, x, z):
    y = self.before(x)
    r = torch.relu(y)
    y += z
    return self.conv(r) + y


def _written_by_method(self, x, z):
    y = self.before(x)
    r = torch.relu(y)
    y.add_(z)
    return self.conv(r) + y


def _view_written(self, x, z):
    y = self.before(x)
    r = torch.relu(y.transpose(2, 3))
    y.view(-1).mul_(-1)
    return self.conv(r)


def _narrowed(self, x, z):
    v = torch.narrow(x, 1, 0, 2)
    return self.conv(functional.relu_(v)) + x.sum()


def _chunked(self, x, z):
    one, _ = torch.chunk(x, 2, 1)
    return functional.conv2d(x, self.before.weight) + self.conv(
        functional.relu(torch.cat([one, one], 1), inplace=True)
    )


@pytest.mark.parametrize(
    ("body", "absorbed"),
    [
        # torch.fx says `y = y + z` for the first: then nothing is written to.
        (_written_after, None),
        (_written_by_method, False),
        (_view_written, False),
        (_narrowed, False),
        (_chunked, True),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_what_is_written_to_beside_a_relu_keeps_its_values(body, absorbed):
    torch.manual_seed(0)
    model = _Around(body)
    converted = convert(model)
    if absorbed is not None:
        assert settings_of(converted)["conv"][0] is absorbed
    x, z = image(1, 2, 4, 4), image(1, 2, 4, 4, seed=1) * 3
    with torch.no_grad():
        wanted = model(x.clone(), z.clone())
        result = converted.model(x.clone(), z.clone())
    assert (result - wanted).abs().max().item() <= 1e-5


def test_a_residual_block_in_place_takes_its_relu_in():
    """It is written to before the ReLU, and nobody else sees it."""

    def block(self, x, z):
        y = self.before(x)
        y = operator.iadd(y, z)
        return self.conv(functional.relu(y, inplace=True))

    model = _Around(block)
    graph = fx.Graph()
    x, z = graph.placeholder("x"), graph.placeholder("z")
    y = graph.call_module("before", (x,))
    added = graph.call_function(operator.iadd, (y, z))
    kept = graph.call_function(functional.relu, (added,), {"inplace": True})
    read = graph.call_module("conv", (kept,))
    graph.output(read)
    assert Relus(graph, dict(model.named_modules())).may_go(kept, read)
    # But not where the sum is read again.
    with graph.inserting_after(read):
        graph.call_function(torch.neg, (y,))
    assert not Relus(graph, dict(model.named_modules())).may_go(kept, read)


@pytest.mark.parametrize("target", [operator.iadd, operator.setitem, torch.add], ids=str)
def test_an_assignment_between_relu_and_convolution_is_seen(target):
    model, graph = _Around(None), fx.Graph()
    x, z = graph.placeholder("x"), graph.placeholder("z")
    y = graph.call_module("before", (x,))
    kept = graph.call_function(torch.relu, (y,))
    rest = {operator.setitem: (0, z), operator.iadd: (z,), torch.add: (z,)}[target]
    written = graph.call_function(target, (y, *rest))
    read = graph.call_module("conv", (kept,))
    graph.output((read, written))
    relus = Relus(graph, dict(model.named_modules()))
    assert relus.may_go(kept, read) is (target is torch.add)


def test_a_convolution_with_hooks_takes_no_relu_in():
    """They watch what it is given and gives."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU()).eval()
    seen = []
    model[1].register_forward_hook(lambda module, given, gave: seen.append((given[0], gave)))
    converted = convert(model)
    assert settings_of(converted) == {"1": (False, False)}
    x = image(1, 2, 3, 3)
    with torch.no_grad():
        converted.model(x)
        model(x)
    for one, other in zip(*seen):
        assert (one - other).abs().max().item() <= 1e-6


def test_a_relu_with_hooks_stays():
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU())
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(1))
    converted = convert(model)
    assert settings_of(converted) == {"1": (False, True)}
    converted.model(image(1, 2, 3, 3))
    assert seen == [1]


def test_a_convolution_called_twice_keeps_both_its_relus():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            return self.conv(torch.relu(self.conv(torch.relu(x)))) * 2

    model = Twice()
    converted = convert(model)
    assert settings_of(converted) == {"conv": (True, False)}
    result, wanted = converted.model(image(1, 2, 6, 6)), model(image(1, 2, 6, 6))
    assert (result - wanted).abs().max().item() <= 1e-5


def test_the_layer_is_a_drop_in():
    plain = nn.Conv2d(5, 7, 3, stride=2, padding=1)
    layer = SparseConv2d(5, 7, 3, stride=2, padding=1, relu_output=True)
    layer.load_state_dict(plain.state_dict())
    x = image(2, 5, 9, 9)
    wanted = plain(x.relu()).relu()
    assert (layer(x) - wanted).abs().max().item() <= 1e-5
    assert "relu_input, relu_output, backend=auto" in repr(layer)
    # A copy and a pickle compute the same, and prepare for themselves.
    memory = io.BytesIO()
    torch.save(layer.state_dict(), memory)
    other = copy.deepcopy(layer)
    assert other.prepared is not layer.prepared
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("padding", ["same", "valid", 1])
def test_paddings_by_name(padding):
    if isinstance(padding, str) and torch.__version__.startswith("1.8"):
        pytest.skip("torch 1.8 has no padding by name")
    layer = SparseConv2d(3, 4, 3, padding=padding, relu_input=False)
    wanted = functional.conv2d(
        image(1, 3, 6, 6), layer.weight, layer.bias, padding={"same": 1, "valid": 0}.get(padding, 1)
    )
    assert (layer(image(1, 3, 6, 6)) - wanted).abs().max().item() <= 1e-5


def test_the_packed_weight_follows_the_weight():
    layer, x = SparseConv2d(4, 4, 3, padding=1), image(1, 4, 6, 6)
    with torch.no_grad():
        before = layer(x)
        first = layer.prepared.packed(layer.weight)
        assert layer.prepared.packed(layer.weight) is first
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert (layer(x) - 2 * before).abs().max().item() <= 1e-5
        layer.weight.data.zero_()
        layer.prepared.forget()
        assert torch.equal(layer(x), layer.bias.reshape(1, -1, 1, 1).expand_as(before))


def test_nan_propagates_whichever_backend():
    x = image(1, 4, 6, 6)
    x[0, 2, 3, 3] = float("nan")
    for backend in ("sparse", "dense", "reference"):
        layer = SparseConv2d(4, 3, 3, padding=1, relu_output=True, backend=backend)
        bad = torch.isnan(layer(x))
        assert int(bad.sum()) == 3 * 9, backend


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 6, 6), "takes"),
        (torch.zeros(1, 5, 6, 6), "takes"),
        (torch.zeros(1, 4, 6, 6).double(), "of torch.float32 got a tensor of torch.float64"),
    ],
    ids=["3d", "channels", "dtype"],
)
def test_wrong_maps_are_refused(x, message):
    with pytest.raises(UsageError, match=message):
        SparseConv2d(4, 4, 3)(x)


def test_what_has_no_kernel_is_dense_by_itself_and_refused_by_name():
    x = image(1, 4, 6, 6).double()
    layer = SparseConv2d(4, 4, 3, dtype=torch.float64)
    assert layer.choose(x) == ("dense", "the sparse kernels of the CPU do not take torch.float64")
    assert layer(x).dtype == torch.float64
    with pytest.raises(NotApplicableError, match="cannot skip zeros"):
        SparseConv2d(4, 4, 3, dtype=torch.float64, backend="sparse")(x)
    with pytest.raises(NotApplicableError, match="cannot skip zeros"):
        SparseConv2d(4, 4, 3, backend="switched")(x.float())
    with pytest.raises(NotApplicableError, match="2 groups"):
        SparseConv2d(4, 4, 3, groups=2)


def points(*pairs):
    return tuple(Point(zeros, (1.0,) * 3, (gain,) * 3) for zeros, gain in pairs)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (points((0.0, 2.0), (0.5, 3.0)), 0.0),
        (points((0.0, 0.3), (0.99, 0.9)), math.inf),
        (points((0.0, 0.5), (0.5, 2.0)), 0.25),
        (points((0.9, 4.0), (0.0, 0.5), (0.5, 2.0)), 0.25),
        # Not monotone: only what holds for every level above.
        (points((0.0, 2.0), (0.4, 0.5), (0.8, 2.0)), 0.6),
        (
            points(
                (0.5, 1.0),
            ),
            0.0,
        ),
    ],
    ids=str,
)
def test_the_crossing_is_where_the_gain_is_one(given, wanted):
    assert crossing(given) == pytest.approx(wanted)


def test_maps_have_exactly_their_zeros():
    like = image(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    for zeros in (0.0, 0.25, 0.5, 1.0):
        made = map_with_zeros(like.shape, zeros, like)
        assert int((made == 0).sum()) == round(zeros * like.numel())
        assert bool((made >= 0).all())
        assert made.stride() == like.stride()
        assert torch.equal(made, map_with_zeros(like.shape, zeros, like))


def crossover(x, zeros, own=0.5):
    device, dtype, shape = key_of(x)[:3]
    return Crossover(zeros, own, shape, device, dtype, ())


@pytest.mark.parametrize(
    ("zeros", "of_map", "wanted"),
    [(0.6, 0.5, "dense"), (0.6, 0.7, "sparse"), (0.0, 0.0, "sparse"), (math.inf, 1.0, "dense")],
)
def test_a_calibrated_layer_chooses_by_the_zeros_of_each_map(zeros, of_map, wanted):
    layer = SparseConv2d(4, 4, 3)
    x = map_with_zeros((1, 4, 10, 10), of_map, image(1, 4, 10, 10))
    layer.crossovers[key_of(x)] = crossover(x, zeros)
    chosen, why = layer.choose(x)
    assert chosen == wanted
    assert "faster" in why
    # A map of another shape has no crossover here.
    assert layer.choose(x[:, :, :5])[1] == "not calibrated for such a map"


def test_a_choice_of_the_last_map_holds_for_its_like_alone():
    """And as long as what was measured is the same."""
    layer = SparseConv2d(4, 4, 3, padding=1)
    one, other = image(1, 4, 6, 6), image(1, 4, 6, 8)
    last = one.contiguous(memory_format=torch.channels_last)
    layer.crossovers = {
        key_of(one): crossover(one, math.inf),
        key_of(other): crossover(other, 0.0),
        key_of(last): crossover(last, 0.0),
    }
    chosen = [layer.choose(x)[0] for x in (one, one, other, one, last, one)]
    assert chosen == ["dense", "dense", "sparse", "dense", "sparse", "dense"]

    layer.crossovers[key_of(one)] = crossover(one, 0.0)
    assert layer.choose(one)[0] == "sparse"
    del layer.crossovers[key_of(one)]
    assert layer.choose(one)[1] == "not calibrated for such a map"
    layer.crossovers[key_of(one)] = crossover(one, math.inf)
    assert layer.choose(one)[0] == "dense"
    assert copy.deepcopy(layer).choose(one)[0] == "dense"
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert layer.choose(one)[1] == "not calibrated for such a map"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 128, 56, 56), (3, 64, 49, 33), (1, 2, 700, 701)])
@pytest.mark.parametrize("last", [False, True])
def test_a_large_map_is_sampled_all_over(shape, last):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    # Zeros as networks have them: whole channels, half of the rows, and some at random.
    x[:, ::3], x[:, :, : shape[2] // 2] = 0.0, x[:, :, : shape[2] // 2] - 0.7
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    assert x.numel() > 2 * backends.SAMPLE
    for relu in (True, False):
        true = backends.zero_fraction(x, relu)
        assert backends.sampled_zeros(x, relu) == pytest.approx(true, abs=0.02)
    assert backends.sampled_zeros(torch.zeros(shape), True) == 1.0
    assert backends.sampled_zeros(torch.ones(shape), True) == 0.0


def test_a_small_map_or_one_with_gaps_is_counted_whole():
    x = torch.randn(1, 4, 300, 300, generator=torch.Generator().manual_seed(2))
    small, gaps = x[:, :, :20, :20].contiguous(), x[:, :, ::2, 1::2]
    assert gaps.numel() > backends.SAMPLE >= small.numel()
    for given in (small, gaps, x[:0]):
        assert backends.sampled_zeros(given, True) == backends.zero_fraction(given, True)


@pytest.mark.parametrize(
    ("sparse_s", "wanted"), [(1e-6, "sparse"), (3e-6, "dense"), (2e-6, "sparse")]
)
@pytest.mark.parametrize("zeros", [0.0, 0.6, math.inf])
def test_on_a_gpu_the_layers_own_map_decides(zeros, sparse_s, wanted):
    """Whatever random maps said: a network's zeros lie together."""
    x = image(1, 4, 10, 10)
    own = Point(0.5, (sparse_s,) * 3, (2e-6,) * 3)
    found = dataclasses.replace(crossover(x, zeros), own_point=own)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"))
    chosen, why = SparseConv2d(4, 4, 3)._by_crossover(found, on_gpu)
    assert chosen == wanted
    assert f"{wanted} was faster on the map of the calibration" in why()
    assert crossover(x, zeros).says_by_own() is None
    # Without that map, and on a CPU, which counts, by the crossover.
    assert "0.500 were zeros" not in SparseConv2d(4, 4, 3)._by_crossover(found, x)[1]()


def test_a_crossover_holds_for_an_order_in_memory_and_a_number_of_threads():
    x = image(2, 4, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    assert key_of(x) != key_of(last)
    assert key_of(x) == key_of(x.clone())
    threads = torch.get_num_threads()
    before = key_of(x)
    torch.set_num_threads(threads + 1)
    try:
        assert key_of(x) != before
    finally:
        torch.set_num_threads(threads)
    assert key_of(x) == before


def test_a_crossover_on_cuda_holds_for_one_kind_of_product():
    class OnCuda:
        device, dtype, shape = torch.device("cuda"), torch.float32, (1, 4, 6, 6)

        def is_contiguous(self, memory_format=None):
            return memory_format is None

    with tf32_flags.tf32_set_to(True):
        allowed = key_of(OnCuda())
    with tf32_flags.tf32_set_to(False):
        assert key_of(OnCuda()) != allowed


def test_a_switch_has_its_own_crossover(monkeypatch):
    """Of the two generated kernels, by the zeros of both; not that of sparse and dense."""
    asked = []

    def fake_sparse(call, x, prepared, switched=None):
        asked.append(switched)
        return backends.dense(call, x)

    monkeypatch.setattr(backends, "sparse", fake_sparse)
    x = image(1, 4, 10, 10)
    layer = SparseConv2d(4, 4, 3, backend="switched")
    layer.crossovers[key_of(x)] = crossover(x, 0.2)
    layer.by("switched", x)
    assert asked == [0.0]
    layer.switches[key_of(x)] = crossover(x, 0.7)
    layer.by("switched", x)
    assert asked == [0.0, 0.7]
    asked.clear()
    calibrate(nn.Sequential(_as_auto(layer)), x, levels=(0.5,), pairs=1, limit_s=0.01)
    assert set(asked) == {None, 0.0, 1.0}
    assert layer.switches[key_of(x)].points[0].zeros == 0.5
    assert layer.switches[key_of(x)] is not layer.crossovers[key_of(x)]


def _as_auto(layer):
    """A layer with its backend `switched` runs on a CPU by no other means."""
    layer.forward = lambda x: backends.dense(layer.call(), x)
    return layer


def test_launches_that_cannot_be_hidden_are_no_end_of_a_calibration(monkeypatch):
    hidden = []

    def once(take, device, plan):
        hidden.append(device.type)
        return take(plan)

    monkeypatch.setattr(calibration, "with_hidden_launches", once)
    layer = SparseConv2d(4, 4, 3)
    calibrate(nn.Sequential(layer), image(1, 4, 6, 6), levels=(0.5,), pairs=1, limit_s=0.01)
    assert hidden == ["cpu", "cpu"], "one level, and the layer's own map"


def test_without_a_toolchain_a_layer_on_cuda_is_dense_with_the_reason(monkeypatch):
    def refused(error):
        def make(*_):
            raise error

        monkeypatch.setattr(backends, "_convolution", make)
        on_gpu = types.SimpleNamespace(device=torch.device("cuda"))
        return backends.lacking(SparseConv2d(4, 4, 3).call(), on_gpu, Prepared())

    missing = ToolchainMissingError("no compiler of CUDA", next_step="pip install it")
    assert refused(missing).endswith("no compiler of CUDA; pip install it")
    assert "the CUDA driver is not here" in refused(DeviceError("the CUDA driver is not here"))
    assert "no kernel can be generated" in refused(SparseArgumentError("kernel is 7"))
    with pytest.raises(KernelBuildError):
        refused(KernelBuildError("it does not compile"))


def test_calibration_measures_each_problem_once_and_is_used():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.Sigmoid(),
    )  # fmt: skip
    converted = convert(model.eval())
    x = image(1, 8, 10, 10)
    found = calibrate(converted.model, x, levels=(0.0, 0.9), pairs=2, limit_s=0.02)
    assert [(each.name, each.shared_with) for each in found] == [("1", ""), ("3", "1")]
    first, second = (each.crossover for each in found)
    assert first.points == second.points
    assert first.own_zeros != second.own_zeros
    assert [point.zeros for point in first.points] == [0.0, 0.9]
    assert all(len(point.sparse_s) == len(point.dense_s) >= 1 for point in first.points)
    assert first.own_point.zeros == first.own_zeros
    facts = converted.choices(x)
    assert facts[0]["crossover"] == first.to_fact()
    assert all("faster" in each["why"] for each in facts)


def test_nothing_to_calibrate_is_an_error():
    with pytest.raises(UsageError, match="nothing to calibrate"):
        calibrate(nn.Sequential(nn.Conv2d(3, 3, 1)), image(1, 3, 4, 4))
    with pytest.raises(UsageError, match="between 0 and 1"):
        calibrate(nn.Sequential(SparseConv2d(3, 3, 1)), image(1, 3, 4, 4), levels=(0.5, 1.5))
