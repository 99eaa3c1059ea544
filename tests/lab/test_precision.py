"""Which precision may run, and loss scaling, on CPU and both ages of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.precision import LossScale, available, enter

CPU = torch.device("cpu")


def test_fp32_works_everywhere_and_switches_tf32_off() -> None:
    tf32_flags.allow_tf32(True)
    assert all(tf32_flags.tf32_allowed().values())

    mode = enter("fp32", CPU)

    assert tf32_flags.tf32_allowed() == {"matmul": False, "conv": False}
    assert not mode.scales_loss
    assert mode.dtype == torch.float32


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_set_for_a_block_and_then_as_it_was(before: bool) -> None:
    tf32_flags.allow_tf32(before)
    try:
        with tf32_flags.tf32_set_to(not before):
            assert set(tf32_flags.tf32_allowed().values()) == {not before}
        assert set(tf32_flags.tf32_allowed().values()) == {before}
    finally:
        tf32_flags.allow_tf32(False)


@pytest.mark.parametrize("allowed", [True, False])
def test_who_reads_the_older_flags_may_do_so(allowed: bool) -> None:
    """`torch.backends.cudnn.flags()` does, which models and libraries enter; torch from 2.9 on
    raises where what they say and what the newer ones say differ."""
    cudnn = torch.backends.cudnn
    try:
        tf32_flags.allow_tf32(allowed)
        assert cudnn.allow_tf32 is allowed
        with cudnn.flags(enabled=False, allow_tf32=allowed):
            pass
        assert tf32_flags.tf32_allowed() == {"matmul": allowed, "conv": allowed}
        with tf32_flags.tf32_set_to(not allowed):
            assert cudnn.allow_tf32 is not allowed
        assert cudnn.allow_tf32 is allowed
    finally:
        tf32_flags.allow_tf32(False)


def test_what_torch_starts_with_survives_a_block_too() -> None:
    """Convolutions may use TF32 and products may not: two flags, not one."""
    tf32_flags.allow_tf32(False)
    if torch_compat.torch_version() < (2, 9):
        torch.backends.cudnn.allow_tf32 = True
    else:
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    try:
        with tf32_flags.tf32_set_to(False):
            assert tf32_flags.tf32_allowed() == {"matmul": False, "conv": False}
        assert tf32_flags.tf32_allowed() == {"matmul": False, "conv": True}
    finally:
        tf32_flags.allow_tf32(False)


@pytest.mark.skipif(
    not hasattr(torch, "get_float32_matmul_precision"), reason="torch 1.12 brought the word"
)
@pytest.mark.parametrize("word", ["medium", "high", "highest"])
def test_the_word_for_float32_products_survives_a_block(word: str) -> None:
    """`medium` is a third one, of which the flags know nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.set_float32_matmul_precision(word)
    try:
        flags = tf32_flags.tf32_allowed()
        with tf32_flags.tf32_set_to(word == "highest"):
            assert torch.get_float32_matmul_precision() != word
        assert torch.get_float32_matmul_precision() == word
        assert tf32_flags.tf32_allowed() == flags
    finally:
        tf32_flags.allow_tf32(False)


@pytest.mark.skipif(torch_compat.torch_version() < (2, 9), reason="torch 2.9 brought both ways")
def test_flags_that_contradict_the_word_survive_a_block() -> None:
    tf32_flags.allow_tf32(False)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with tf32_flags.tf32_set_to(True):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert tf32_flags.tf32_allowed() == {"matmul": False, "conv": False}
    finally:
        tf32_flags.allow_tf32(False)


def test_tf32_on_cpu_is_refused_with_what_works() -> None:
    with pytest.raises(NotApplicableError, match="tf32 does not work on cpu") as caught:
        enter("tf32", CPU)

    assert "tensor cores" in caught.value.why
    assert "-p precision=fp32" in caught.value.next_step


def test_what_is_available_on_cpu_follows_torch() -> None:
    works = available(CPU)

    assert works[0] == "fp32"
    assert "tf32" not in works
    if torch_compat.torch_version() < (1, 10):
        assert works == ["fp32"]
    if torch_compat.torch_version() >= (2, 13):
        assert works == ["fp32", "bf16", "fp16"]


def test_overflow_halves_the_scale_and_good_steps_double_it() -> None:
    scale = LossScale(CPU, initial=1024.0, interval=3)
    seen = []
    for overflowed in (False, False, True, False, False, False, False):
        scale.update(torch.tensor(overflowed))
        seen.append(float(scale.scale))

    # The overflow starts the count anew; three good steps in a row then double.
    assert seen == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
    assert int(scale.skipped) == 1
    assert int(scale.good_steps) == 1


def test_the_scale_never_becomes_infinite() -> None:
    scale = LossScale(CPU, initial=2.0**127, interval=1)
    scale.update(torch.tensor(False))

    assert float(scale.scale) == 2.0**127


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_unscaling_divides_and_tells_of_one_bad_element(bad: float) -> None:
    scale = LossScale(CPU, initial=8.0)
    gradient = torch.tensor([8.0, -16.0, 0.0])
    assert not scale.unscale(gradient)
    assert gradient.tolist() == [1.0, -2.0, 0.0]
    gradient[1] = bad
    assert scale.unscale(gradient)


def test_scaled_and_unscaled_steps_agree() -> None:
    """A power of two is exact in float32, so scaling changes nothing at all."""
    inputs, target = torch.randn(5, 4), torch.randn(5, 2)
    weights = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer, scale = SGD(model, rate=0.1), LossScale(CPU)
        for _ in range(3):
            loss = (model(inputs) - target).pow(2).mean()
            optimizer.differentiate(scale.apply(loss) if scaled else loss)
            skip = scale.unscale(optimizer.gradient) if scaled else None
            optimizer.step(skip)
        weights.append(model.weight.detach().clone())

    assert torch.equal(*weights)


def test_an_overflowing_step_changes_neither_weights_nor_momentum() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model, rate=0.1)
    optimizer.gradient.fill_(1.0)
    optimizer.step(torch.tensor(False))
    values, momentum = optimizer.values.clone(), optimizer.state["momentum"].clone()

    optimizer.gradient.fill_(float("nan"))
    optimizer.step(torch.tensor(True))
    assert torch.equal(optimizer.values, values)
    assert torch.equal(optimizer.state["momentum"], momentum)

    optimizer.gradient.fill_(1.0)
    optimizer.step(torch.tensor(False))
    assert not torch.equal(optimizer.values, values)
    assert torch.isfinite(optimizer.values).all()


def test_the_rule_is_that_of_grad_scaler() -> None:
    """torch's own update, where this torch has it on CPU."""
    if torch_compat.torch_version() < (2, 3):
        pytest.skip("no _amp_update_scale_ on CPU in this torch")
    scale = LossScale(CPU, initial=64.0, interval=4)
    theirs, tracker = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    for overflowed in (torch.rand(200, generator=generator) < 0.15).tolist():
        scale.update(torch.tensor(overflowed))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflowed)), 2.0, 0.5, 4)
        assert float(scale.scale) == float(theirs)
        assert int(scale.good_steps) == int(tracker)


def test_the_scale_survives_a_checkpoint() -> None:
    one, other = LossScale(CPU, initial=16.0, interval=2), LossScale(CPU, interval=2)
    one.update(torch.tensor(True))
    one.update(torch.tensor(False))
    other.load_state_dict(one.state_dict())
    for scale in (one, other):
        scale.update(torch.tensor(False))

    assert float(one.scale) == float(other.scale) == 16.0
    assert int(other.skipped) == 1
