"""A made-up machine for the planner's tests: every figure follows from a few rates."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

from result_cases import host

from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import resolve
from narrowgauge_contract.outcome import InsideFacts, Outcome, Row, SideFile, Status, Validity
from narrowgauge_contract.placement import PASSES
from narrowgauge_contract.placement_costs import (
    COSTS_FILE,
    FORMAT,
    ConversionCost,
    CopyCost,
    Costs,
    FixedCost,
    NativeCost,
    PlacedCost,
    PlacedLayer,
    ProductCost,
    SegmentCost,
    Shape,
    StepCost,
)
from narrowgauge_contract.record import compose
from narrowgauge_contract.spec import load_spec

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "hetero-plan" / "experiment.toml"


def shape(channels_in: int, channels_out: int, side: int, batch: int = 32) -> Shape:
    return Shape(
        kind="conv2d",
        input=(batch, channels_in, side, side),
        weight=(channels_out, channels_in, 3, 3),
        output=(batch, channels_out, side, side),
        stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, bias=False,
    )  # fmt: skip


SHAPES = (shape(3, 16, 32), shape(16, 16, 32), shape(16, 64, 8))
LAYERS = (
    PlacedLayer("conv1", 0, False),
    PlacedLayer("blocks.0.conv", 1, True),
    PlacedLayer("blocks.1.conv", 1, True),
    PlacedLayer("last", 2, True),
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of the made-up machine: MAC/s, bytes/s, and seconds of a launch and of a copy's start."""

    cpu: float = 2e10
    accelerator: float = 2e12
    bus: float = 2e10
    launch: float = 5e-6
    call: float = 30e-6
    elsewhere: float = 2e-4


def _macs(each: Shape) -> int:
    return prod(each.output) * prod(each.weight[1:])


