"""Zeros in feature maps: where they are in real ones, and made-up maps that have them likewise."""

from __future__ import annotations

from narrowgauge_lab.sparsity.census import (
    GROUP,
    LayerMap,
    Zeros,
    capture,
    group_zero_fraction,
    zero_fraction,
    zeros_of,
)
from narrowgauge_lab.sparsity.maps import PATTERNS, matched_map, pattern_map

__all__ = [
    "GROUP",
    "PATTERNS",
    "LayerMap",
    "Zeros",
    "capture",
    "group_zero_fraction",
    "matched_map",
    "pattern_map",
    "zero_fraction",
    "zeros_of",
]
