"""A notebook made from an experiment's declaration. Pure; nbformat 4.5 as plain data.

Its cells set the parameters, run the experiment as the container would, load the record, and show
table, closing lines and pictures. They need the lab's Python and the contract; pictures matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge import notebook_cells as cells
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.parameters import Parameter
from narrowgauge_contract.spec import PROFILES, ExperimentSpec

__all__ = ["IN_CONTAINER", "Locations", "is_untouched", "notebook_of", "notebook_text"]

#: Where in a notebook's metadata the digest of its cells stands.
_OURS = "narrowgauge"


@dataclass(frozen=True)
class Locations:
    """Where the notebook's own process finds things."""

    results: str
    experiments: str
    data: str


IN_CONTAINER = Locations("/results", "/experiments", "/data")


def notebook_of(
    spec: ExperimentSpec, readme: str, locations: Locations = IN_CONTAINER
) -> dict[str, Any]:
    """The notebook, for nbformat 4.5; the same for the same declaration."""
    made: list[dict[str, Any]] = [
        {"cell_type": kind, "id": f"{number:02d}-{_digest(text)}", "metadata": {}, "source": text}
        for number, (kind, text) in enumerate(_cells(spec, readme, locations))
    ]
    for cell in made:
        if cell["cell_type"] == "code":
            cell.update(execution_count=None, outputs=[])
    return {
        "cells": made,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            _OURS: {"cells": _digest_cells(made)},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def notebook_text(notebook: dict[str, Any]) -> str:
    """The content of an .ipynb file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def is_untouched(text: str) -> bool:
    """Whether the content of an .ipynb file is one of ours in which nobody edited or ran a cell.

    JupyterLab may have saved it: what that changes beside the cells' own content does not count.
    """
    try:
        notebook = json.loads(text)
        return bool(notebook["metadata"][_OURS]["cells"] == _digest_cells(notebook["cells"]))
    except (ValueError, KeyError, TypeError):
        return False  # no notebook, or none of ours


def _digest_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """Of what a person may put into cells: text, results, attachments. Jupyter saves text as a
    list of lines."""
    content = [
        [
            cell["cell_type"],
            "".join(cell["source"]),
            cell.get("execution_count"),
            cell.get("outputs") or [],
            cell.get("attachments") or {},
        ]
        for cell in cells
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _cells(spec: ExperimentSpec, readme: str, locations: Locations) -> Iterator[tuple[str, str]]:
    yield (
        "markdown",
        (
            f"# {spec.title}\n\n{spec.summary}\n\n"
            "Generated from the experiment's declaration by `narrowgauge notebook`. While it"
            " measures, let nothing else run on this machine."
        ),
    )
    yield "markdown", "## Parameters"
    yield "code", _settings(spec)
    yield "markdown", "## Run it\n\nIn processes of its own, one for each row; the record is kept."
    yield (
        "code",
        cells.RUN.format(
            experiment=spec.id,
            results=locations.results,
            experiments=locations.experiments,
            data=locations.data,
        ),
    )
    yield "markdown", "## What it measured"
    yield "code", cells.LOAD.format(experiment=spec.id)
    yield "code", cells.TABLE
    if spec.closing is not None:
        yield "code", cells.CLOSING
    for drawing in spec.drawings:
        yield "markdown", f"### {drawing.title}"
        yield "code", _picture(drawing)
    if readme:
        yield "markdown", _indented(readme)


def _settings(spec: ExperimentSpec) -> str:
    lines, table = [], []
    for name, parameter in spec.parameters.items():
        variable = _variable(name)
        lines.append(f"{variable} = None  # {_told(parameter, spec)}")
        table.append(f'    "{name}": {variable},')
    return cells.SETTINGS.format(
        profiles=", ".join(PROFILES), parameters="\n".join(lines), table="\n".join(table)
    )


def _told(parameter: Parameter, spec: ExperimentSpec) -> str:
    """What it takes and what each profile gives it, for the end of a line."""
    given = (
        f"{name} {', '.join(map(str, spec.profiles[name].values[parameter.name]))}"
        for name in PROFILES
        if parameter.name in spec.profiles[name].values
    )
    profiles = "; ".join(given)
    said = parameter.declaration().partition(": ")[2]
    return " ".join(f"{said} {f'({profiles})' if profiles else ''}".split())


def _variable(name: str) -> str:
    """The parameter's name as one of Python's, and not the table's that holds them all."""
    plain = re.sub(r"\W", "_", name)
    return f"{plain}_" if keyword.iskeyword(plain) or plain == "parameters" else plain


def _picture(drawing: Drawing) -> str:
    return cells.DRAW.format(name=drawing.name) + "\n" + cells.PICTURES[drawing.kind]


def _indented(readme: str) -> str:
    """The README one level down, its comments left out: they are for our own tools."""
    kept: list[str] = []
    fenced = False
    for line in readme.splitlines():
        fenced = fenced != line.startswith("```")
        if line.startswith("<!--") and not fenced:
            continue
        kept.append(f"#{line}" if line.startswith("#") and not fenced else line)
    return "\n".join(kept).strip()


def _digest(text: str) -> str:
    """Cells want ids; one made of the content does not change without it."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
