"""Folding, conversion and layout: the new model computes the same, and says what it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.transforms import (
    Rule,
    check_channels_last,
    convert,
    converted,
    fold_batch_norm,
    folded,
    to_channels_last,
)

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
LAYERS = [
    (nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3),
    (nn.ConvTranspose1d, 1), (nn.ConvTranspose2d, 2), (nn.ConvTranspose3d, 3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(4)


def used(model):
    """`model` in eval mode, its BatchNorms with statistics and weights of their own."""
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            if norm.running_mean is not None:
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.2, 3.0)
            if norm.weight is not None:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
    return model.eval()


def norms_of(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def assert_same(folding, model, x, least=1):
    """To the last bits of float64, with the original as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model(x)
    assert len(folding.pairs) >= least
    difference = (folding.model(x) - wanted).abs().max()
    assert difference <= 1e-12 * wanted.abs().max()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("layer", "dimensions"), LAYERS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_every_kind_of_convolution_exactly(layer, dimensions, bias, affine):
    sequence = nn.Sequential(
        layer(4, 6, 3, groups=2, bias=bias, padding=1), NORMS[dimensions](6, affine=affine)
    )
    model = used(sequence.double())
    folding = folded(model)
    assert folding.pairs == (("0", "1"),)
    assert norms_of(folding.model) == []
    assert_same(folding, model, torch.randn(2, 4, *(5,) * dimensions, dtype=torch.float64))


def test_linear_and_dtype():
    model = used(nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)))
    new = fold_batch_norm(model)
    assert new[0].weight.dtype == new[0].bias.dtype == torch.float32
    assert new[0].weight.requires_grad
    x = torch.randn(9, 5)
    assert torch.allclose(new(x), model(x), atol=1e-5)
    assert_same(folded(model.double()), model.double(), x.double())


class Residual(nn.Module):
    """The names say which BatchNorm can be folded."""

    def __init__(self):
        super().__init__()
        self.conv1, self.fold1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.fold2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.keep = nn.BatchNorm2d(4)

    def forward(self, x):
        y = torch.relu(self.fold1(self.conv1(x)))
        y = self.fold2(self.conv2(y))
        return self.keep(torch.relu(y + self.shortcut(x)))


def test_a_residual_block_through_its_graph():
    model = used(Residual().double())
    folding = folded(model)
    assert set(folding.pairs) == {
        ("conv1", "fold1"), ("conv2", "fold2"), ("shortcut.0", "shortcut.1")
    }  # fmt: skip
    assert list(folding.kept) == ["keep"]
    assert "relu" in folding.kept["keep"]
    assert folding.untraced == ""
    assert_same(folding, model, torch.randn(2, 4, 6, 6, dtype=torch.float64))


