"""Layers whose forward pass, input gradient and weight gradient run where a placement plan says.

    from narrowgauge_lab.layers.hetero import convert, deferred_weight_grads

    converted = convert(model, plan, torch.device("cuda"))
    converted.watch(optimizer.values)  # weights that are parts of one tensor
    with deferred_weight_grads():
        gradients = torch.autograd.grad(loss(converted.model(images)), parameters)

`HeteroConv2d` and `HeteroLinear` take the place of torch's; one that is constructed by itself runs
as torch's own until `convert` has placed it.
"""

from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.modules import HeteroConv2d, HeteroLinear

__all__ = ["Converted", "HeteroConv2d", "HeteroLinear", "convert", "deferred_weight_grads"]
