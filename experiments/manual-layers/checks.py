"""Whether the layers compute what their policy says, in the row's own network."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_kernels.manual import conv2d_ref, linear_ref
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.manual.convert import Converted, convert
from narrowgauge_lab.layers.manual.policies import Policy
from narrowgauge_lab.layers.manual.settings import PATHS

from .model import Network
from .products import mac_of

__all__ = ["check_layers", "check_paths", "check_published", "logits_of"]

#: Images whose layers are computed a second time, product by product.
_IMAGES = 4
#: Of the largest result of a layer: kernels sum up to 3136 products in float32, the reference in
#: float64.
_LAYER_LIMIT = 1e-4
#: Published scores have four digits behind the point and sums of float64; ours of float32.
_SCORE_LIMIT = 1e-3


def logits_of(model: nn.Module, feed: Feed, batch: int) -> torch.Tensor:
    """Of all images of `feed` in their order, float32 [N, classes], on the CPU."""
    everything = torch.arange(len(feed), device=feed.images.device)
    with torch.no_grad():
        parts = [model(feed.batch(indices)[0]).cpu() for indices in everything.split(batch)]
    return torch.cat(parts)


def check_paths(
    ctx: RowContext, exact: nn.Module, converted: Converted, policy: Policy,
    feed: Feed, batch: int, logits: torch.Tensor,
) -> None:  # fmt: skip
    """Of an 8-bit policy: compute all images on every other path that it has here, and record
    `path_differences`, the images whose logits are others in any bit. The row is INVALID where
    there are any: the paths' proofs say that there are none."""
    if not policy.eight_bit:
        return
    taken = {choice["path"] for choice in converted.choices()}
    compared = []
    differing = 0
    for path in PATHS:
        if taken == {path}:
            continue
        try:
            other = convert(exact, policy, path=path).model
        except NotApplicableError:
            continue  # the table has not that form, or this device no kernel for it
        found = logits_of(other, feed, batch)
        differing += int((found != logits).any(dim=1).sum())
        compared.append(path)
    ctx.fact("paths_compared", {"taken": sorted(taken), "with": compared, "images": len(feed)})
    if not compared:
        return
    ctx.metric("path_differences", differing, unit="image", source="computed")
    if differing:
        ctx.invalid(f"{differing} images have other logits by {', '.join(compared)}")


def check_layers(ctx: RowContext, model: nn.Module, policy: Policy, feed: Feed) -> None:
    """Of a float policy: hold every layer's results against the reference products of its own
    inputs, and record `layer_error`, the largest difference over the layer's largest result. The
    row is INVALID where that is beyond rounding. A functor has no reference."""
    mac = mac_of(policy)
    if mac is None:
        return
    seen: List[Tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.append((module, inputs[0].cpu(), output.cpu()))

    layers = [each for each in model.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.no_grad():
            model(feed.batch(torch.arange(_IMAGES, device=feed.images.device))[0])
    finally:
        for handle in handles:
            handle.remove()
    errors = []
    for layer, images, output in seen:
        weight, bias = (each.detach().cpu() for each in (layer.weight, layer.bias))
        if isinstance(layer, nn.Conv2d):
            expected = conv2d_ref(images, weight, bias, mac, padding=layer.padding)
        else:
            expected = linear_ref(images, weight, bias, mac)
        errors.append(float((output.double() - expected).abs().max() / expected.abs().max()))
    ctx.metric("layer_error", errors, unit="1", source="reference products", index="layer")
    if not max(errors) <= _LAYER_LIMIT:
        ctx.invalid(
            f"a layer is {max(errors):.3g} of its largest result from the reference products; "
            f"{_LAYER_LIMIT:g} is allowed for rounding"
        )


def check_published(
    ctx: RowContext, network: Network, weights: str, policy: Policy,
    exact: torch.Tensor, logits: torch.Tensor,
) -> None:  # fmt: skip
    """Where scores of the first test image are published for these very weights: record
    `score_error`, the largest difference of a score from them, exact and by Ax-FPM. The row is
    INVALID where it is more than rounding explains."""
    for published in network.published:
        if published.sha256 != weights:
            continue
        errors = [_largest(exact, published.exact)]
        if policy.name == "axfpm":
            errors.append(_largest(logits, published.axfpm))
        ctx.metric("score_error", errors, unit="1", source="published scores", index="network")
        if not max(errors) <= _SCORE_LIMIT:
            ctx.invalid(f"a score of the first image is {max(errors):.3g} from the published one")


def _largest(scores: torch.Tensor, published: Tuple[float, ...]) -> float:
    wanted = torch.tensor(published, dtype=torch.float64)
    return float((scores[0].double() - wanted).abs().max())