def test_folding_in_place_changes_the_model_itself():
    model = used(Residual().double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    wanted, copied = model(x), folded(model)

    changed = folded(model, in_place=True)
    assert changed.model is model
    assert changed.pairs == copied.pairs != ()
    assert torch.equal(model(x), copied.model(x))
    assert (model(x) - wanted).abs().max() <= 1e-12 * wanted.abs().max()


class Branching(nn.Module):
    """Does not trace: its way depends on the data."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.block = Residual()
        self.alone = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.stem(x)
        return self.alone(self.block(x) if x.sum() > 0 else x)


def test_a_model_that_does_not_trace_is_folded_by_its_parts():
    model = used(Branching().double())
    folding = folded(model)
    assert "Trace" in folding.untraced or "symbolic" in folding.untraced
    assert len(folding.pairs) == 4
    assert folding.kept["alone"] == "nothing says what its input is"
    assert_same(folding, model, torch.rand(2, 4, 6, 6, dtype=torch.float64))


def test_a_sequence_that_does_not_trace_is_read_in_order():
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = used(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), Odd(), nn.BatchNorm2d(4)))
    folding = folded(model.double())
    assert folding.pairs == (("0", "1"),)
    assert_same(folding, model, torch.rand(2, 4, 3, 3, dtype=torch.float64))


class Twisted(nn.Module):
    """One conv and two BatchNorms, put together in the way `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        if kind == "no statistics":
            self.norm = nn.BatchNorm2d(4, track_running_stats=False)
        if kind == "tied":
            self.other.weight = self.conv.weight
        if kind == "subclass":
            self.conv = type("MyConv", (nn.Conv2d,), {})(4, 4, 3, padding=1)
        if kind == "pre-hook":  # as weight_norm has one
            self.conv.register_forward_pre_hook(lambda module, inputs: None)
        if kind == "alias":
            self.again = self.conv
        if kind == "hook":
            self.norm.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x):
        y = self.conv(x)
        if self.kind == "shared conv":
            return self.norm(y) + self.second(self.conv(-x))
        if self.kind == "fed by two":
            return self.norm(y) + self.norm(self.other(x))
        if self.kind == "used twice":
            return self.norm(y) + y
        if self.kind == "read":
            return self.norm(y) * self.norm.weight.sum()
        return self.norm(y) + self.other(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("shared conv", "conv is called more than once"),
        ("fed by two", "fed by more than one thing"),
        ("used twice", "the output of conv is used elsewhere too"),
        ("read", "reads the tensors of norm itself"),
        ("no statistics", "no running statistics"),
        ("tied", "conv shares a tensor"),
        ("subclass", "its input is not a layer"),
        ("pre-hook", "conv has hooks"),
        ("alias", "conv stands at more than one place"),
        ("hook", "norm has hooks"),
    ],
)
def test_what_is_not_certain_is_kept_and_reported(kind, why):
    model = used(Twisted(kind).double())
    folding = folded(model)
    assert folding.pairs == ()
    assert why in folding.kept["norm"]
    assert_same(folding, model, torch.randn(2, 4, 6, 6, dtype=torch.float64), least=0)


def test_a_block_at_two_places_is_kept():
    """Each place is a sequence that could be folded; together they would be folded twice."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x)) if x.sum() > 0 else x

    model = used(Twice().double())
    folding = folded(model)
    assert folding.pairs == ()
    assert set(folding.kept) == {"a.1", "b.1"}
    assert_same(folding, model, torch.rand(2, 4, 3, 3, dtype=torch.float64), least=0)


class TestConversion:
    @pytest.fixture
    def model(self):
        inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), inner).double()

    def test_by_type_pattern_and_predicate(self, model):
        made = []

        def make(name, module):
            made.append(name)
            return nn.Sigmoid()

        result = converted(model, [Rule(make, type=nn.ReLU)])
        assert result.replaced == (("1", "ReLU", "Sigmoid"), ("2.1", "ReLU", "Sigmoid"))
        assert isinstance(model[1], nn.ReLU)
        assert [n for n, _ in result.model.named_modules()] == [n for n, _ in model.named_modules()]
        assert len(converted(model, [Rule(make, pattern=r"2\..*")]).replaced) == 2
        chosen = Rule(make, type=nn.Conv2d, where=lambda name, module: module.in_channels == 3)
        assert [each[0] for each in converted(model, [chosen]).replaced] == ["0"]
        assert made == ["1", "2.1", "2.0", "2.1", "0"]

    def test_dtype_training_flag_and_hooks_stay(self, model):
        seen = []
        model.train()
        model[0].eval()
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(type(module)))
        new = convert(model, [Rule(lambda name, old: nn.Conv2d(3, 4, 3, padding=1), pattern="0")])
        assert new[0].weight.dtype == torch.float64
        assert not new[0].training
        assert new[1].training
        new(torch.randn(1, 3, 5, 5, dtype=torch.float64))
        assert seen == [nn.Conv2d]

    def test_a_wrapper_leaves_the_hooks_where_they_are(self, model):
        calls = []
        model[0].register_forward_hook(lambda *_: calls.append(1))
        new = convert(model, [Rule(lambda name, old: nn.Sequential(old), pattern="0")])
        new(torch.randn(1, 3, 5, 5, dtype=torch.float64))
        assert calls == [1]

    def test_a_module_at_two_places_stays_one(self):
        shared = nn.Linear(3, 3)
        new = convert(
            nn.Sequential(shared, nn.ReLU(), shared),
            [Rule(lambda name, old: nn.Linear(3, 3, bias=False), type=nn.Linear)],
        )
        assert new[0] is new[2]
        assert new[0].bias is None

    def test_the_root_and_the_first_rule(self, model):
        rules = [
            Rule(lambda name, old: nn.Tanh(), pattern="2.1"),
            Rule(lambda name, old: nn.Sigmoid(), type=nn.ReLU),
        ]
        new = convert(model, rules)
        assert isinstance(new[2][1], nn.Tanh)
        assert isinstance(new[1], nn.Sigmoid)
        assert isinstance(convert(model, [Rule(lambda name, old: nn.Tanh(), pattern="")]), nn.Tanh)

    @pytest.mark.parametrize("shadowed", [False, True])
    def test_a_rule_that_replaces_nothing_is_an_error(self, model, shadowed):
        rules = [Rule(lambda name, old: nn.Tanh(), type=nn.ReLU)] if shadowed else []
        missing = Rule(lambda name, old: nn.Tanh(), type=nn.ReLU if shadowed else nn.GELU)
        with pytest.raises(BadValueError, match=r"the rule for .* replaces nothing") as caught:
            convert(model, [*rules, missing])
        assert "earlier rule" in caught.value.why


def test_channels_last_weights_and_where_a_layer_falls_back():
    class Turns(nn.Module):
        def forward(self, x):
            return x.contiguous(memory_format=torch.contiguous_format)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Turns(), nn.MaxPool2d(2), nn.Flatten())
    new = to_channels_last(model)
    assert new[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()
    x = torch.randn(2, 3, 9, 9)
    assert torch.allclose(new(x), model(x), atol=1e-5)
    # A convolution of its own, that keeps the format also where torch 1.8's CPU one does not.
    report = check_channels_last(nn.Sequential(*new[1:4]), x)
    assert (report.kept, report.fell_back, report.given_otherwise) == (("0",), ("1",), ("2",))
    assert not report.holds
    assert check_channels_last(nn.Sequential(nn.ReLU(), nn.ReLU()), x).holds
    volume = to_channels_last(nn.Sequential(nn.Conv3d(3, 8, 3)))
    assert volume[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
