"""How many images a second a CIFAR-form ResNet trains on, with and without torch.compile, on a GPU.

    PYTHONPATH=src python benchmarks/layers/compiled_training.py [--depth 18 50] [--batch 128]
        [--blocks N] [--steps N] [--json FILE]

Both are the steps of the training loop (`narrowgauge_lab.stepping`) in bf16, channels_last, each
replayed as a CUDA graph; images are noise. Blocks of so many steps take turns, A B B A …, and each
block is timed by two events. The first step of what is compiled, minutes at most, is beside them.
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


def seconds(step: Any, batch: int, steps: int) -> float:
    """A block of `steps` steps, by the device's clock."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    indices = torch.arange(batch, device="cuda")
    begin.record()
    for _ in range(steps):
        step(indices)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def measured(depth: int, batch: int, blocks: int, steps: int) -> dict[str, Any]:
    """One network: images per second of each block of either side."""
    import torch

    both, first = {}, {}
    for name in ("plain", "compiled"):
        both[name] = stepper(depth, batch, name == "compiled")
        begun = time.monotonic()
        seconds(both[name], batch, 1)
        first[name] = time.monotonic() - begun
        seconds(both[name], batch, 10)  # captured by now
    rates: dict[str, list[float]] = {name: [] for name in both}
    for block in range(blocks):
        for name in ("plain", "compiled") if block % 2 else ("compiled", "plain"):
            rates[name].append(batch * steps / seconds(both[name], batch, steps))
    return {
        "depth": depth, "batch": batch, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "first_step_s": first, "images_per_second": rates,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Medians, and the least and the most ratio of two blocks that stood side by side."""
    plain, compiled = (row["images_per_second"][name] for name in ("plain", "compiled"))
    ratios = sorted(one / other for one, other in zip(compiled, plain, strict=True))
    return (
        f"ResNet-{row['depth']}, batch {row['batch']}, {row['device']}: plain"
        f" {statistics.median(plain):,.0f} images/s, compiled {statistics.median(compiled):,.0f},"
        f" {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f});"
        f" first step {row['first_step_s']['compiled']:.0f} s"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, nargs="+", default=[18, 50])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for depth in options.depth:
        rows.append(measured(depth, options.batch, options.blocks, options.steps))
        print(line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
