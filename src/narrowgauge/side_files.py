"""The files beside a record, found and checked before anything is drawn from them."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.store import RunFolder
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import Row

__all__ = ["side_file"]


def side_file(row: Row, name: str, folder: RunFolder) -> Path | None:
    """The row's side file of that name; None where it has none.

    Raises DamagedRecordError where it is not the file that was recorded.
    """
    side = next((s for s in row.side_files if Path(s.path).name == name), None)
    if side is None:
        return None
    path = folder.out / side.path
    if not path.is_file() or sha256_file(path) != side.sha256:
        raise DamagedRecordError(
            f"the side file {side.path} is missing or was changed",
            why=f"it should have sha256 {side.sha256}",
            next_step="the record itself is whole; only this picture is not drawn",
        )
    return path
