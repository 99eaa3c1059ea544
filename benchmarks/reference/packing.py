"""What comes back of the folders that `take.py` fills."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from jobs import ENDED

__all__ = ["ARRAYS_BYTES", "EVENTS", "pack", "pack_arrays"]

#: What comes back of a job's folder, beside its tables and its log.
PACKED = frozenset(
    (
        "record.json",
        "outcome.json",
        "job.json",
        "costs.json",
        "host.json",
        "lost.json",
        "plans.json",
        "samples.json",
        ENDED,
    )
)
#: What comes back of a run that has no record yet: one can be made from that, should the host be
#: gone before the run ends.
EVENTS = "events.jsonl"
#: Bytes of an archive of arrays: such files travel singly, and the largest have to be cut.
ARRAYS_BYTES = 15 << 20


def pack(out: Path, file: Path) -> None:
    """All that a reader needs of `out`, as one compressed archive: records, ends, logs' ends, and
    the small files beside a record that its figures can be worked out from again; and the events of
    what is not recorded yet."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            if not path.is_file() or path == file:
                continue
            unrecorded = path.name == EVENTS and not (path.parent / "record.json").is_file()
            if unrecorded or path.name in PACKED or path.suffix in (".csv", ".txt"):
                body = path.read_bytes()
                member = tarfile.TarInfo(str(path.relative_to(out)))
                # Of a log, its end says how it ended.
                body = body[-200_000:] if path.suffix == ".txt" else body
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))


def pack_arrays(out: Path, stem: Path) -> list[Path]:
    """Logits and the like (*.npz, compressed already) as archives STEM-0.tar, STEM-1.tar, …, each
    of at most `ARRAYS_BYTES` and at least one file; returns them."""
    made: list[Path] = []
    room = 0
    archive: tarfile.TarFile | None = None
    for path in sorted(out.rglob("*.npz")):
        size = path.stat().st_size + 2 * tarfile.BLOCKSIZE
        if archive is None or size > room:
            if archive is not None:
                archive.close()
            made.append(stem.with_name(f"{stem.name}-{len(made)}.tar"))
            archive, room = tarfile.open(made[-1], "w"), ARRAYS_BYTES - tarfile.RECORDSIZE
        archive.add(path, str(path.relative_to(out)), recursive=False)
        room -= size
    if archive is not None:
        archive.close()
    return made
