"""Observers: which range a tensor needs, from the batches that went through.

| name           | range                                                                        |
|----------------|------------------------------------------------------------------------------|
| min-max        | everything seen                                                              |
| moving-average | smallest and largest of each batch, averaged exponentially                   |
| percentile     | what is left when (100 - percentile) % of all values are cut off at each end |
| mse            | the one whose quantisation has the least mean squared error                  |
| entropy        | the one that loses least information (least relative entropy)                |

The last three work on a histogram, so their ends are edges of bins (mse: shares of the range).
"""

from __future__ import annotations

import abc
import math
from typing import Optional, Tuple

import torch

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.histogram import Histogram
from narrowgauge_lab.quant.parameters import choose

__all__ = [
    "OBSERVERS",
    "EntropyObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "MseObserver",
    "Observer",
    "PercentileObserver",
    "make_observer",
]

OBSERVERS = ("min-max", "moving-average", "percentile", "mse", "entropy")

#: Bins of a histogram of a whole tensor, and of each channel.
_TENSOR_BINS, _CHANNEL_BINS = 8192, 2048
#: Ends that the search for the least error tries between 0 and the end of what was seen.
_CANDIDATES = 100
#: The search for the least entropy tries every this many bins.
_ENTROPY_STRIDE = 16


class Observer(abc.ABC):
    """Sees batches, then says a range. `axis` None: one range for the whole tensor; otherwise one
    per index of that dimension.

    Ranges are float32, of no dimension or of one, on the device of the data.
    """

    def __init__(self, axis: Optional[int] = None) -> None:
        self.axis = axis
        self._low: Optional[torch.Tensor] = None
        self._high: Optional[torch.Tensor] = None

    def update(self, values: torch.Tensor) -> None:
        """See one batch. Raises CalibrationError where it is empty, NaN or infinite."""
        if values.numel() == 0:
            raise CalibrationError(
                f"a batch of shape {tuple(values.shape)} has no value to calibrate with",
                next_step="give batches that are not empty",
            )
        rows = self._rows(values.detach()).float()
        low, high = rows.min(dim=1).values, rows.max(dim=1).values
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            found = "NaN" if bool(torch.isnan(low).any()) else "infinity"
            raise CalibrationError(
                f"a batch to calibrate with contains {found}",
                why="it would make the range, and with it every quantised value, meaningless",
                next_step="check the data and the network (float16 overflows at 65504)",
            )
        if self._low is not None and self._low.shape != low.shape:
            raise CalibrationError(
                f"a batch has {len(low)} channels in dimension {self.axis}, earlier ones had "
                f"{len(self._low)}",
                next_step="calibrate a layer with tensors of one kind",
            )
        self._see(rows, low, high)

    def range(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """The range (low, high). Raises CalibrationError before the first batch."""
        if self._low is None or self._high is None:
            raise CalibrationError(
                "there is no range before the first batch",
                next_step="give calibration data: `update` with at least one batch",
            )
        low, high = self._choose(self._low, self._high)
        return (low[0], high[0]) if self.axis is None else (low, high)

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return values.reshape(1, -1)
        return values.transpose(0, self.axis).reshape(values.shape[self.axis], -1)

    def _see(self, _rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        """Take one batch in; rows are [channels, values], the ends those of this batch."""
        if self._low is not None and self._high is not None:
            low, high = torch.min(self._low, low), torch.max(self._high, high)
        self._low, self._high = low, high

    @abc.abstractmethod
    def _choose(self, low: torch.Tensor, high: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The range per channel, from the ends that `_see` kept."""


class MinMaxObserver(Observer):
    """Everything seen."""

    def _choose(self, low: torch.Tensor, high: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return low, high


class MovingAverageObserver(MinMaxObserver):
    """low += averaging · (low of the batch - low), and so for high, from the first batch on."""

    def __init__(self, axis: Optional[int] = None, averaging: float = 0.01) -> None:
        super().__init__(axis)
        if not 0 < averaging <= 1:
            raise BadValueError(f"averaging={averaging}", next_step="give a share: 0 < share <= 1")
        self.averaging = averaging

    def _see(self, _rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        if self._low is not None and self._high is not None:
            low = self._low + self.averaging * (low - self._low)
            high = self._high + self.averaging * (high - self._high)
        self._low, self._high = low, high


class _HistogramObserver(Observer):
    """Keeps the ends and a histogram; the choice is made channel by channel."""

    def __init__(self, axis: Optional[int] = None, bins: Optional[int] = None) -> None:
        super().__init__(axis)
        self._bins = bins or (_TENSOR_BINS if axis is None else _CHANNEL_BINS)
        self._histogram: Optional[Histogram] = None

    def _see(self, rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        super()._see(rows, low, high)
        if self._histogram is None:
            self._histogram = Histogram(rows.shape[0], self._bins, rows.device)
        self._histogram.add(rows)

    def _choose(self, low: torch.Tensor, high: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        assert self._histogram is not None  # _see made it with the first batch
        # The choice is a few thousand small steps: the CPU's work, whatever the data's device.
        counts, edges = self._histogram.counts.cpu(), self._histogram.edges().cpu()
        ends = [
            self._choose_one(counts[c], edges[c], first, last)
            for c, (first, last) in enumerate(zip(low.tolist(), high.tolist()))
        ]
        chosen = torch.tensor(ends, dtype=torch.float32, device=low.device)
        # No choice leaves what was seen: an edge of a bin may lie beyond it.
        return torch.max(chosen[:, 0], low), torch.min(chosen[:, 1], high)

    @abc.abstractmethod
    def _choose_one(
        self, counts: torch.Tensor, edges: torch.Tensor, low: float, high: float
    ) -> Tuple[float, float]:
        """The range of one channel, from its counts [bins] and edges [bins + 1]."""


class PercentileObserver(_HistogramObserver):
    """Cuts off the (100 - percentile) % smallest values, and as many of the largest.

    To within one bin, outwards: never more is cut off than was asked.
    """

    def __init__(self, axis: Optional[int] = None, percentile: float = 99.99) -> None:
        super().__init__(axis)
        if not 50 < percentile <= 100:
            raise BadValueError(f"percentile={percentile}", next_step="give 50 < percentile <= 100")
        self.percentile = percentile

    def _choose_one(
        self, counts: torch.Tensor, edges: torch.Tensor, _low: float, _high: float
    ) -> Tuple[float, float]:
        total = int(counts.sum())
        cut = (100.0 - self.percentile) / 100.0 * total
        below = counts.cumsum(0).double()
        first = int((below <= cut).sum())
        above = counts.flip(0).cumsum(0).double()
        last = len(counts) - int((above <= cut).sum())
        return edges[first].item(), edges[last].item()


class MseObserver(_HistogramObserver):
    """Tries shares of what was seen as ends and keeps the pair with the least squared error.

    A symmetric range has one end to search; an affine one is searched end by end: high, low, high.
    """

    def __init__(
        self,
        axis: Optional[int] = None,
        bits: int = 8,
        symmetric: bool = True,
        narrow: bool = False,
    ) -> None:
        super().__init__(axis)
        self.bits, self.symmetric, self.narrow = bits, symmetric, narrow

    def _choose_one(
        self, counts: torch.Tensor, edges: torch.Tensor, low: float, high: float
    ) -> Tuple[float, float]:
        seen = counts > 0
        weights, centres = counts[seen].double(), ((edges[:-1] + edges[1:]) / 2)[seen]
        shares = torch.linspace(1.0 / _CANDIDATES, 1.0, _CANDIDATES, dtype=torch.float64)

        def best(lows: torch.Tensor, highs: torch.Tensor) -> Tuple[float, float]:
            errors = self._errors(lows, highs, centres, weights)
            # The widest of equals: nothing is cut off for nothing.
            index = int((errors <= errors.min()).nonzero()[-1])
            return lows[index].item(), highs[index].item()

        low, high = min(low, 0.0), max(high, 0.0)
        if self.symmetric:
            ends = shares * max(-low, high)
            return best(-ends, ends)
        first, last = best(torch.full_like(shares, low), shares * high)
        first, last = best(shares * low, torch.full_like(shares, last))
        return best(torch.full_like(shares, first), shares * high)

    def _errors(
        self,
        lows: torch.Tensor,
        highs: torch.Tensor,
        centres: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted squared error of each pair of ends, over the bins that hold something."""
        params = choose((lows, highs), self.bits, self.symmetric, self.narrow, axis=0)
        scale = params.scale.double()[:, None]
        zero = params.zero_point.double()[:, None]
        steps = (torch.round(centres / scale) + zero).clamp(params.quant_min, params.quant_max)
        return (((steps - zero) * scale - centres).pow(2) * weights).sum(dim=1)


class EntropyObserver(_HistogramObserver):
    """The threshold on |x| whose quantised distribution has the least relative entropy to what was
    seen, after Migacz, "8-bit Inference with TensorRT" (GTC 2017).

    Per tensor only: a channel of a weight has too few values for a distribution.
    """

    def __init__(self, bits: int = 8, symmetric: bool = True) -> None:
        super().__init__(None)
        self.bits, self.symmetric = bits, symmetric

    def _choose_one(
        self, counts: torch.Tensor, edges: torch.Tensor, low: float, high: float
    ) -> Tuple[float, float]:
        half = len(counts) // 2
        magnitudes = (counts[half:] + counts[:half].flip(0)).double()
        # Zero is represented exactly, so a spike there (ReLU) must not draw the threshold down.
        magnitudes[0] = magnitudes[1]
        if not bool(magnitudes.sum() > 0):
            return low, high
        unsigned = not self.symmetric and low >= 0
        levels = 2 ** (self.bits if unsigned else self.bits - 1)
        kept = _least_entropy(magnitudes, levels)
        threshold = edges[half + kept].item()
        return -threshold, threshold


def _least_entropy(counts: torch.Tensor, levels: int) -> int:
    """How many of the first bins to keep, so that `levels` levels describe them best."""
    bins = len(counts)
    candidates = [*range(levels, bins, _ENTROPY_STRIDE), bins]
    divergences = [_divergence(counts, kept, levels) for kept in candidates]
    best = min(divergences)
    return max(kept for kept, value in zip(candidates, divergences) if value <= best)


def _divergence(counts: torch.Tensor, kept: int, levels: int) -> float:
    """Relative entropy of the first `kept` bins, outliers in the last, to their quantisation."""
    reference = counts[:kept].clone()
    reference[-1] += counts[kept:].sum()
    filled = (reference > 0).double()
    level = torch.arange(kept) * levels // kept
    sums = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, counts[:kept])
    shares = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, filled)
    if not bool(sums.sum() > 0):
        return math.inf  # everything seen lies beyond this threshold
    # A level is spread evenly over those of its bins that hold something.
    quantised = (sums / shares.clamp(min=1.0))[level] * filled
    p, q = reference / reference.sum(), quantised / quantised.sum()
    there = p > 0
    # Where q is 0 and p is not, the logarithm is infinite: that threshold describes nothing.
    return float((p[there] * torch.log(p[there] / q[there])).sum())


def make_observer(
    name: str,
    axis: Optional[int] = None,
    bits: int = 8,
    symmetric: bool = True,
    narrow: bool = False,
    percentile: float = 99.99,
    averaging: float = 0.01,
) -> Observer:
    """An observer by name. What the kind does not need is not looked at: bits, symmetric and narrow
    are for mse and entropy.

    Raises UnknownNameError, and BadValueError for entropy per channel.
    """
    if name not in OBSERVERS:
        raise UnknownNameError("observer", name, OBSERVERS)
    if name == "moving-average":
        return MovingAverageObserver(axis, averaging)
    if name == "percentile":
        return PercentileObserver(axis, percentile)
    if name == "mse":
        return MseObserver(axis, bits, symmetric, narrow)
    if name == "entropy":
        if axis is not None:
            raise BadValueError(
                "the entropy observer is per tensor",
                why="one channel has too few values for a distribution",
                next_step="use min-max, percentile or mse for ranges per channel",
            )
        return EntropyObserver(bits, symmetric)
    return MinMaxObserver(axis)
