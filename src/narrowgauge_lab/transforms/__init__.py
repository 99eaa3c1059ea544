"""Transforms of a model into another that computes the same: folding, conversion, layout.

Each leaves the given model alone, gives a new one, and can say what it did and what it left.
"""

from narrowgauge_lab.transforms.conversion import Conversion, Rule, convert, converted
from narrowgauge_lab.transforms.folding import Folding, fold_batch_norm, folded
from narrowgauge_lab.transforms.layout import LayoutReport, check_channels_last, to_channels_last

__all__ = [
    "Conversion",
    "Folding",
    "LayoutReport",
    "Rule",
    "check_channels_last",
    "convert",
    "converted",
    "fold_batch_norm",
    "folded",
    "to_channels_last",
]
