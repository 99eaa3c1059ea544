"""The files of a new experiment, as text with `$id` and `$title` to fill in.

They are a whole small experiment: what rounding its operands does to a matrix product.
"""

from __future__ import annotations

__all__ = ["FILES"]

_EXPERIMENT = """\
# What the experiment is: its parameters, how much each profile does, what is drawn.
# An unknown key is an error that names the nearest known one.

[experiment]
id = "$id"
title = "$title"
summary = "How far a matrix product is from the exact one when its operands are rounded first."
headline = ["relative_error"]

[requires]
torch = ">=1.8"

# `axis = "row"`: a list makes several rows of one run, each in a process of its own.
# `axis = "run"`: a list makes several runs.

[parameters.precision]
type = "choice"
choices = ["fp32", "fp16", "bf16"]
default = "bf16"
axis = "row"
help = "What both operands are rounded to; the product is summed in float32."

[parameters.size]
type = "int"
default = 256
min = 8
max = 8192
axis = "row"
help = "Rows and columns of both square matrices."

# smoke: does it run here? short: a result in minutes. paper: what the paper measured.

[profiles.smoke]
repeats = 1
size = 64
minutes = 0.2
disk_gb = 0.01

[profiles.short]
repeats = 6
precision = ["fp32", "fp16", "bf16"]
minutes = 1
disk_gb = 0.01
note = "Six processes of each precision: the least that gives an interval."

[profiles.paper]
repeats = 10
precision = ["fp32", "fp16", "bf16"]
size = [256, 1024]
minutes = 3
disk_gb = 0.01

[[draw]]
name = "error"
kind = "bar"
title = "Distance from the exact product"
metrics = ["relative_error"]
"""

_RUN = '''\
"""One row of `$id`: a product of rounded matrices, and its distance from the exact one."""

from __future__ import annotations

import torch

from narrowgauge_lab.context import RowContext

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say. The seed is set already, another one for each repeat."""
    size = ctx.parameters["size"]
    kind = _TYPES[ctx.parameters["precision"]]
    left, right = (torch.randn(size, size) for _ in range(2))
    exact = left.double() @ right.double()
    rounded = (left.to(kind).float() @ right.to(kind).float()).double()
    error = float((rounded - exact).norm() / exact.norm())
    if not error < 1.0:  # NaN too
        ctx.invalid(f"the product is not one: its relative error is {error}")
    ctx.metric("relative_error", error, unit="1", source="float64 product")
    ctx.fact("largest_entry", float(exact.abs().max()))
'''

_CLAIMS = """\
# What is claimed, as data: `narrowgauge reproduce $id` measures and judges it.
# kind: value, ratio, ordering, trend, bound, equivalence.
# metric: value, ratio, geomean or order over `name{parameter=value}`.
# `any` stands for every target; a figure of one device takes `device` with part of its name.

[[claim]]
id = "bf16-error"
text = "With operands rounded to bfloat16 the product is within 0.4 % of the exact one."
paper = "Section 4, Table 2"
kind = "bound"
metric = { operator = "value", of = ["relative_error{precision=bf16}"] }
expected = { any = { maximum = 0.004 } }
minimum_repeats = 6
profile = "short"
minutes = 1
disk_gb = 0.01

[[claim]]
id = "order"
text = "float32 is nearest to the exact product, then float16, then bfloat16."
paper = "Section 4, Figure 3"
kind = "ordering"
metric = { operator = "order", of = [
  "relative_error{precision=fp32}",
  "relative_error{precision=fp16}",
  "relative_error{precision=bf16}",
] }
expected = { any = {} }
minimum_repeats = 6
profile = "short"
minutes = 1
disk_gb = 0.01

[[claim]]
id = "eight-times"
text = "bfloat16 has three bits less than float16, so its error is 8 times as large."
paper = "Section 4, Equation 5"
kind = "ratio"
metric = { operator = "ratio", of = [
  "relative_error{precision=bf16}",
  "relative_error{precision=fp16}",
] }
expected = { any = { figure = 8.0, tolerance = 0.1 } }
minimum_repeats = 6
profile = "short"
minutes = 1
disk_gb = 0.01
"""

_README = """\
# $id

$title: how far a matrix product is from the exact one when its operands are rounded first.

```sh
narrowgauge run $id --profile smoke      # does it run here? seconds
narrowgauge run $id                      # short: six processes of each precision
narrowgauge reproduce $id                # measure what its claims need, and judge them
narrowgauge explain $id/bf16-error       # what was claimed, what was found
```

## What is measured

Both operands are standard normal, rounded to `precision` and back, and multiplied in float32.
`relative_error` is the Frobenius norm of what is missing to the float64 product, over its own.
Each repeat has other matrices: its seed is the run's plus its number.

## Claims

| claim | of the paper |
|---|---|
| `bf16-error` | Section 4, Table 2 |
| `order` | Section 4, Figure 3 |
| `eight-times` | Section 4, Equation 5 |
"""

#: Every file of the new experiment's folder.
FILES = {
    "experiment.toml": _EXPERIMENT,
    "run.py": _RUN,
    "claims.toml": _CLAIMS,
    "README.md": _README,
}
