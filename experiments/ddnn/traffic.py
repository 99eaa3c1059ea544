"""What crosses from the devices to the cloud, and how long it would take to."""

from __future__ import annotations

from typing import Tuple

import numpy as np

from narrowgauge_lab.anytime.operating import of_test_split
from narrowgauge_lab.anytime.policies import Entropy
from narrowgauge_lab.anytime.systems.ddnn import DDNN, uplink_bytes
from narrowgauge_lab.anytime.thresholds import OperatingPoint, score
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.side_file import RunLogits

__all__ = ["THRESHOLDS", "record_thresholds", "record_traffic"]

#: Of the normalised entropy, those of the published curve.
THRESHOLDS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def record_traffic(
    ctx: RowContext,
    net: DDNN,
    shape: Tuple[int, int, int],
    run: RunLogits,
    point: OperatingPoint,
) -> None:
    """Of the row's policy: `device_bytes` [B], what one device sends for a sample that it sees, in
    the mean (absent views count as sent in full, as in the paper's formula);
    `raw_bytes`, its view as it is; `bytes_gain`, the second over the first; MACs of one device, of
    the cloud; and `simulated_latency` [s], made of the measured times of the parts: the devices'
    time (they run in turn here, beside each other there, so one share of it), what is sent over the
    bandwidth, and for samples that go up the cloud's time."""
    local = point.shares[0]
    sent = uplink_bytes(net.classes, net.cut, local)
    raw = float(shape[0] * shape[1] * shape[2])
    ctx.metric("device_bytes", sent, unit="B", source="computed")
    ctx.metric("raw_bytes", raw, unit="B", source="computed")
    ctx.metric("bytes_gain", raw / sent, unit="1", source="computed")
    ctx.metric("map_bytes", net.cut.map_bytes, unit="B", source="computed")
    devices, whole = (int(each) for each in run.cumulative_macs)
    ctx.metric("device_macs", devices / net.views, unit="MAC", source="computed")
    ctx.metric("cloud_macs", whole - devices, unit="MAC", source="computed")
    if run.latency is None:
        return
    first, both = (float(np.median(each)) for each in run.latency)
    bandwidth = ctx.parameters["bandwidth"]
    carried = 8.0 * sent / (1000.0 * bandwidth)
    cloud = (1.0 - local) * max(both - first, 0.0)
    seconds = first / net.views + carried + cloud
    ctx.metric(
        "simulated_latency", seconds, unit="s", source="simulated",
        conditions={"bandwidth_kbit_s": bandwidth, "local_share": local},
    )  # fmt: skip


def record_thresholds(ctx: RowContext, net: DDNN, run: RunLogits) -> None:
    """The published curve on the test split: at each of THRESHOLDS the accuracy, the share of
    samples that stay local, and the bytes of a device. No threshold is chosen by it."""
    test, costs = of_test_split(run)
    points = [score(Entropy([each], normalised=True), test, costs) for each in THRESHOLDS]
    shares = [point.shares[0] for point in points]
    for name, values, unit in (
        ("threshold_accuracy", [point.accuracy for point in points], "%"),
        ("threshold_local_share", [100.0 * share for share in shares], "%"),
        ("threshold_bytes", [uplink_bytes(net.classes, net.cut, share) for share in shares], "B"),
    ):
        ctx.metric(name, values, unit=unit, source="computed", index="threshold")
    ctx.fact("thresholds", list(THRESHOLDS))
