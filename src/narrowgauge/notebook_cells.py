"""The code of a notebook's cells, as text: for Python 3.8 and later, the contract and matplotlib.

`{}` are filled in by `notebook`; a name that one cell defines the later ones may use.
"""

from __future__ import annotations

__all__ = ["CLOSING", "DRAW", "LOAD", "PICTURES", "RUN", "SETTINGS", "TABLE"]

SETTINGS = """\
PROFILE = "smoke"  # how much to do: {profiles}
SEED = 0  # of the first repeat; the next repeat takes the next seed
DEVICE = "auto"  # auto, cpu or cuda

# None: what the profile says. A list makes rows, for parameters along the axis `row`.
{parameters}

parameters = {{
{table}
}}"""

RUN = """\
import subprocess
import sys
from pathlib import Path

RESULTS = Path({results!r})
words = ["run", {experiment!r}, "--profile", PROFILE, "--seed", str(SEED), "--device", DEVICE]
for name, value in parameters.items():
    values = value if isinstance(value, list) else [value]
    if value is not None:
        texts = [str(v).lower() if isinstance(v, bool) else str(v) for v in values]
        words += ["-p", name + "=" + ",".join(texts)]
words += ["--results", str(RESULTS), "--experiments", {experiments!r}, "--data", {data!r}]
command = [sys.executable, "-m", "narrowgauge_lab", *words]
print("python3 -m narrowgauge_lab", " ".join(words))
RUN = None
with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
) as lab:
    for line in lab.stdout:
        print(line, end="")
        # Its last word is the run's folder; anything else that begins so has no record in it.
        place = Path(line[3:].rstrip("\\n"))
        if line.startswith("in ") and (place / "record.json").is_file():
            RUN = place
if RUN is None:
    raise RuntimeError(f"the lab ended with exit code {{lab.returncode}}; it says why above")
if lab.returncode != 0:
    print(f"exit code {{lab.returncode}}: not every row went well; what there is follows")"""

LOAD = """\
from narrowgauge_contract.record import load_record
from narrowgauge_contract.spec import parse_spec

# RUN is what ran above. Any other run may be named here: RUN = RESULTS / {experiment!r} / "…"
record = load_record(RUN / "record.json")
spec = parse_spec(record.spec)
print(f"{{record.run_id}}: {{record.status.value}}, on {{record.target}}, seed {{record.seed}}")
for row in record.rows:
    for reason in row.validity.reasons:
        said = reason if row.status.value == "skipped" else f"INVALID: {{reason}}"
        print(f"row {{row.index}} {{said}}")
for profiler in sorted({{str(r.facts["profiled"]) for r in record.rows if "profiled" in r.facts}}):
    print(f"profiled ({{profiler}}): timings include the profiler")"""

TABLE = """\
from narrowgauge_contract.figures import figure, median


def configurations(rows):
    "Rows that differ in repeat and seed only, by what they are called."
    names = [n for n in rows[0].parameters if len({str(r.parameters.get(n)) for r in rows}) > 1]
    found = {}
    for row in rows:
        label = ", ".join(f"{n}={row.parameters.get(n)}" for n in names) or record.experiment
        found.setdefault(label, []).append(row)
    return found


def figures(rows, name):
    "One figure per valid row that has the metric."
    metrics = [row.metric(name) for row in rows if row.validity.valid]
    return [figure(m).value for m in metrics if m is not None and m.values]


def unit_of(name):
    return next((m.unit for row in record.rows for m in row.metrics if m.name == name), "")


recorded = dict.fromkeys(m.name for row in record.rows for m in row.metrics)
headline = list(spec.headline) or list(recorded)[:3]
for label, rows in configurations(record.rows).items():
    print(label)
    for name in headline:
        found = figures(rows, name)
        if not found:
            print(f"    {name}: no valid row")
            continue
        spread = f"{min(found):.6g} to {max(found):.6g}"
        print(f"    {name}: {median(found):.6g} {unit_of(name)} ({spread}; n={len(found)})")"""

