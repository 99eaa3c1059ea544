"""How many images a second a CIFAR-form ResNet trains on, with and without torch.compile, on a GPU.

    PYTHONPATH=src python benchmarks/layers/compiled_training.py [--depth 18 50] [--batch 128]
        [--pairs N] [--json FILE]

Both are the steps of the training loop (`narrowgauge_lab.stepping`) in bf16, channels_last, each
replayed as a CUDA graph, and take turns; images are noise. The first step of what is compiled,
minutes at most, is beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

#: Images that steps draw their batches from.
IMAGES = 8192
SIDES = ("plain", "compiled")
#: Steps until one is captured, and replayed.
_WARM_UP = 5


def stepper(depth: int, batch: int, compiles: bool) -> Any:
    """Steps of one network; calling it with the indices of images makes one."""
    import numpy as np
    import torch

    from narrowgauge_lab import precision
    from narrowgauge_lab.augment import Augmentation, Feed
    from narrowgauge_lab.distributed import ALONE
    from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
    from narrowgauge_lab.optim import SGD
    from narrowgauge_lab.stepping import Stepper

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    drawn = np.random.default_rng(0)
    images = drawn.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    labels = drawn.integers(0, 10, IMAGES)
    mean, std = (0.5,) * 3, (0.25,) * 3
    feed = Feed(images, labels, mean, std, device, Augmentation(4, True), channels_last=True)
    net = cifar_resnet(depth, 1.0, 10).to(device).train()
    mode = precision.enter("bf16", device)
    optimizer = SGD(net, 0.01, momentum=0.9, weight_decay=5e-4)
    return Stepper(net, optimizer, feed, mode, ALONE, batch, "auto", None, compiles)


def measured(depth: int, batch: int, pairs: int) -> dict[str, Any]:
    """One network: seconds of a step in each sample of either side."""
    import torch

    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda", torch.cuda.current_device())
    indices = torch.arange(batch, device=device)
    plain, compiled = (stepper(depth, batch, compiles) for compiles in (False, True))
    begun = time.monotonic()
    compiled(indices)
    torch.cuda.synchronize(device)
    first = time.monotonic() - begun
    for step in (plain, compiled):
        for _ in range(_WARM_UP):
            step(indices)
    turns = interleave(
        lambda: compiled(indices), lambda: plain(indices), device, TimingPlan(), pairs
    )
    return {
        "depth": depth, "batch": batch, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "first_step_s": first,
        "compiled": list(turns.first.seconds), "plain": list(turns.second.seconds),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Medians, and the least and the most ratio of two samples that stood side by side."""
    ratios = sorted(one / other for one, other in zip(row["plain"], row["compiled"], strict=True))
    plain, compiled = (row["batch"] / statistics.median(row[name]) for name in SIDES)
    return (
        f"ResNet-{row['depth']}, batch {row['batch']}, {row['device']}:"
        f" plain {plain:,.0f} images/s, compiled {compiled:,.0f},"
        f" {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" first step {row['first_step_s']:.0f} s"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, nargs="+", default=[18, 50])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for depth in options.depth:
        rows.append(measured(depth, options.batch, options.pairs))
        print(line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
