"""One row of `manual-layers`: the original's three nets, and the row's policy beside them."""

from __future__ import annotations

import copy
from typing import Any, Dict, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError
from narrowgauge_kernels.errors import ToolchainMissingError
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.layers.manual.convert import Converted, convert
from narrowgauge_lab.layers.manual.policies import Policy
from narrowgauge_lab.quant.parameters import choose
from narrowgauge_lab.training import seed_everything

from .checks import check_layers, check_paths, check_published, logits_of
from .model import NETWORKS, Network
from .products import found_policy, record_products
from .times import record_times
from .weights import file_sha256, give_weights

#: The policy of the original's appx_net: its hook for an approximate product multiplies exactly.
_EXACT = "exact_fp32"
_SYNTHETIC = {"channels": 1, "size": 28, "classes": 10, "train": 2000, "test": 1000}


def run(ctx: RowContext) -> None:
    """Obtain weights, compute all test images four times, and time the row's policy."""
    parameters = ctx.parameters
    network = NETWORKS[parameters["network"]]
    policy = found_policy(parameters["policy"])
    seed_everything(ctx.seed)
    exact = network.make().to(ctx.device)
    # Before training, which takes minutes: a policy that cannot be, says so now.
    _converted(exact, policy)
    data = _data(ctx)
    training_set, test_set = _feeds(ctx, data, network)
    if not give_weights(ctx, exact, training_set, test_set, data.declaration.classes):
        return
    # On a GPU torch's own layers would take TF32, which no policy of ours does.
    tf32_flags.allow_tf32(False)
    _compare(ctx, network, policy, exact, test_set)


def _compare(
    ctx: RowContext, network: Network, policy: Policy, exact: nn.Module, test_set: Feed
) -> None:
    batch = ctx.parameters["test_batch"]
    converted = _converted(exact, policy)
    ctx.fact("choices", converted.choices())
    ctx.fact("test_images", len(test_set))
    count = sum(each.numel() for each in exact.parameters())
    ctx.metric("parameters", count, unit="1", source="computed")
    with ctx.span("accuracy"):
        nets = {
            "exact_net": exact,
            "appx_net": convert(exact, _EXACT).model,
            "quant_net": quantised(exact),
        }
        logits = {name: logits_of(net, test_set, batch) for name, net in nets.items()}
        found = logits_of(converted.model, test_set, batch)
    _record_original(ctx, logits, test_set)
    _record_policy(ctx, logits["exact_net"], found, test_set)
    with ctx.span("checks"):
        record_products(ctx, policy)
        check_layers(ctx, converted.model, policy, test_set)
        check_paths(ctx, exact, converted, policy, test_set, batch, found)
        check_published(ctx, network, file_sha256(ctx), policy, logits["exact_net"], found)
    with ctx.span("times"):
        record_times(ctx, exact, converted.model, test_set, batch)


def quantised(model: nn.Module) -> nn.Module:
    """A copy whose weights and biases are those that int8 stands for: per tensor, symmetric, narrow
    range, ties to even. Activations stay float32."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        for values in new.parameters():
            params = choose((values.min(), values.max()), 8, symmetric=True, narrow=True)
            values.copy_(params.dequantize(params.quantize(values)))
    return new


def _record_original(ctx: RowContext, logits: Dict[str, torch.Tensor], test_set: Feed) -> None:
    """The original's three figures, as metrics, as facts for the closing lines, and as lines."""
    for name, values in logits.items():
        accuracy = _share(values.argmax(1), test_set.labels.cpu())
        ctx.metric(f"{name}_accuracy", accuracy, unit="%", source="computed")
        ctx.fact(name, accuracy)
        ctx.log(f"Accuracy of {name}: {accuracy:f} %")
    agreement = _share(logits["appx_net"].argmax(1), logits["exact_net"].argmax(1))
    ctx.metric("appx_agreement", agreement, unit="%", source="computed")
    if agreement < 100.0:
        ctx.invalid(
            f"appx_net with exact products sees other classes than exact_net: they agree on "
            f"{agreement:.2f} % of the images"
        )


def _record_policy(
    ctx: RowContext, exact: torch.Tensor, found: torch.Tensor, test_set: Feed
) -> None:
    ctx.metric(
        "accuracy", _share(found.argmax(1), test_set.labels.cpu()), unit="%", source="computed"
    )
    agreement = _share(found.argmax(1), exact.argmax(1))
    ctx.metric("agreement", agreement, unit="%", source="computed")
    scale = float(found.double().norm() / exact.double().norm())
    ctx.metric("logit_scale", scale, unit="1", source="computed")
    if not bool(torch.isfinite(found).all()):
        ctx.invalid("a logit is not finite")


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Where they are equal, in percent."""
    return 100.0 * int((one == other).sum()) / len(one)


def _converted(model: nn.Module, policy: Policy) -> Converted:
    """Raises SkippedError where a functor finds no compiler; and what `convert` raises."""
    try:
        return convert(model.eval(), policy)
    except ToolchainMissingError as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error


def _data(ctx: RowContext) -> FlatData:
    return ctx.asked_data(**_SYNTHETIC)


def _feeds(ctx: RowContext, data: FlatData, network: Network) -> Tuple[Feed, Feed]:
    """As the network's authors normalise them, not as the data set declares."""
    count = ctx.parameters["train_limit"] or len(data.train_images)

    def feed(images: Any, labels: Any) -> Feed:
        return Feed(images, labels, (network.mean,), (network.std,), ctx.device)

    return (
        feed(data.train_images[:count], data.train_labels[:count]),
        feed(data.test_images, data.test_labels),
    )
