"""Counts of values in equal bins whose range grows by doubling, so that no count is guessed."""

from __future__ import annotations

import torch

__all__ = ["Histogram"]


class Histogram:
    """One row of counts per channel: bin i of channel c counts the values of

        [(i - bins / 2) · width, (i + 1 - bins / 2) · width)    width = limit[c] / (bins / 2)

    with every value inside the limit. When one is not, the limit doubles and neighbouring bins are
    added: the counts are those that a histogram of that range from the start would have. Zero lies
    on an edge, at the lower end of bin bins / 2.
    """

    def __init__(self, channels: int, bins: int, device: torch.device) -> None:
        if bins % 4:
            raise ValueError(f"{bins} bins cannot be joined in pairs on both sides of zero")
        self.bins = bins
        self.counts = torch.zeros(channels, bins, dtype=torch.int64, device=device)
        #: 0 while a channel has seen nothing but zeros.
        self.limit = torch.zeros(channels, dtype=torch.float64, device=device)

    def add(self, rows: torch.Tensor) -> None:
        """Count `rows`: [channels, values], float32, finite."""
        largest = rows.abs().max(dim=1).values.double()
        # Half a bin beyond: no value lies on the limit, which would belong to a bin that is not.
        first = largest * (1.0 + 1.0 / self.bins)
        self.limit = torch.where(self.limit > 0, self.limit, first)
        while bool((self.limit < first).any()):
            self._double(self.limit < first)
        half = self.bins // 2
        limit = torch.where(self.limit > 0, self.limit, torch.ones_like(self.limit))
        index = torch.floor(rows.double() / limit[:, None] * half).long() + half
        channel = torch.arange(rows.shape[0], device=rows.device)[:, None] * self.bins
        counted = torch.bincount((index + channel).reshape(-1), minlength=self.counts.numel())
        self.counts += counted.reshape(self.counts.shape)

    def _double(self, chosen: torch.Tensor) -> None:
        """Twice the range for the channels where `chosen` is true."""
        channels = self.counts.shape[0]
        quarter = self.bins // 4
        joined = torch.zeros_like(self.counts)
        joined[:, quarter:-quarter] = self.counts.reshape(channels, self.bins // 2, 2).sum(dim=2)
        self.counts = torch.where(chosen[:, None], joined, self.counts)
        self.limit = torch.where(chosen, self.limit * 2, self.limit)

    def width(self) -> torch.Tensor:
        """The width of a bin, float64, per channel."""
        return self.limit / (self.bins // 2)

    def edges(self) -> torch.Tensor:
        """The lower edge of each bin and the upper one of the last: [channels, bins + 1]."""
        places = torch.arange(self.bins + 1, device=self.counts.device) - self.bins // 2
        return places.double() * self.width()[:, None]
