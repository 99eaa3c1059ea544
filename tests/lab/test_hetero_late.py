"""Weight gradients that are filled at the end of a backward pass, and what must not wait."""

from __future__ import annotations

import pytest
import torch
from placed_cases import gradients, images, loss_of, placed, residual, twins
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads, deferring

#: Before torch 2.0 gradients are filled at once.
_waits = pytest.mark.skipif(
    not torch_compat.backward_is_visible(), reason="backward passes cannot be told apart"
)
_X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))


def _copies(converted: object) -> int:
    """How many copies brought weight gradients down."""
    intervals = converted.ledger.intervals()  # type: ignore[attr-defined]
    return len([e for e in intervals if (e.pass_, e.stage) == ("weight_grad", "from_device")])


@_waits
def test_one_copy_for_all_layers_and_one_each_outside() -> None:
    model, other, converted = twins(residual(), mode="overlapped", pieces=1)
    expected = gradients(model, images())
    with deferred_weight_grads():
        assert deferring()
        found = gradients(other, images())
    assert not deferring()
    assert _copies(converted) == 1
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)
    converted.ledger.clear()
    gradients(other, images())
    assert _copies(converted) == 5


@_waits
def test_they_are_views_of_one_memory_that_autograd_takes_over() -> None:
    model = residual()
    placed(model, pieces=1)
    with deferred_weight_grads():
        loss_of(model, images()).backward()
    weights = [model.stem.weight, model.first.weight, model.classifier.bias]
    storages = {each.grad.storage().data_ptr() if not hasattr(each, "untyped_storage")
                else each.grad.untyped_storage().data_ptr() for each in weights}  # fmt: skip
    assert len(storages) == 1
    assert all(bool(torch.isfinite(each.grad).all()) for each in model.parameters())


def test_a_weight_in_another_order_of_memory_has_its_gradient_at_once() -> None:
    """`backward` copies such a gradient into the weight's order, before the pass ends."""
    model = residual().to(memory_format=torch.channels_last)
    placed(model, pieces=1)
    with deferred_weight_grads():
        loss_of(model, images()).backward()
    assert all(bool(torch.isfinite(each.grad).all()) for each in model.parameters())


@_waits
def test_nothing_is_filled_before_the_end_and_it_shows() -> None:
    """A gradient that is read too early is NaN, never a number of an earlier step."""
    layer = nn.Conv2d(4, 4, 3, bias=False)
    placed(layer)
    early = []
    image = _X.clone().requires_grad_()
    hidden = image * 1
    # The hook runs after the layer's own backward, before the pass ends.
    hidden.register_hook(lambda _: early.append(found[0].clone()))
    found = []
    kept = layer.runner.backward

    def backward(*arguments):
        result = kept(*arguments)
        found.append(result[1].view(-1))
        return result

    layer.runner.backward = backward
    with deferred_weight_grads():
        torch.autograd.grad(layer(hidden).sum(), [image, layer.weight])
    assert bool(early[0].isnan().all())
    assert bool(torch.isfinite(found[0]).all())


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(4, 4, 3, padding=1)
        self.other = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(torch.relu(self.layer(self.other(x)))))


def test_a_layer_that_is_used_three_times() -> None:
    model, other, _ = twins(_Twice(), pieces=1)
    expected = gradients(model, _X)
    for _ in range(2):
        with deferred_weight_grads():
            found = gradients(other, _X)
        for ours, theirs in zip(found, expected):
            assert bool(torch.isfinite(ours).all())
            assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("kind", ["hook", "old gradient", "not a leaf"])
def test_gradients_that_are_read_at_once_do_not_wait(kind: str) -> None:
    layer = nn.Conv2d(4, 4, 3)
    expected = torch.autograd.grad(layer(_X).sum(), layer.weight)[0]
    placed(layer, pieces=1)
    seen = []
    if kind == "hook":
        layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    elif kind == "old gradient":
        layer.weight.grad = torch.ones_like(layer.weight)
    else:
        raw = layer.weight.detach().clone().requires_grad_()
        del layer._parameters["weight"]
        layer.weight = raw * 1.0
    with deferred_weight_grads():
        layer(_X).sum().backward()
    if kind == "hook":
        assert torch.equal(seen[0], expected)
    elif kind == "old gradient":
        assert torch.equal(layer.weight.grad, expected + 1)
    else:
        assert torch.equal(raw.grad, expected)


def test_gradients_that_add_up_over_two_passes() -> None:
    model, other, _ = twins(residual(), pieces=1)
    for _ in range(2):
        loss_of(model, images()).backward()
        with deferred_weight_grads():
            loss_of(other, images()).backward()
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


@_waits
def test_a_settled_gradient_stays_when_other_passes_run() -> None:
    _model, other, _ = twins(residual(), pieces=1)
    with deferred_weight_grads():
        first = gradients(other, images())
        kept = [each.clone() for each in first]
        gradients(other, images(seed=5))
    for ours, theirs in zip(first, kept):
        assert torch.equal(ours, theirs)


def test_a_pass_inside_of_a_pass() -> None:
    """Checkpointed blocks run a backward pass of their own inside of the whole."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            options = {"use_reentrant": True} if torch_compat.torch_version() >= (1, 11) else {}
            return self.two(checkpoint(self.one, self.two(x), **options))

    model, other, _ = twins(Checkpointed(), pieces=1)
    loss_of(model, _X).backward()
    with deferred_weight_grads():
        loss_of(other, _X).backward()
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert float((ours.grad - theirs.grad).abs().max()) <= 1e-5 * float(theirs.grad.abs().max())


@_waits
def test_large_gradients_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_lab.layers.hetero import late

    monkeypatch.setattr(late, "CHUNK_BYTES", 2000)
    model, other, converted = twins(residual(), mode="overlapped", pieces=1)
    expected = gradients(model, images())
    for _ in range(2):
        converted.ledger.clear()
        with deferred_weight_grads():
            found = gradients(other, images())
        for ours, theirs in zip(found, expected):
            assert torch.equal(ours, theirs)
        assert 2 <= _copies(converted) <= 5


#: Last: torch 1.8 takes no checkpoints after a pass that failed.
def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    model, other, _ = twins(residual(), pieces=1)
    expected = gradients(model, images())
    with deferred_weight_grads():
        handle = other.stem.register_forward_hook(lambda _, x, y: y.register_hook(_fail) and y)
        loss = loss_of(other, images())
        handle.remove()
        with pytest.raises(RuntimeError, match="on purpose"):
            torch.autograd.grad(loss, list(other.parameters()))
        for _ in range(2):
            for ours, theirs in zip(gradients(other, images()), expected):
                assert torch.equal(ours, theirs)


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("on purpose")
