"""`narrowgauge show RUN`: one run on one screen, and `narrowgauge results`: all of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from narrowgauge import statistics
from narrowgauge.liveness import Liveness
from narrowgauge.noise import Floors
from narrowgauge.progress import duration
from narrowgauge.remarks import remarks, two_modes
from narrowgauge.show_tables import plain_table, remarks_of, results_of, rows_of
from narrowgauge.statistics import Configuration, word
from narrowgauge.store import Entry, RunFolder, RunState
from narrowgauge.units import format_value
from narrowgauge.view import (
    LEAST_WIDTH,
    RunView,
    liveness_now,
    load_view,
    metric_names,
    unit_of,
    warnings_of,
    widen,
)
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import Status, why_nothing_measured
from narrowgauge_contract.spec import headline_of
from narrowgauge_contract.summary import summary_lines
from narrowgauge_contract.traces import TRACE_FILE

if TYPE_CHECKING:
    from narrowgauge_contract.record import Record

__all__ = ["print_results", "show_run"]

_STYLES = {
    Status.COMPLETE: ("✔", "green"),
    Status.FAILED: ("✘", "red"),
    Status.SKIPPED: ("–", "dim"),
    Status.INTERRUPTED: ("■", "yellow"),
    Status.UNFINISHED: ("…", "yellow"),
}
_LOG_LINES = 8
#: More pictures than these are counted.
_PICTURES = 8


def show_run(folder: RunFolder, console: Console, floors: Floors) -> None:
    """Print everything a reader needs to know of one run, whatever state it is in."""
    widen(console)
    view = load_view(folder)
    console.print(_header(view, console.is_terminal))
    if view.problem is not None:
        console.print(Text(f"✘ {view.problem}", style="red"))
    record = view.record
    if record is None:
        return
    for warning in (*warnings_of(view), *two_modes(view)):
        console.print(Text(f"⚠ {warning}", style="yellow"))
    if record.rows:
        console.print(results_of(view, record, console))
        console.print(rows_of(view, record, console))
        for remark in remarks_of(remarks(view, floors), console):
            console.print(remark)
    else:
        words = "no row has begun yet" if view.going else "no row was started"
        console.print(Text(words, style="yellow"))
    for part in (_error(view, record), _facts(record, console), _footer(view, record)):
        if part is not None:
            console.print(part)


def _header(view: RunView, terminal: bool) -> RenderableType:
    record = view.record
    if record is None:
        return Text(f"{view.folder.name}: damaged", style="bold red")
    # What an outcome says already is no end while the run has no record.
    mark, colour = _STYLES[Status.UNFINISHED if view.liveness else _status(record)]
    title = view.spec.title if view.spec else record.experiment
    first = Text.assemble((title, "bold"), "   ", (f"{mark} {_ended(view, record)}", colour))
    second = Text(" · ".join(_circumstances(view, record)), style="dim" if terminal else "")
    third = Text(" ".join(f"{n}={word(v)}" for n, v in sorted(record.parameters.items())))
    body = Group(first, second, third)
    if not terminal:
        return Group(Text(record.run_id), body)
    return Panel(body, title=record.run_id, title_align="left", border_style=colour)


def _ended(view: RunView, record: Record) -> str:
    if view.liveness is not None:
        return view.liveness.value
    spent = f" in {duration(record.seconds)}" if record.seconds is not None else ""
    code = f", exit code {record.exit_code}" if record.exit_code else ""
    return f"{_status(record).value}{spent}{code}"


def _lacking(record: Record) -> str:
    """What this host lacks, where nothing could be measured for it; empty for every other run."""
    ended = record.exit_code == ExitCode.NOT_APPLICABLE
    return why_nothing_measured(record.rows) if ended else ""


def _status(record: Record) -> Status:
    """The run's, but `skipped` where all of its rows are: nothing went wrong in it."""
    return Status.SKIPPED if _lacking(record) else record.status


