"""What the timing harness costs and how true it is, on this machine's GPU, as a table and as JSON.

    PYTHONPATH=src python3 benchmarks/harness/bench.py [--json FILE] [--wheels DIR] [--check]

Needs a GPU, the kernels built for it, and NVIDIA's nvbench for Python (`pip install cuda-bench`) or
its wheels, with cuda-bindings of the same CUDA, in DIR. Takes some two minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- begin: bench.py --readme -->", "<!-- end -->"
NOT_MEASURED = "No reference has been measured yet."


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table. `samples` are in `unit`; the figure is their median.

    `target` is the most it may be, or the least where `at_least`; None where there is none. `note`
    says what the samples are.
    """

    name: str
    unit: str
    target: float | None
    samples: tuple[float, ...]
    note: str = ""
    at_least: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def main() -> int:
    options = _options()
    if options.show:
        print(table(load(options.show)))
        return 0
    if options.readme:
        page = HERE / "README.md"
        page.write_text(readme(page.read_text("utf-8"), HERE / "reference"), encoding="utf-8")
        return 0
    # torch, the lab and nvbench are imported by these only, so that a table needs none of them.
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
    import measures

    if options.process:
        print(json.dumps(measures.medians(json.loads(options.process))))
        return 0
    figures, kernels = measures.everything(Figure, options.wheels)
    if options.json:
        write(options.json, figures, kernels, measures.machine())
    print(kernel_table(kernels), table(figures), sep="\n\n")
    missed = [figure for figure in figures if figure.met is False]
    return 1 if options.check and missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write every sample there")
    parser.add_argument("--wheels", metavar="DIR", help="where the wheels of cuda-bench are")
    parser.add_argument("--show", metavar="FILE", help="print the table of a file, measure nothing")
    parser.add_argument("--readme", action="store_true", help="put the reference into the README")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--process", metavar="JSON", help=argparse.SUPPRESS)
    return parser.parse_args()


def write(
    path: str, figures: list[Figure], kernels: list[dict[str, Any]], machine: dict[str, Any]
) -> None:
    """Everything that was measured, as JSON."""
    lines = [{**dataclasses.asdict(f), "value": f.value, "met": f.met} for f in figures]
    document = {"machine": machine, "figures": lines, "kernels": kernels}
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> list[Figure]:
    """The figures of a file that `write` wrote."""
    names = [field.name for field in dataclasses.fields(Figure)]
    found = json.loads(Path(path).read_text(encoding="utf-8"))["figures"]
    kept = ({name: line[name] for name in names} for line in found)
    return [Figure(**{**line, "samples": tuple(line["samples"])}) for line in kept]


def table(figures: list[Figure]) -> str:
    """The figures as Markdown."""
    lines = ["| figure | measured | n | target | met |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "no", None: ""}
    for each in figures:
        sign = ">=" if each.at_least else "<="
        target = "" if each.target is None else f"{sign} {each.target:g} {each.unit}"
        name = f"{each.name} ({each.note})" if each.note else each.name
        name = name.replace("|", "\\|")
        measured = f"{each.value:.3g} {each.unit}".rstrip()
        lines.append(
            f"| {name} | {measured} | {len(each.samples)} | {target} | {words[each.met]} |"
        )
    return "\n".join(lines)


def kernel_table(kernels: list[dict[str, Any]]) -> str:
    """Ours and nvbench's, kernel by kernel, in microseconds and seconds of the wall."""
    lines = [
        f"{'kernel':24} {'cold':>9} {'nvbench':>9} {'diff %':>7} {'batch':>9} {'nvbench':>9}"
        f" {'diff %':>7} {'wall s':>7} {'nvbench':>7}"
    ]
    for each in kernels:
        cells = []
        for mode in ("cold", "batch"):
            ours, theirs = each[mode]["ours"], each[mode]["nvbench"]
            cells.append(f"{ours * 1e6:9.2f} {theirs * 1e6:9.2f} {(ours / theirs - 1) * 100:7.2f}")
        walls = f"{each['wall']['ours']:7.2f} {each['wall']['nvbench']:7.2f}"
        lines.append(f"{each['name']:24} {cells[0]} {cells[1]} {walls}")
    return "\n".join(lines)


def readme(page: str, reference: Path) -> str:
    """The page with the tables of all references between its marks."""
    found = sorted(reference.glob("*.json"))
    parts = [_section(path) for path in found] or [NOT_MEASURED]
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}"


def _section(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    kernels = kernel_table(document["kernels"])
    return f"`{path.name}`: {where}.\n\n{table(load(path))}\n\n```\n{kernels}\n```"


if __name__ == "__main__":
    sys.exit(main())
