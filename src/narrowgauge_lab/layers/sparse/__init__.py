"""Convolution layers that skip the zeros which ReLU leaves in their map.

    from narrowgauge_lab.layers.sparse import calibrate, convert

    converted = convert(model.eval())        # ReLU -> Conv2d becomes one SparseConv2d
    calibrate(converted.model, images)       # where is skipping faster, here, for these shapes?
    converted.model(images)
    converted.choices()                      # how each layer computes, and why

| module        | what it holds                                                              |
|---------------|----------------------------------------------------------------------------|
| `settings`    | which ReLUs a layer holds, which backend computes it, its crossover          |
| `modules`     | `SparseConv2d`: a drop-in for ReLU and Conv2d with Conv2d's state dict       |
| `backends`    | dense torch, the compiled operator, the generated CUDA kernels, a reference  |
| `prepared`    | what a layer's kernels keep between calls                                   |
| `relus`       | where ReLUs are in a model, and which may go into a convolution              |
| `convert`     | the pairs of a model found and replaced                                      |
| `calibration` | the zero fraction above which skipping is faster, measured                   |
| `weights`     | 2:4 sparsity of the weights of 1x1 convolutions, by torch                    |
"""

from narrowgauge_lab.layers.sparse.calibration import Calibrated, calibrate, levels_for
from narrowgauge_lab.layers.sparse.convert import Converted, LeftAlone, choices, convert
from narrowgauge_lab.layers.sparse.modules import SparseConv2d
from narrowgauge_lab.layers.sparse.settings import BACKENDS, Crossover, Point, Settings

__all__ = [
    "BACKENDS",
    "Calibrated",
    "Converted",
    "Crossover",
    "LeftAlone",
    "Point",
    "Settings",
    "SparseConv2d",
    "calibrate",
    "choices",
    "convert",
    "levels_for",
]