def costs(rates: Rates = Rates(), precisions: tuple[str, ...] = ("fp32",), **changes: Any) -> Costs:
    """The costs of four layers; a passes over the bus takes its stages one by one and a call."""
    products, native, placed = [], [], []
    speed = {"fp32": 1.0, "tf32": 2.0, "bf16": 4.0, "int8": 8.0}
    wires = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "int8": "int8"}
    width = {"fp32": 4, "bf16": 2, "int8": 1}
    for number, each in enumerate(SHAPES):
        for precision in precisions:
            near = _macs(each) / rates.cpu
            far = _macs(each) / rates.accelerator / speed[precision]
            for pass_ in PASSES:
                if precision == "fp32":
                    products.append(
                        ProductCost(number, pass_, "cpu", precision, "fp32", (near,), (near,))
                    )
                for form in dict.fromkeys(("fp32", wires[precision])):
                    products.append(
                        ProductCost(
                            number, pass_, "accelerator", precision, form, (far,), (rates.launch,)
                        )
                    )
                    if pass_ != "weight_grad":
                        moved = width[form] * (prod(each.input) + prod(each.output)) / rates.bus
                        whole = moved + far + rates.call
                        placed.append(PlacedCost(number, pass_, precision, form, (whole,)))
            if precision not in ("fp32", "tf32"):
                continue
            homes = [("cpu", near, near), ("accelerator", far, rates.launch)]
            for device, seconds, queued in homes if precision == "fp32" else homes[1:]:
                for direction, wanted, times in (
                    ("forward", True, 1), ("backward", True, 2), ("backward", False, 1),
                ):  # fmt: skip
                    native.append(
                        NativeCost(
                            number, device, precision, direction, wanted,
                            (times * seconds,), (times * queued,),
                        )
                    )  # fmt: skip
    found = Costs(
        format=FORMAT, network="made-up", batch=32, accelerator="made-up", stand_in=False,
        shared_memory=False, launches_hidden=True, page_locked="all CPU tensors",
        piece_bytes=1 << 20, most_pieces=8, parameters=1000, accelerator_bytes=50_000_000,
        layers=LAYERS, shapes=SHAPES, products=tuple(products), native=tuple(native),
        placed=tuple(placed), copies=_copies(rates), conversions=_conversions(),
        segments=_segments(rates), fixed=_fixed(rates), steps=(),
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def _copies(rates: Rates) -> tuple[CopyCost, ...]:
    return tuple(
        CopyCost(policy, direction, size, (5e-6 + size / rates.bus,), (2e-6,))
        for policy in ("pageable", "pinned")
        for direction in ("up", "down")
        for size in (1 << 12, 1 << 18, 1 << 24)
    )


def _conversions() -> tuple[ConversionCost, ...]:
    return tuple(
        ConversionCost(side, direction, wire, size, (1e-6 + size * 1e-10,))
        for side in ("cpu", "accelerator")
        for direction in ("pack", "unpack")
        for wire in ("fp32", "bf16", "int8")
        for size in (1 << 14, 1 << 20)
    )


def _segments(rates: Rates) -> tuple[SegmentCost, ...]:
    parts = (("forward", 0.4), ("backward", 0.4), ("optimiser", 0.2))
    speeds = {"cpu": 1.0, "accelerator": 0.25}
    return tuple(
        SegmentCost(device, direction, "conv1", (share * rates.elsewhere * speed,),
                    (share * rates.elsewhere * speed,))
        for device, speed in speeds.items()
        for direction, share in parts
    )  # fmt: skip


def _fixed(rates: Rates) -> tuple[FixedCost, ...]:
    call, launch = rates.call, rates.launch
    both = {"engine": 0.0, "local.forward": call + launch, "local.backward": call + 2 * launch,
            "tiny.forward": launch, "tiny.backward": 2 * launch}  # fmt: skip
    late = {"late.1": 60e-6, "kept.1": 40e-6, "late.5": 240e-6, "kept.5": 200e-6}
    return (
        *(FixedCost(name, device, (s,)) for device in ("cpu", "accelerator")
          for name, s in both.items()),
        *(FixedCost(name, "accelerator", (s,)) for name, s in late.items()),
    )  # fmt: skip


def with_steps(found: Costs, **seconds: float) -> Costs:
    """With whole steps of built-in plans; names with _ for -."""
    steps = tuple(StepCost(name.replace("_", "-"), (s,)) for name, s in seconds.items())
    return dataclasses.replace(found, steps=steps)


def recorded(
    root: Path, *found: Costs, valid: bool = True, spoilt: bool = False, profile: str = "smoke"
) -> RunFolder:
    """A run of hetero-plan below `root` with a row for each of these costs, or with none; of the
    profile `paper` six of one network."""
    spec = load_spec(EXPERIMENT)
    each = 1 if profile == "paper" else len(found) or 1
    networks = tuple(("small", "resnet20")[at] for at in range(each))
    run_id = "20261121T100000Z-hetero-plan-aaaaaa"
    job = resolve(spec, {"network": networks}, profile=profile, target="cpu", seed=0, run_id=run_id)
    folder = Store(root).new_run(job)
    rows = []
    for plan in job.rows:
        side: tuple[SideFile, ...] = ()
        if found:
            path = folder.out / f"row-{plan.index}" / COSTS_FILE
            path.parent.mkdir(parents=True)
            text = dumps(found[plan.index], indent=None)
            path.write_text(text)
            name = f"row-{plan.index}/{COSTS_FILE}"
            side = (SideFile(name, sha256_file(path), path.stat().st_size),)
            if spoilt:
                path.write_text(json.dumps({"format": FORMAT}))
        reasons = () if valid else ("the device was held back",)
        rows.append(
            Row(plan.index, plan.repeat, plan.seed, plan.parameters, Status.COMPLETE,
                Validity(valid, reasons), side_files=side, seconds=1.0)
        )  # fmt: skip
    inside = InsideFacts("3.11.2", "Linux", torch="2.13.0", cpu="EPYC", threads=2)
    outcome = Outcome(1, job.run_id, Status.COMPLETE, 0, tuple(rows), inside, "b" * 64, "c" * 64,
                      1e9, 1e9 + 1, 1.0)  # fmt: skip
    folder.write_record(compose(job, outcome, (), host()))
    return folder