CLOSING = """\
from narrowgauge_contract.summary import summary_lines

for line in summary_lines(spec.closing, record.rows):
    print(line)"""

#: What every picture begins with.
DRAW = """\
import matplotlib.pyplot as plt

drawing = next(each for each in spec.drawings if each.name == {name!r})
shown = {{label: [row for row in rows if row.validity.valid]
         for label, rows in configurations(record.rows).items()}}"""

_CURVE = """
metrics = [name for name in drawing.metrics if unit_of(name)]
wide = max(len(metrics), 1)
picture, panels = plt.subplots(1, wide, squeeze=False, figsize=(5 * wide, 4))
for panel, name in zip(panels[0], metrics):
    for number, (label, rows) in enumerate(shown.items()):
        for repeat, row in enumerate(rows):
            values = row.metric(name).values if row.metric(name) else ()
            panel.plot(range(1, len(values) + 1), values, marker="o", color=f"C{number % 10}",
                       label=label if repeat == 0 else None)
            places = drawing.ticks.names_of(row) if drawing.ticks else None
            if places and len(places) == len(values):
                panel.set_xticks(range(1, len(values) + 1))
                panel.set_xticklabels(places, rotation=90)
    panel.set_title(name)
    panel.set_xlabel(drawing.x or "sample")
    panel.set_ylabel(drawing.y or unit_of(name))
panels[0][0].legend()
picture.suptitle(drawing.title)
plt.show()"""

_BAR = """
metrics = [name for name in drawing.metrics if unit_of(name)]
wide = max(len(metrics), 1)
picture, panels = plt.subplots(1, wide, squeeze=False, figsize=(6 * wide, 4))
for panel, name in zip(panels[0], metrics):
    for place, (label, rows) in enumerate(shown.items()):
        found = figures(rows, name)
        panel.barh(place, median(found) if found else 0.0)
        panel.plot(found, [place] * len(found), "ko", markersize=3)
    panel.set_yticks(range(len(shown)))
    panel.set_yticklabels(list(shown))
    panel.invert_yaxis()
    panel.set_xlabel(drawing.y or f"{name} ({unit_of(name)})")
picture.suptitle(drawing.title)
plt.show()"""

_CONFUSION = """
import json

for label, rows in shown.items():
    files = [RUN / side.path for row in rows for side in row.side_files
             if side.path.endswith("/" + drawing.side_file)]
    matrices = [json.loads(path.read_text()) for path in files]
    if matrices:
        size = range(len(matrices[0]["labels"]))
        counts = [[sum(m["counts"][i][j] for m in matrices) for j in size] for i in size]
        shares = [[count / max(sum(line), 1) for count in line] for line in counts]
        picture, panel = plt.subplots(figsize=(6, 5))
        picture.colorbar(panel.imshow(shares, cmap="Blues", vmin=0, vmax=1))
        panel.set_title(f"{drawing.title}: {label}")
        panel.set_xlabel("predicted")
        panel.set_ylabel("true")
        plt.show()"""

_HEAT = """
import json

for label, rows in shown.items():
    files = [RUN / side.path for row in rows for side in row.side_files
             if side.path.endswith("/" + drawing.side_file)]
    if files:
        heat = json.loads(files[0].read_text())
        picture, panel = plt.subplots(figsize=(6, 5))
        picture.colorbar(panel.imshow(heat["values"], cmap="Blues"), label=heat["label"])
        panel.set_title(f"{drawing.title}: {label}")
        panel.set_xticks(range(len(heat["columns"])), heat["columns"], rotation=90)
        panel.set_yticks(range(len(heat["rows"])), heat["rows"])
        panel.set_xlabel(drawing.x)
        panel.set_ylabel(drawing.y)
        plt.show()"""

