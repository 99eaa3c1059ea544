"""How well energy is measured: repeats, linearity, and what a plain power sampler gets wrong.

    PYTHONPATH=src python benchmarks/energy/bench.py [--json FILE] [--check]
    python benchmarks/energy/bench.py --show FILE

Needs an NVIDIA card whose driver counts energy, torch, and some 140 s of the card with nobody else
on it. `--show` needs none of these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

if TYPE_CHECKING:
    from collections.abc import Callable

    from narrowgauge_lab.measure.energy import Meter, Window

#: A square product of so many rows, half precision, on random numbers: zeros draw less.
SIZE = 8192
PRODUCTS_A_CALL = 10
WINDOWS = 7
SECONDS = 5.0
WARM_UP_S = 5.0
#: The duty cycle: so long busy, so long idle.
HALF_CYCLE_S = 0.015
REFERENCE_S = 12.0
#: The plain sampler: so often, over so long, so many times, with so long a rest before each.
NAIVE_INTERVAL_S = 0.1
NAIVE_S = 1.0
NAIVE_REPEATS = 5
REST_S = 1.0


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table: the median of `samples`. `target` is the most that any of them may be,
    or with `at_least` the least; None where it is only told."""

    name: str
    unit: str
    target: float | None
    samples: tuple[float, ...]
    at_least: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        if self.at_least:
            return min(self.samples) >= self.target
        return max(self.samples) <= self.target


def main() -> int:
    options = _options()
    if options.show:
        print(_table(*_load(options.show)))
        return 0
    device, figures, raw = _measure()
    if options.json:
        document = {
            "device": device,
            "figures": [{**dataclasses.asdict(f), "value": f.value, "met": f.met} for f in figures],
            "raw": raw,
        }
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for fault in raw["faults"]:
        print(f"the card was held back: {fault}", file=sys.stderr)
    print(_table(device, figures))
    # What a card measured that was held back is no figure of it, however good.
    bad = bool(raw["faults"]) or not all(figure.met for figure in figures)
    return 1 if options.check and bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--show", metavar="FILE", help="print the table of a file, measure nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 where a target is missed or the card was held back",
    )
    return parser.parse_args()


def _load(path: str) -> tuple[str, list[Figure]]:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    fields = [field.name for field in dataclasses.fields(Figure)]
    figures = [Figure(**{name: each[name] for name in fields}) for each in document["figures"]]
    return document["device"], figures


def _measure() -> tuple[str, list[Figure], dict[str, Any]]:
    """Everything, on the first card that torch sees. What is not as it should be ends it."""
    import torch

    from narrowgauge_lab.measure.energy import Meter, open_source
    from narrowgauge_lab.measure.state import faults_between, read_state

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    matrix = torch.randn(SIZE, SIZE, device=device, dtype=torch.float16)
    into = torch.empty_like(matrix)

    def product() -> None:
        torch.mm(matrix, matrix, out=into)

    before = read_state(device)
    with open_source("nvml", device) as source:
        if source.name != "nvml-counter":
            raise SystemExit(f"this card counts no energy: {source.name}")
        meter = Meter(source, device)
        steady, raw, watts = _steady(meter, product)
        figures = [*steady, _agreement(meter, product, watts, raw)]
        figures += _duty_cycle(meter, product, watts, raw)
        figures.append(_control(product, raw))
    after = read_state(device)
    raw["state"] = {"before": before.to_fact(), "after": after.to_fact()}
    raw["faults"] = list(faults_between(before, after, device))
    raw["period_s"] = source.period_s
    return torch.cuda.get_device_name(device), figures, raw


def _many(product: Callable[[], None]) -> Callable[[], None]:
    """Some products a call, so that calling costs nothing beside them."""

    def call() -> None:
        for _ in range(PRODUCTS_A_CALL):
            product()

    return call


def _steady(
    meter: Meter, product: Callable[[], None]
) -> tuple[list[Figure], dict[str, Any], float]:
    """Repeats, and N against 2N calls in the order N 2N 2N N; with the idle power in W."""
    from narrowgauge_lab.measure.energy import EnergyPlan

    call = _many(product)
    plan = EnergyPlan(seconds=SECONDS, windows=WINDOWS, warm_up_seconds=WARM_UP_S)
    idle, windows = meter.measure(call, plan)
    (rail,) = idle.joules
    watts = idle.joules[rail] / idle.seconds
    gross = [window.gross(rail, watts) for window in windows]
    net = [window.net(rail, watts) for window in windows]
    calls = windows[-1].calls
    pairs = [meter.run(call, count) for count in (calls, 2 * calls, 2 * calls, calls)]
    per_call = [window.gross(rail, watts) for window in pairs]
    off = (per_call[1] / per_call[0] - 1, per_call[2] / per_call[3] - 1)
    finest = [100 * w.energy.resolution_j / w.energy.joules[rail] for w in windows]
    raw = {
        "rail": rail,
        "idle_w": watts,
        "gross_j": gross,
        "net_j": net,
        "windows": [window.to_fact() for window in windows],
        "n_and_2n": [window.to_fact() for window in pairs],
    }
    figures = [
        Figure(f"repeat CV, {WINDOWS} windows, gross", "%", 2.0, (_variation(gross),)),
        Figure(f"repeat CV, {WINDOWS} windows, net", "%", 2.0, (_variation(net),)),
        Figure("N against 2N calls, off linear", "%", 1.0, tuple(100 * abs(o) for o in off)),
        Figure("resolution of a window", "%", None, tuple(finest)),
    ]
    return figures, raw, watts


