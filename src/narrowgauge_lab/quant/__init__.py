"""Quantisation: ranges, parameters, fake-quantised models, and adapters to real int8 execution.

| module        | what it holds                                                            |
|---------------|--------------------------------------------------------------------------|
| `observers`   | the range of what went through a layer                                   |
| `parameters`  | scale and zero point of a range; integers and back                       |
| `fake`        | rounding to those integers inside a float network, differentiable        |
| `presets`     | published weights-only formulas, to the bit                              |
| `calibration` | from batches to the parameters of every layer                            |
| `layers`      | the fake-quantised model                                                 |
| `qat`         | that model trained, its steps with it                                    |
| `dynamic`     | linear layers whose inputs are ranged batch by batch                     |
| `sensitivity` | what each layer alone costs                                              |
| `energy`      | MACs, bytes and bit operations at given widths, of the float network     |
| `allocation`  | bits for each layer under a budget, greedily by sensitivity              |
| `x86`, `qdq`  | the same parameters executed in int8: torch's engine, ONNX Runtime       |
| `executors`   | what runs a quantised network, by name, and the widths that it has       |
| `converted`   | layers that run integers, and that nobody trains those                   |
| `comparison`  | our scales beside those that other tools would choose (`peers`)          |
| `toolkit`,    | such tools: pytorch-quantization; TensorRT's calibrators                 |
| `trt`         |                                                                          |

Import from the submodules.
"""
