"""Convolution and linear layers whose multiply-accumulate can be replaced.

    from narrowgauge_lab.layers.manual.convert import convert

    converted = convert(model, "lut8x8:ama5", gradient="local")
    loss(converted.model(images)).backward()
    converted.choices()  # which kernel each layer runs, why, and the proof that it may

| module      | what it holds                                                               |
|-------------|-----------------------------------------------------------------------------|
| `policies`  | how a product is formed, as text and as a value; which gradient it has      |
| `modules`   | `ManualConv2d`, `ManualLinear`: drop-ins with the same state dict           |
| `convert`   | a model's layers replaced, and those that are left alone                    |
| `dispatch`  | which compiled kernel forms the products of a policy on a device            |
| `quantise`  | codes and scales of the 8-bit policies, from `quant`'s formulas             |
| `floats`, `codes` | a layer's forward and backward pass under either kind of policy       |
| `gradients` | straight-through and local gradients                                        |
"""
