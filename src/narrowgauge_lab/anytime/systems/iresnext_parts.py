"""What both forms of IResNeXt are made of: the widths, slices of weights, a norm for each exit."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from narrowgauge_contract.errors import BadValueError

__all__ = [
    "GROUPS",
    "BlockShape",
    "Drawn",
    "ExitNorm",
    "Geometry",
    "across_groups",
    "conv_weight",
    "grouped_conv",
    "one_product",
    "prefixes",
]

#: Branches of every block, and so exits (the paper's T and cardinality).
GROUPS = 8
#: Channels of the residual stream in the three stages, and of one branch, at width 1.
_STREAMS = (64, 128, 256)
_BRANCHES = (4, 8, 16)


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """A residual block: channels of its `stream`, channels of each `branch`, and whether the stream
    is halved in extent and doubled in channels (by zeros) before it."""

    stream: int
    branch: int
    narrows: bool

    @property
    def inner(self) -> int:
        """Channels of all branches together."""
        return GROUPS * self.branch

    @property
    def widths(self) -> Tuple[int, ...]:
        """Channels of the first 1, 2, … branches."""
        return tuple(self.branch * (number + 1) for number in range(GROUPS))


@dataclasses.dataclass(frozen=True)
class Geometry:
    """`blocks` of each of three stages: 7 in the paper, 3 by default in its program. `width` scales
    all channels: 1, or a quarter (0.25), at which a branch has 1, 2 and 4 channels."""

    blocks: int
    width: float
    classes: int

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= 100:
            raise BadValueError(
                f"{self.blocks} blocks in a stage", next_step="give 1 to 100; the paper has 7"
            )
        if self.width not in (0.25, 0.5, 1.0, 2.0, 4.0):
            raise BadValueError(
                f"width {self.width:g} does not scale branches of 4 channels to whole ones",
                next_step="give 1 as published, or 0.25, 0.5, 2 or 4",
            )
        if self.classes < 2:
            raise BadValueError(f"{self.classes} classes", next_step="give 2 or more")

    def scaled(self, channels: int) -> int:
        return int(channels * self.width)

    @property
    def stem(self) -> int:
        """Channels that the first convolution gives."""
        return self.scaled(_STREAMS[0])

    @property
    def features(self) -> int:
        """Channels of the stream at its end."""
        return self.scaled(_STREAMS[-1])

    @property
    def shapes(self) -> List[BlockShape]:
        """Every block, first to last."""
        return [
            BlockShape(self.scaled(stream), self.scaled(branch), stage > 0 and position == 0)
            for stage, (stream, branch) in enumerate(zip(_STREAMS, _BRANCHES))
            for position in range(self.blocks)
        ]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """An exit that the device alone knows: int64 [1], at most `within`, whose cost it has."""

    exit: torch.Tensor
    within: int


def conv_weight(after: int, before: int, size: int, fan_out: int) -> nn.Parameter:
    """He et al. 2015 by what goes out of a filter: normal, of deviation √(2 / fan_out)."""
    return nn.Parameter(torch.randn(after, before, size, size) * (2.0 / fan_out) ** 0.5)


def prefixes(weight: torch.Tensor, dim: int, sizes: Sequence[int]) -> List[torch.Tensor]:
    """The first so many slices of `weight` along `dim`, for each of `sizes`: views, no copies.

    With gradients, autograd would fill a whole weight with zeros for every view and add them all;
    here those of all views are added up in place in one.
    """
    if torch.is_grad_enabled() and weight.requires_grad and len(sizes) > 1:
        views: Tuple[torch.Tensor, ...] = _Prefixes.apply(weight, dim, tuple(sizes))
        return list(views)
    return [weight.narrow(dim, 0, size) for size in sizes]


def grouped_conv(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """A convolution of `x` [B, C, H, W] by filters [C', C / groups, K, K] of odd K, which keeps H
    and W; on a GPU by one product of all channels, with zeros between the groups.

    Kernels of cuDNN 9 for such groups take filters by sixteens however few there are (`…_g16_…`,
    seen on an H200 in bf16 and channels last through compute-sanitizer). The forward pass reads
    beyond the filters and the pass for their gradient *writes* beyond it, over what lies next in
    memory or in memory of nobody, an illegal access; the search for the fastest kernel runs them
    even where it takes another. The whole product is no convolution by groups. It has up to 8 times
    the multiply-accumulates, which are not counted (`AnytimeNetwork.counted`), and what is infinite
    or not a number in one group makes all of them not a number.
    """
    if x.device.type == "cpu" or groups == 1:
        return F.conv2d(x, weight, padding=_kept(weight), groups=groups)
    return one_product(x, weight, groups)


def one_product(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The same of all channels at once, on any device."""
    return F.conv2d(x, across_groups(weight, groups), padding=_kept(weight))


def _kept(weight: torch.Tensor) -> int:
    """The padding that keeps an image's extent."""
    return int(weight.shape[-1]) // 2  # a tensor to the tracer of torch before 2.0


def across_groups(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Filters [C', C / groups, K, K] of a convolution by groups as those of one without them:
    [C', C, K, K], zero where a filter looks at another group's channels."""
    after, before, *size = weight.shape
    own = weight.reshape(groups, after // groups, before, *size)
    # [filters and channels of a group, K, K, the group of a filter, the group of a channel]
    spread = torch.diag_embed(own.permute(1, 2, 3, 4, 0))
    whole = spread.permute(4, 0, 5, 1, 2, 3).reshape(after, groups * before, *size)
    # For groups of one channel it is a view, with which torch 1.8 takes no batch of none.
    return whole.contiguous()


class _Prefixes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, dim: int, sizes: Tuple[int, ...]
    ) -> Tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.shape = dim, weight.shape
        return tuple(weight.narrow(dim, 0, size) for size in sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Tuple[Any, None, None]:
        total: Optional[torch.Tensor] = None
        for gradient in gradients:
            if gradient is None:
                continue
            if total is None:
                total = gradient.new_zeros(ctx.shape)
            total.narrow(ctx.dim, 0, gradient.shape[ctx.dim]).add_(gradient)
        return total, None, None


class ExitNorm(nn.Module):
    """Batch normalisation that each exit has a set of its own of: exit k has `sizes[k]` channels.

    Scales and offsets of all sets lie one after another in one parameter, without gaps. `momentum`
    is batch normalisation's.
    """

    #: [exits, widest]; what is beyond an exit's own channels means nothing.
    running_mean: torch.Tensor
    running_var: torch.Tensor
    #: Where exit k's channel c is in the parameter; beyond its own, one past the end.
    _places: torch.Tensor

    def __init__(self, sizes: Sequence[int], momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(sum(self.sizes)))
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes)))
        table = (len(self.sizes), max(self.sizes))
        self.register_buffer("running_mean", torch.zeros(table))
        self.register_buffer("running_var", torch.ones(table))
        self.register_buffer("_places", self._make_places(), persistent=False)

    def _make_places(self) -> torch.Tensor:
        places = torch.full(self.running_mean.shape, sum(self.sizes), dtype=torch.int64)
        start = 0
        for row, size in zip(places, self.sizes):
            row[:size] = torch.arange(start, start + size)
            start += size
        return places

    def sets(self, exits: Sequence[int]) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """Scale and offset of these exits, as views. With gradients, those of all exits that run
        are split at once, so that what comes back is put together once."""
        if torch.is_grad_enabled() and len(exits) > 1:
            scales, offsets = self.weight.split(self.sizes), self.bias.split(self.sizes)
            return [(scales[exit], offsets[exit]) for exit in exits]
        places = [(sum(self.sizes[:exit]), self.sizes[exit]) for exit in exits]
        return [(self.weight.narrow(0, *at), self.bias.narrow(0, *at)) for at in places]

    def normalise(
        self, images: torch.Tensor, exit: int, own: Tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """`images` [B, sizes[exit], H, W] by the exit's `own` of `sets`, and the ReLU of that."""
        size = self.sizes[exit]
        mean, var = self.running_mean[exit, :size], self.running_var[exit, :size]
        return self._apply_norm(images, mean, var, own)

    def normalise_drawn(self, images: torch.Tensor, exit: torch.Tensor) -> torch.Tensor:
        """The same for an exit that the device alone knows (int64 [1]) and images [B, C, H, W] of
        at least its channels; those beyond its own become 0."""
        channels = images.shape[1]
        places = self._places.index_select(0, exit)[0, :channels]
        # 0 past the end: scale and offset of channels that the exit does not have.
        own = [F.pad(part, (0, 1)).index_select(0, places) for part in (self.weight, self.bias)]
        tables = [table[:, :channels] for table in (self.running_mean, self.running_var)]
        mean, var = (table.index_select(0, exit)[0] for table in tables)
        normal = self._apply_norm(images, mean, var, (own[0], own[1]))
        if self.training:
            # Past autograd's count of versions: backward passes of other exits hold their rows of
            # these tables, and do not read them.
            for table, row in zip(tables, (mean, var)):
                table.data.index_copy_(0, exit, row[None])
        return normal

    def _apply_norm(
        self,
        images: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        own: Tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        normal = F.batch_norm(
            images, mean, var, own[0], own[1], self.training, self.momentum, self.eps
        )
        # In place: batch normalisation keeps what it took, not what it gave.
        return F.relu_(normal)
