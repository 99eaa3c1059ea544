"""The kernels of our GPU engine on the CPU by Triton's interpreter, each step by itself.

A program of its own: TRITON_INTERPRET=1 has to be there before triton is imported. Says how many
ways of how many steps were right in each format that it is given. Not for bf16 and fp8, to which
the interpreter does not round as devices do.
"""

from __future__ import annotations

import sys
from typing import List

import torch
import triton_interpreter  # noqa: F401 - it mends what it imports
from network_cases import everything, images
from own_cases import Bench, Way

from narrowgauge_lab.engines.own.gpu.formats import FORMATS
from narrowgauge_lab.engines.own.gpu.lowered import lowered

HEIGHT, WIDTH = 12, 10


def chosen(ways: List[Way]) -> List[Way]:
    """The first, the last, and one that divides its sum: the rest differ in what the interpreter
    does not look at."""
    divided = [way for way in ways if way.candidate.store().get("parts", 1) > 1]
    return list({str(way): way for way in (*ways[:1], *divided[:1], *ways[-1:])}.values())


def main(names: List[str]) -> None:
    for name in names:
        form = FORMATS[name]
        model = everything(HEIGHT, WIDTH, torch_step=not form.scaled)
        few = images(16, seed=7, height=HEIGHT, width=WIDTH)
        x = images(2, seed=3, height=HEIGHT, width=WIDTH)
        if not form.scaled:
            x[1, 0, 5, 4] = float("nan")
        network = lowered(model, tuple(x.shape[1:]), form, [few], torch.device("cpu"))
        bench = Bench(network, x)
        bench.check_images()
        count = 0
        for step in network.plan.steps:
            for way in chosen(bench.ways(step)):
                try:
                    bench.check(way)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {way}: {error}") from error
                count += 1
        print(f"{name}: {count} ways of {len(network.plan.steps)} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
