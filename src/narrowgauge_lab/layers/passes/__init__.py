"""The three products of a convolution or linear layer, on one device, at a precision.

    passes = passes_for("int8", device, Problem("conv2d", (2, 2), (1, 1)))
    image, above = passes.prepared_input(x), passes.prepared_grad(grad, seed=step)
    y = passes.forward(image, weight, bias)
    by_input = passes.input_grad(above, weight, x.shape)
    by_weight = passes.weight_grad(above, image, weight.shape)

Tensors are on the device already. What is prepared once may be used for two passes; a plain tensor
(or `Quantised`) may be given instead and is prepared on the way. Nothing here is differentiable.
"""

from __future__ import annotations

from narrowgauge_lab.layers.passes.choice import PRECISIONS, Passes, missing, passes_for
from narrowgauge_lab.layers.passes.problem import Operand, Problem, Quantised

__all__ = ["PRECISIONS", "Operand", "Passes", "Problem", "Quantised", "missing", "passes_for"]
