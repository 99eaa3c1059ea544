"""The costs that a run measured, from its folder."""

from __future__ import annotations

from narrowgauge.errors import NoValidRow, UsageError
from narrowgauge.planner.pooling import pooled
from narrowgauge.side_files import side_file
from narrowgauge.store import RunFolder
from narrowgauge_contract.outcome import Row, Status
from narrowgauge_contract.placement_costs import COSTS_FILE, Costs, parse_costs

__all__ = ["costs_of"]


def costs_of(folder: RunFolder, row: int | None = None) -> tuple[Costs, tuple[Row, ...]]:
    """The costs of a recorded run, of all its usable rows together (`pooling`) or of the row of
    that index; and which rows these are.

    Raises UsageError where rows of several networks or batches have costs and none was chosen, or
    none has; NoValidRow for a row that may not be used; DamagedRecordError.
    """
    rows = [
        each
        for each in folder.record().rows
        if any(file.path.endswith(f"/{COSTS_FILE}") for file in each.side_files)
        and row in (None, each.index)
    ]
    if not rows:
        which = "has no costs" if row is None else f"has no costs in row {row}"
        raise UsageError(
            f"the run {folder.name} {which}",
            why=f"no such row has the side file {COSTS_FILE}",
            next_step="narrowgauge run hetero-plan, without a plan",
        )
    usable = [each for each in rows if each.status is Status.COMPLETE and each.validity.valid]
    if not usable:
        reasons = [reason for each in rows for reason in each.validity.reasons]
        raise NoValidRow(
            f"no costs of the run {folder.name} may be used",
            why="\n".join(reasons) or "its rows did not end well",
            next_step="measure again: narrowgauge run hetero-plan",
        )
    kinds = {(each.parameters["network"], each.parameters["batch"]) for each in usable}
    if len(kinds) > 1:
        listed = ", ".join(
            f"--row {each.index} ({each.parameters['network']}, batch {each.parameters['batch']})"
            for each in usable
        )
        raise UsageError(f"the run {folder.name} has costs of several steps", next_step=listed)
    return pooled([_read(folder, each) for each in usable]), tuple(usable)


def _read(folder: RunFolder, row: Row) -> Costs:
    path = side_file(row, COSTS_FILE, folder)
    assert path is not None  # asked for above
    return parse_costs(path.read_text(encoding="utf-8"), str(path))
