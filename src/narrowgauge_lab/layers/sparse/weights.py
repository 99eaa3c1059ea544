"""2:4 sparsity of the weights of 1x1 convolutions, by torch's semi-structured support.

Of every four weights along the input channels the two of least magnitude become zero, and a 1x1
convolution becomes a product that sparse tensor cores run at up to twice the dense rate. Below a
certain size packing the operands and launching cost more than that saves, and the ratio is below 1:
measure, as `experiments/sparse-layers` does, before it is used. Accuracy is not looked at here; a
network that is to keep it is trained with the zeros.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError, UsageError
from narrowgauge_lab import torch_compat

__all__ = ["SemiStructuredConv2d", "lacking", "pruned", "require"]

#: torch's cuSPARSELt and CUTLASS kernels take multiples of this many rows and columns.
_ROWS, _COLUMNS = 32, 64
_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """[F, C, 1, 1] with exactly two zeros, or more, in every four weights along C: the two of least
    magnitude, of equal ones the later. UsageError where C is no multiple of four."""
    filters, channels = weight.shape[:2]
    if channels % 4 or weight.shape[2:] != (1, 1):
        raise UsageError(
            f"a weight of shape {list(weight.shape)} has no 2:4 pattern",
            why="it takes a 1x1 convolution whose channels are a multiple of four",
        )
    groups = weight.detach().reshape(filters, channels // 4, 4)
    magnitude = groups.abs().float()
    # How many of the four come before each: larger ones, and equal ones in front of it.
    other, this = magnitude.unsqueeze(-2), magnitude.unsqueeze(-1)
    earlier = torch.ones(4, 4, dtype=torch.bool, device=weight.device).tril(-1)
    rank = ((other > this) | ((other == this) & earlier)).sum(dim=-1)
    kept = torch.where(rank < 2, groups, torch.zeros_like(groups))
    return kept.reshape(weight.shape)


def lacking(layer: nn.Conv2d, device: torch.device) -> str:
    """Why torch or the card cannot run a layer's weight as 2:4; empty where they can."""
    filters, channels = layer.weight.shape[:2]
    square, ones = tuple(layer.kernel_size) == (1, 1), tuple(layer.stride) == (1, 1)
    plain = ones and layer.groups == 1 and tuple(layer.padding) == (0, 0)
    if not square or not plain:
        return "only 1x1 convolutions of stride 1, without padding and groups, are one product"
    if filters % _ROWS or channels % _COLUMNS:
        return (
            f"{filters} filters of {channels} channels: torch takes multiples of {_ROWS} and "
            f"{_COLUMNS}"
        )
    if layer.weight.dtype not in _DTYPES:
        return f"the weight is {layer.weight.dtype}, and 2:4 is for float16 and bfloat16 here"
    if torch_compat.torch_version() < (2, 1):
        return f"torch {torch.__version__} has no semi-structured tensors; 2.1 and later have"
    if device.type != "cuda":
        return f"torch's semi-structured product is for CUDA, and this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no sparse tensor cores"
    return ""


def require(layer: nn.Conv2d, device: torch.device) -> None:
    """SkippedError with `lacking`'s reason, where there is one."""
    why = lacking(layer, device)
    if why:
        raise SkippedError("2:4 weight sparsity cannot run here", why=why)


class SemiStructuredConv2d(nn.Module):
    """A 1x1 convolution whose weight is pruned to 2:4 and kept compressed; inference only.

    x [B, C, H, W] -> [B, F, H, W], channels_last. Raises SkippedError where `lacking` says why.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        require(layer, layer.weight.device)
        dense = pruned(layer.weight).flatten(1).contiguous()
        self.bias: Optional[torch.Tensor] = None if layer.bias is None else layer.bias.detach()
        self.compressed: Any = _compressed(dense)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, shape = _rows(x)
        result = nn.functional.linear(rows, self.compressed, self.bias)
        batch, height, width = shape
        return result.reshape(batch, height, width, -1).permute(0, 3, 1, 2)


def _rows(x: torch.Tensor) -> Tuple[torch.Tensor, Tuple[int, int, int]]:
    """Pixels as rows of channels, and [B, H, W]."""
    turned = x.permute(0, 2, 3, 1)
    batch, height, width, channels = turned.shape
    return turned.reshape(batch * height * width, channels), (batch, height, width)


def _compressed(dense: torch.Tensor) -> Any:
    from torch.sparse import to_sparse_semi_structured

    with warnings.catch_warnings():
        # "in prototype stage", once in each process, in every torch that has them.
        warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor")
        return to_sparse_semi_structured(dense)