def _circumstances(view: RunView, record: Record) -> Iterable[str]:
    yield record.experiment
    yield record.profile
    yield f"seed {record.seed}"
    host = record.host
    if host is None:
        # What a launcher knows of the host comes with the record.
        unknown = view.state is not RunState.RECORDED and view.folder.launched
        yield f"on {record.target}" + ("" if unknown else ", no launcher")
    elif host.executor == record.target:
        yield record.target
    else:
        yield f"{host.executor} on {record.target}"
    if host is not None and host.board is not None:
        device = "" if host.board.device == "all" else f"/{host.board.device}"
        yield f"board {host.board.name}{device}"
    if host is not None and host.scheduler is not None:
        yield f"job {host.scheduler.job} on {' '.join(host.scheduler.nodes)}"
    if host is not None and host.image is not None:
        yield f"image {_short(host.image.digest)}"
    if record.data_sets:
        yield "data " + ", ".join(record.data_sets)
    if record.started_utc:
        yield time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.started_utc))


def _error(view: RunView, record: Record) -> RenderableType | None:
    """Why it failed, and the end of its log: that is what one looks for then. Rows that were
    skipped have not failed; where there are no others, one sentence says why."""
    lacking = _lacking(record)
    if lacking:
        return Text(f"nothing could be measured here: {lacking}", style="yellow")
    stopped = (row for row in record.rows if row.status is not Status.SKIPPED)
    failed = next((row.error for row in stopped if row.error is not None), None)
    error = record.error or failed or (record.host.error if record.host else None)
    if error is None:
        return None
    lines = [f"{error.kind}: {error.what}", error.why, error.next_step]
    closing = view.spec.closing if view.spec else None
    above = "\n".join(summary_lines(closing, record.rows) if closing else ()).splitlines()
    log = record.host.log_tail.splitlines() if record.host else []
    log = [line for line in log if not line or line not in above][-_LOG_LINES:]
    body = "\n".join([line for line in lines if line] + ([""] if log else []) + log)
    return Panel(Text(body), title="What went wrong", title_align="left", border_style="red")


def _facts(record: Record, console: Console) -> RenderableType:
    inside, machine = _inside(record), _machine(record)
    tables = []
    for title, facts in (("Inside", inside), ("Host", machine), ("Hashes", _hashes(record))):
        table = plain_table(title, "", "", headers=False)
        for name, value in facts:
            table.add_row(Text(name, style="dim" if console.is_terminal else ""), value)
        if facts:
            tables.append(table)
    return Columns(tables, padding=(0, 4))


def _inside(record: Record) -> list[tuple[str, str]]:
    facts = record.inside
    if facts is None:
        return []
    named = {
        "device": facts.accelerator or facts.cpu,
        "capability": facts.capability,
        "threads": str(facts.threads) if facts.threads else None,
        "python": facts.python,
        "torch": facts.torch,
        "cuda": facts.cuda,
        "cudnn": facts.cudnn,
        "kernels": _short(facts.kernels_build) if facts.kernels_build else None,
    }
    return [(name, value) for name, value in named.items() if value]


def _machine(record: Record) -> list[tuple[str, str]]:
    if record.host is None:
        return []
    machine = record.host.machine
    named = {
        "system": machine.system,
        "kernel": f"{machine.kernel} {machine.machine}",
        "cpu": f"{machine.cpu_count} × {machine.cpu}",
        "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
        "docker": machine.docker,
        "driver": machine.driver,
        "l4t": machine.l4t,
        "power mode": machine.power_mode,
        "cache": {True: "cold", False: "warm", None: None}[record.host.cache_cold],
    }
    board = record.host.board
    if board is not None:
        named["clock"] = f"{board.clock_skew_s:+.2f} s ± {board.clock_bound_s:.2f} s"
    gpus = [("gpu", str(gpu.get("name", gpu))) for gpu in machine.gpus]
    return [(name, value) for name, value in named.items() if value] + gpus


def _hashes(record: Record) -> list[tuple[str, str]]:
    named = [("image", _short(record.hashes.image) if record.hashes.image else "none")]
    named += [("lab + kernels", _short(record.hashes.source))]
    named += [("experiment", _short(record.hashes.experiment))]
    git = record.host.git if record.host else None
    if git is not None:
        named += [("commit", git.commit[:12] + (", changed since" if git.dirty else ""))]
    named += [
        (f"weights {w.name}", _short(w.sha256))
        for w in (record.host.weights if record.host else ())
    ]
    return named