_MAPS = """
import json

for label, rows in shown.items():
    files = [RUN / side.path for row in rows for side in row.side_files
             if side.path.endswith("/" + drawing.side_file)]
    if files:
        kept = json.loads(files[0].read_text())
        wide, tall = 1 + len(kept["columns"]), len(kept["rows"])
        picture, panels = plt.subplots(tall, wide, squeeze=False, figsize=(1.6 * wide, 1.7 * tall))
        for line, name, image, maps in zip(panels, kept["rows"], kept["images"], kept["maps"]):
            side = (-0.5, len(image[0]) - 0.5, len(image) - 0.5, -0.5)
            for panel, values in zip(line, [None, *maps]):
                panel.imshow(image, extent=side)
                if values is not None:
                    panel.imshow(values, cmap="inferno", alpha=0.6, vmin=0, vmax=1, extent=side,
                                 interpolation="bilinear")
                panel.axis("off")
            line[0].set_title(name, fontsize=8)
        for panel, name in zip(panels[0][1:], kept["columns"]):
            panel.set_title(name, fontsize=8)
        picture.suptitle(f"{drawing.title}: {label}")
        plt.show()"""

_LADDER = """
ladder = drawing.ladder
rungs = [(value, [row for row in record.rows if row.parameters.get(ladder.parameter) == value])
         for value in ladder.order]
measured = [(ladder.names.get(value, str(value)), figures(rows, ladder.metric))
            for value, rows in rungs]
measured = [(label, found) for label, found in measured if found]
picture, panel = plt.subplots(figsize=(8, 1 + 0.5 * len(measured)))
for place, (label, found) in enumerate(measured):
    panel.barh(place, median(found))
    panel.plot(found, [place] * len(found), "ko", markersize=3)
panel.set_yticks(range(len(measured)))
panel.set_yticklabels([label for label, _ in measured])
panel.invert_yaxis()
panel.set_xlabel(f"{ladder.metric} ({unit_of(ladder.metric)})")
picture.suptitle(drawing.title)
plt.show()"""

_STACKED = """
metrics = [name for name in drawing.metrics if unit_of(name)]
picture, panel = plt.subplots(figsize=(9, 1.5 + 0.4 * len(shown)))
for place, rows in enumerate(shown.values()):
    reached = 0.0
    for number, name in enumerate(metrics):
        found = figures(rows, name)
        part = median(found) if found else 0.0
        panel.barh(place, part, left=reached, color=f"C{number % 10}",
                   label=drawing.stack.name_of(name) if place == 0 else None)
        reached += part
panel.set_yticks(range(len(shown)))
panel.set_yticklabels(list(shown))
panel.invert_yaxis()
panel.set_xlabel(f"{drawing.x} ({unit_of(metrics[0])})" if metrics else drawing.x)
panel.legend()
picture.suptitle(drawing.title)
plt.show()"""

_ANYTIME = """
import re

numbers = sorted(int(name[4:-9]) for name in recorded if re.fullmatch(r"exit[0-9]+_accuracy", name))
picture, panel = plt.subplots(figsize=(7, 4.5))
for label, rows in shown.items():
    found = [(figures(rows, f"exit{n}_macs"), figures(rows, f"exit{n}_accuracy")) for n in numbers]
    points = [(median(macs) / 1e6, median(right)) for macs, right in found if macs and right]
    if points:
        panel.step(*zip(*points), where="post", marker="o", label=label)
panel.set_xscale("log")
panel.set_xlabel("million multiply-accumulates per image")
panel.set_ylabel("test accuracy (%)")
if panel.lines:
    panel.legend()
picture.suptitle(drawing.title)
plt.show()"""

PICTURES = {
    "anytime": _ANYTIME,
    "curve": _CURVE,
    "bar": _BAR,
    "confusion": _CONFUSION,
    "heat": _HEAT,
    "ladder": _LADDER,
    "maps": _MAPS,
    "stacked": _STACKED,
}