def _agreement(
    meter: Meter, product: Callable[[], None], watts: float, raw: dict[str, Any]
) -> Figure:
    """One window by the counter and, at the same time, by power that is read and integrated."""
    call = _many(product)
    calls = raw["windows"][-1]["calls"]
    with _power(0.02) as power:
        power.begin()
        window = meter.run(call, calls)
        sampled = power.end()
    (integrated,) = sampled.joules.values()
    # The sampler ran a little longer, at idle power, while the counter's steps were waited for.
    beyond = (sampled.seconds - window.seconds) * watts
    counted = window.gross(raw["rail"], watts) * calls
    raw["agreement_j"] = {"counter": counted, "power": integrated - beyond}
    off = 100 * abs((integrated - beyond) / counted - 1)
    return Figure("power read at 50 Hz against the counter", "%", None, (off,))


def _duty_cycle(
    meter: Meter, product: Callable[[], None], watts: float, raw: dict[str, Any]
) -> list[Figure]:
    """A load that is on for 15 ms and off for 15: a long window, ours, and a plain sampler's."""
    burst = _burst(meter, product)
    cycle = 2 * HALF_CYCLE_S
    rail = raw["rail"]
    meter.warm_up(burst, WARM_UP_S / 2)
    reference = _per_burst(meter.run(burst, round(REFERENCE_S / cycle)), rail, watts)
    count = round(1.05 * SECONDS / cycle)
    ours = [_per_burst(meter.run(burst, count), rail, watts) for _ in range(2)]
    naive = _naive(burst, round(NAIVE_S / cycle))
    raw["duty_cycle_j"] = {"reference": reference, "ours": ours, "naive": naive}
    return [
        Figure(
            f"{cycle * 1e3:.0f} ms duty cycle, ours against a {REFERENCE_S:.0f} s window",
            "%", 3.0, tuple(100 * abs(each / reference - 1) for each in ours),
        ),
        Figure(
            f"  the same, power read at 10 Hz for {NAIVE_S:.0f} s",
            "%", 20.0, tuple(100 * abs(each / reference - 1) for each in naive), at_least=True,
        ),
    ]  # fmt: skip


def _control(product: Callable[[], None], raw: dict[str, Any]) -> Figure:
    """The plain sampler on a load without a cycle, against the windows of that load: what is wrong
    here is not due to any cycle."""
    reference = statistics.median(raw["gross_j"])
    last = raw["windows"][-1]
    count = max(1, round(NAIVE_S * last["calls"] / last["seconds"]))
    naive = _naive(_many(product), count)
    raw["control_j"] = {"reference": reference, "naive": naive}
    return Figure(
        f"  control: 10 Hz for {NAIVE_S:.0f} s on a constant load",
        "%", None, tuple(100 * abs(each / reference - 1) for each in naive),
    )  # fmt: skip


def _naive(call: Callable[[], None], count: int) -> list[float]:
    """J per call, gross, as a plain sampler has it, some times after a rest."""
    found = []
    for _ in range(NAIVE_REPEATS):
        time.sleep(REST_S)
        with _power(NAIVE_INTERVAL_S) as power:
            power.begin()
            for _ in range(count):
                call()
            _wait_for_card()
            (joules,) = power.end().joules.values()
        found.append(joules / count)
    return found


def _wait_for_card() -> None:
    import torch

    torch.cuda.synchronize()


def _burst(meter: Meter, product: Callable[[], None]) -> Callable[[], None]:
    """Products for half a cycle, and then nothing until the cycle is over."""
    took = meter.warm_up(product, REST_S)
    count = max(1, round(HALF_CYCLE_S / took))

    def burst() -> None:
        until = time.monotonic() + 2 * HALF_CYCLE_S
        for _ in range(count):
            product()
        _wait_for_card()
        time.sleep(max(0.0, until - time.monotonic()))

    return burst


def _per_burst(window: Window, rail: str, watts: float) -> float:
    return window.gross(rail, watts)


def _power(interval_s: float) -> Any:
    """The card's power, read so often."""
    import torch

    from narrowgauge_lab.measure.energy.nvml_source import open_nvml
    from narrowgauge_lab.measure.energy.source import REAL_CLOCK

    return open_nvml(torch.device("cuda", 0), REAL_CLOCK, power_every_s=interval_s)


def _variation(values: list[float]) -> float:
    """The coefficient of variation, in percent."""
    return 100 * statistics.stdev(values) / statistics.mean(values)


def _table(device: str, figures: list[Figure]) -> str:
    lines = [f"{device:52} {'median':>9} {'min':>8} {'max':>8} {'n':>3}  target"]
    for each in figures:
        target = ""
        if each.target is not None:
            sign = ">=" if each.at_least else "<="
            verdict = "met" if each.met else "MISSED"
            target = f"{sign} {each.target:g} {each.unit}  {verdict}"
        lines.append(
            f"{each.name:52} {each.value:7.3f} {each.unit:1} {min(each.samples):8.3f}"
            f" {max(each.samples):8.3f} {len(each.samples):3}  {target}".rstrip()
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