def _footer(view: RunView, record: Record) -> RenderableType:
    folder = view.folder
    drawn = sorted(p.name for p in folder.derived.glob("*.png")) if folder.derived.is_dir() else []
    lines = [f"{folder.path}/"]
    if drawn:
        more = f" and {len(drawn) - _PICTURES} more pictures" if len(drawn) > _PICTURES else ""
        lines.append(f"  derived/ {', '.join(drawn[:_PICTURES])}{more}")
    if record.side_files:
        place = f"{folder.out.name}/" if folder.launched else "the same folder"
        lines.append(f"  {len(record.side_files)} side files in {place}")
    traces = [side.path for side in record.side_files if Path(side.path).name == TRACE_FILE]
    if traces:
        more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
        lines.append(f"  what ran when: {folder.out / traces[0]}{more}; ui.perfetto.dev opens it")
    if view.liveness is not None:
        lines.append(_next(folder, view.liveness))
    elif record.valid_rows():
        lines.append(f"next: narrowgauge compare {folder.name} RUN")
    return Text("\n".join(lines))


def _next(folder: RunFolder, liveness: Liveness) -> str:
    if liveness is Liveness.WATCHED:
        return "its launcher records it when it has ended"
    when = " when it has ended" if liveness is Liveness.RUNNING else ""
    return f"next{when}: {folder.how_to_record}"


def print_results(entries: Sequence[Entry], console: Console, *, filtered: bool = False) -> None:
    """A line per run, newest first. Damaged runs are there too, and say so.

    `filtered`: a list that is empty does not mean that there are no runs.
    """
    widen(console)
    columns = ["run", "profile", "status", "took", "valid", "headline"]
    left_out = "took" if console.width < LEAST_WIDTH else ""
    table = plain_table("", *(name for name in columns if name != left_out))
    for entry in entries:
        cells = dict(zip(columns, (entry.folder.name, *_result_cells(entry)), strict=True))
        cells.pop(left_out, None)
        table.add_row(*cells.values())
    nothing = "no such run" if filtered else "no runs yet: narrowgauge run mnist"
    console.print(table if entries else Text(nothing))


def _result_cells(entry: Entry) -> tuple[RenderableType, ...]:
    record = entry.record
    if record is None:
        if entry.state is RunState.DAMAGED:
            what = entry.problem.what.replace(f"{entry.folder.path}/", "") if entry.problem else ""
            return "", Text("damaged", style="red"), "", "", Text(what, style="red")
        profile = entry.job.profile if entry.job else ""
        going = liveness_now(entry.folder).going
        words = {True: "… running", False: "no record, cut off", None: "no record yet"}[going]
        return profile, Text(words, style="yellow"), "", "", ""
    mark, colour = _STYLES[_status(record)]
    skipped = sum(row.status is Status.SKIPPED for row in record.rows)
    tried = len(record.rows) - skipped
    valid = Text(f"{len(record.valid_rows())}/{tried}")
    if len(record.valid_rows()) < tried:
        valid.stylize("red")
    if skipped:
        valid.append(f", {skipped} skipped", style="yellow")
    took = duration(record.seconds) if record.seconds is not None else ""
    status = Text(f"{mark} {_status(record).value}", style=colour)
    return record.profile, status, took, valid, headline_text(entry)


def headline_text(entry: Entry) -> str:
    """The first headline metric over all valid rows, in a few words."""
    record = entry.record
    if record is None:
        return ""
    for name in (n for n in headline_of(record.spec) if n in metric_names(record)):
        all_rows = Configuration({}, record.rows)
        summary = statistics.summarize(all_rows.figures(name))
        if summary is not None:
            return f"{name} {format_value(summary.median, unit_of(record, name))}"
    return ""


def _short(digest: str) -> str:
    """The first twelve figures of a hash, without what kind of hash it is."""
    return digest.rpartition(":")[2][:12]
