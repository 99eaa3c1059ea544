"""The 8-bit network's kernels on a GPU against exact arithmetic on the CPU."""

from __future__ import annotations

from typing import Dict, Tuple

import pytest
import torch
from network_cases import images, tiny

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.quant.gpu import QuantizedNetwork, lower
from narrowgauge_lab.quant.gpu.network import calibrate, pack, require_device, trace
from narrowgauge_lab.quant.gpu.number_format import FORMATS
from narrowgauge_lab.quant.gpu.plan import MaxPoolStep, Plan, make_plan
from narrowgauge_lab.quant.gpu.reference import run_reference

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CPU = torch.device("cpu")


def _both(
    name: str, x: torch.Tensor
) -> Tuple[Plan, QuantizedNetwork, Dict[str, torch.Tensor], torch.Tensor]:
    require_device(name, CUDA)
    graph = trace(tiny())
    plan = make_plan(graph)
    form = FORMATS[name]
    scales = calibrate(graph, plan, [images(16, seed=7)], form, "min-max", CPU)
    weights = pack(graph, plan, form)
    modules = dict(graph.named_modules())
    logits, stored = run_reference(plan, modules, weights, scales, form, x)
    return plan, QuantizedNetwork(plan, weights, scales, form, CUDA), stored, logits


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("size", [(37, 33), (64, 64)])
def test_int8_is_exact_but_for_ties(batch: int, size: Tuple[int, int]) -> None:
    x = images(batch, seed=3, height=size[0], width=size[1])
    _, network, _, logits = _both("int8", x)
    made = network(x.to(CUDA)).cpu()
    assert float((made - logits).norm() / logits.norm()) <= 2e-3


def test_every_stored_value_of_int8_is_within_one_unit() -> None:
    x = images(4, seed=3)
    plan, network, stored, _ = _both("int8", x)
    network(x.to(CUDA))
    prepared = next(iter(network._prepared.values()))
    prepared.read(x.to(CUDA))
    for launch, step in zip(prepared.rest, plan.steps[:-1]):
        launch()
        expected = stored[step.output].float()
        batch, channels, height, width = expected.shape
        found = prepared.buffers[step.output].float().cpu().view(batch, height, width, -1)
        difference = (found[..., :channels].permute(0, 3, 1, 2) - expected).abs()
        assert float(difference.max()) <= 1, step
        assert float((difference > 0).float().mean()) <= (
            0 if isinstance(step, MaxPoolStep) else 0.01
        )


def test_fp8_is_near_its_reference() -> None:
    x = images(8, seed=3)
    _, network, _, logits = _both("fp8", x)
    made = network(x.to(CUDA)).cpu()
    assert float((made - logits).norm() / logits.norm()) <= 0.1


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_any_strides_and_float_types_of_the_input_give_the_same(name: str) -> None:
    x = images(5, seed=3).half().float()
    _, network, _, _ = _both(name, x)
    first = network(x.to(CUDA)).clone()
    channels_last = x.to(CUDA).contiguous(memory_format=torch.channels_last)
    assert torch.equal(network(channels_last), first)
    assert torch.equal(network(x.to(CUDA).half()), first)
    wide = torch.zeros(5, 3, 37, 66, device=CUDA)[..., ::2]
    wide.copy_(x)
    assert torch.equal(network(wide), first)


def test_graph_and_launches_give_the_same_and_shapes_alternate() -> None:
    graph = trace(tiny())
    plan = make_plan(graph)
    form = FORMATS["int8"]
    scales = calibrate(graph, plan, [images(16, seed=7)], form, "min-max", CPU)
    weights = pack(graph, plan, form)
    captured = QuantizedNetwork(plan, weights, scales, form, CUDA)
    launched = QuantizedNetwork(plan, weights, scales, form, CUDA, graph=False, tuned=False)
    for batch in (2, 7, 2):
        x = images(batch, seed=batch).to(CUDA)
        assert torch.equal(captured(x), launched(x))
    assert {layer["layer"] for layer in captured.layers()} == set(weights)


def test_a_second_call_forgets_the_first() -> None:
    x, other = images(4, seed=1).to(CUDA), images(4, seed=2).to(CUDA)
    model = tiny()
    network = lower(model, [images(16, seed=7)], "int8", CUDA)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    first = network(x).clone()
    network(other)
    assert torch.equal(network(x), first)


def test_fp8_is_refused_where_the_card_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(NotApplicableError, match="fp8 products"):
        lower(tiny(), [images(2)], "fp8", CUDA)
