"""Reference records: true records, cut to a size that a repository can hold, and tables from them.

A metric with more than 200 samples keeps 200, evenly spaced over the run, first and last included;
its conditions say so and how many there were. Everything else stays as it was recorded.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.ladder import climbs_of, ladder_markdown
from narrowgauge.matrix import matrix_markdown
from narrowgauge.noise import Floors
from narrowgauge.series import series_markdown
from narrowgauge.tables import markdown_table, measured_on
from narrowgauge.view import metric_names
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.outcome import Metric
from narrowgauge_contract.record import Record, load_record
from narrowgauge_contract.spec import parse_spec

__all__ = ["MOST_BYTES", "MOST_SAMPLES", "export", "reduce_record", "render_tables", "update_page"]

MOST_SAMPLES = 200
MOST_BYTES = 1_000_000
_MARKER = re.compile(
    r"(<!-- (table|ladder|matrix|series): ([^>]+?) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL
)


def reduce_record(record: Record) -> Record:
    """The record with at most MOST_SAMPLES samples in each metric of each row."""
    rows = tuple(
        dataclasses.replace(row, metrics=tuple(_reduce(metric) for metric in row.metrics))
        for row in record.rows
    )
    return dataclasses.replace(record, rows=rows)


def _reduce(metric: Metric) -> Metric:
    count = len(metric.values)
    if count <= MOST_SAMPLES:
        return metric
    kept = [round(i * (count - 1) / (MOST_SAMPLES - 1)) for i in range(MOST_SAMPLES)]
    rule = f"{MOST_SAMPLES} of {count}, evenly spaced, first and last included"
    return dataclasses.replace(
        metric,
        values=tuple(metric.values[i] for i in kept),
        conditions={**metric.conditions, "samples": rule},
    )


def export(record: Record, experiments: Path) -> Path:
    """Write the reduced record below `experiments`, the same bytes for the same record. Where in a
    trace or a value the checkout's own path stands, what is left is the path within it.

    Raises UsageError where it may not be a reference (unfinished, made-up data, stand-in image,
    energy from a recording, no device known) or would be too large.
    """
    reason = _unfit(record)
    if reason:
        raise UsageError(f"{record.run_id} cannot be a reference record", why=reason)
    text = dumps(reduce_record(record), indent=None)
    place = json.dumps(f"{experiments.resolve().parent}{os.sep}")[1:-1]
    content = gzip.compress(text.replace(place, "").encode(), mtime=0)
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{record.run_id} is too large for a reference record",
            why=f"{len(content)} bytes after reduction, {MOST_BYTES} may be",
            next_step="run it with fewer rows",
        )
    folder = experiments / record.experiment / "reference" / _device(record)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.run_id}.json.gz"
    path.write_bytes(content)
    return path


def _unfit(record: Record) -> str:
    if not record.valid_rows():
        return "it has no valid row"
    if record.synthetic:
        return "its data was made up"
    if any("profiled" in row.facts for row in record.rows):
        return "its timings include a profiler"
    if any(row.facts.get("energy_source") == "replay" for row in record.rows):
        return "its energy was played from a recording"
    if record.host is not None and record.host.image is not None and record.host.image.stand_in:
        return "it ran in an image on a stand-in base"
    return "" if _device(record) else "it does not say which device it ran on"


def _device(record: Record) -> str:
    """The device as a folder's name: `nvidia-h200`, `amd-epyc-9r14`."""
    inside = record.inside
    name = (inside.accelerator or inside.cpu or "") if inside is not None else ""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def render_tables(page: str, folder: Path) -> str:
    """Fill every `<!-- table: DEVICE/RUN metric,… -->` of an experiment's page from its references,
    every `<!-- ladder: DEVICE/RUN NAME -->` with the drawing of that name, as a table, every
    `<!-- series: DEVICE/RUN metric,… -->` with a line for each block or step (`series`), and every
    `<!-- matrix: … -->` with what `matrix` makes of several records. A table may be of several
    records whose rows join, such as shards of one run: `DEVICE/RUN+RUN metric,…`.

    Beside ratios stands the noise floor that is among the references of the same experiments.
    Raises UsageError for a marker whose record, drawing or metric is not there, and for records
    that do not join.
    """
    floors = Floors.in_references(folder.parent)

    def fill(match: re.Match[str]) -> str:
        begin, kind, said, _, end = match.groups()
        if kind == "matrix":
            return f"{begin}{matrix_markdown(folder, said.strip())}\n{end}"
        where, _, words = said.strip().partition(" ")
        device, _, names = where.partition("/")
        records = []
        for name in names.split("+"):
            path = folder / "reference" / device / f"{name}.json.gz"
            if not path.is_file():
                raise UsageError(f"the {kind} '{said.strip()}' has no record {path}")
            records.append(load_record(path))
        each = kind == "series" and "repeats=each" in words.split()
        record, source = _joined(records), _source(records, each=each)
        if kind == "ladder":
            return f"{begin}{_ladder(record, words.strip(), floors)}{source}\n{end}"
        if kind == "series":
            return f"{begin}{series_markdown(record, words.strip())}{source}\n{end}"
        chosen = [name.strip() for name in words.split(",") if name.strip()]
        _require_measured(record, chosen)
        return f"{begin}{markdown_table(record, floors, chosen)}{source}\n{end}"

    return _MARKER.sub(fill, page)


