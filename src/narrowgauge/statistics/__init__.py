"""Statistics of raw samples, computed on reading, never stored.

What cannot be told from the samples is None, with the reason beside it where there is one; an
interval is never made up.

    samples         medians and their intervals
    configurations  rows that differ in repeat and seed only
    ratios          intervals of ratios, of their geometric mean, and tests of equivalence
    modality        whether samples have two modes, so that a median stands for neither
    detection       the least effect that a comparison would find, from comparisons of A with A
"""

from narrowgauge.statistics.configurations import (
    Configuration,
    configurations,
    stated,
    varying,
    word,
)
from narrowgauge.statistics.detection import Effect, least_detectable_effect
from narrowgauge.statistics.modality import Modes, modes_of
from narrowgauge.statistics.ratios import (
    Equivalence,
    LogRatio,
    equivalent,
    geometric_mean_interval,
    hierarchical_log_ratio_interval,
    log_ratio_interval,
    ratio_of,
)
from narrowgauge.statistics.samples import (
    COVERAGE,
    Interval,
    Summary,
    median_interval,
    summarize,
)
from narrowgauge_contract.figures import Figure, figure

__all__ = [
    "COVERAGE",
    "Configuration",
    "Effect",
    "Equivalence",
    "Figure",
    "Interval",
    "LogRatio",
    "Modes",
    "Summary",
    "configurations",
    "equivalent",
    "figure",
    "geometric_mean_interval",
    "hierarchical_log_ratio_interval",
    "least_detectable_effect",
    "log_ratio_interval",
    "median_interval",
    "modes_of",
    "ratio_of",
    "stated",
    "summarize",
    "varying",
    "word",
]
