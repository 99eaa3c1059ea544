"""Layers whose forward pass, input gradient and weight gradient run where a placement plan says.

from narrowgauge_lab.layers.hetero.convert import convert
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads

converted = convert(model, plan, torch.device("cuda"))
converted.watch(optimizer.values)  # weights that are parts of one tensor
with deferred_weight_grads():
    gradients = torch.autograd.grad(loss(converted.model(images)), parameters)
"""