def _require_measured(record: Record, names: Sequence[str]) -> None:
    """A column that nobody measured is left out of tables, and nobody would miss it on a page."""
    measured = metric_names(record)
    for name in names:
        if name not in measured:
            raise UnknownNameError("metric", name, measured, where=f"of {record.run_id}")


def _joined(records: Sequence[Record]) -> Record:
    """The first record with the rows of all. Raises UsageError where they are not of one code, on
    one device, with the same parameters of the run."""
    first = records[0]
    wanted = _told_apart(first)
    for each in records[1:]:
        found = _told_apart(each)
        other = next((name for name in wanted if found.get(name) != wanted[name]), None)
        if other is not None:
            raise UsageError(
                f"{first.run_id} and {each.run_id} are not of one table",
                why=f"they differ in {other}: {wanted[other]} and {found.get(other)}",
                next_step="a table for each",
            )
    return dataclasses.replace(first, rows=tuple(row for each in records for row in each.rows))


def _told_apart(record: Record) -> dict[str, object]:
    """What has to be the same for rows to stand in one table; those parameters that rows have of
    their own may differ."""
    own = {name for row in record.rows for name in row.parameters}
    run = {name: value for name, value in record.parameters.items() if name not in own}
    return {
        "the experiment": record.experiment,
        "the profile": record.profile,
        "device or torch": measured_on(record),
        **{f"the hash '{name}'": value for name, value in vars(record.hashes).items()},
        **run,
    }


def _ladder(record: Record, name: str, floors: Floors) -> str:
    """The ladder of that name, without its title."""
    drawings = parse_spec(record.spec, where=f"the record of {record.run_id}").drawings
    ladder = next((d.ladder for d in drawings if d.name == name and d.ladder is not None), None)
    if ladder is None:
        raise UsageError(f"{record.run_id} declares no ladder '{name}'")
    _, _, table = ladder_markdown("", climbs_of(ladder, record, floors)).partition("\n\n")
    return table


def _source(records: Sequence[Record], *, each: bool) -> str:
    note = "median over the valid repeats (least to most)"
    if each:
        note = "a figure for each valid repeat, in their order"
    names = ", ".join(f"`{record.run_id}`" for record in records)
    what = "record" if len(records) == 1 else "records"
    first = records[0]
    return f"\n{first.profile} on {measured_on(first)}; {note}; {what} {names}.\n"


def update_page(folder: Path, *, check: bool, say: Callable[[str], None]) -> None:
    """Bring the tables of `<folder>/README.md` up to date; with `check`, only say that they are.

    Raises UsageError where `check` finds one that is not.
    """
    path = folder / "README.md"
    old = path.read_text(encoding="utf-8")
    new = render_tables(old, folder)
    if new == old:
        say(f"{path} is up to date")
        return
    if check:
        raise UsageError(
            f"the tables of {path} are out of date",
            next_step=f"narrowgauge results tables {folder.name}",
        )
    path.write_text(new, encoding="utf-8")
    say(f"wrote {path}")
