"""What a bundle concludes, held against what its records give: verdicts, statement, report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.bundle.entries import STATEMENT_FILE, VERDICTS_FILE
from narrowgauge.bundle.manifest import Manifest
from narrowgauge.bundle.occasions import OCCASIONS_FOLDER
from narrowgauge.bundle.page import REPORT_FILE, report_page
from narrowgauge.bundle.statement import statement_of
from narrowgauge.bundle.verdicts import differing
from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.occasions import rests_on
from narrowgauge_contract.record import Record

__all__ = ["contradictions"]

#: The bytes of a sound file of the bundle; None where there is none of that name.
Read = Callable[[str], "bytes | None"]


def contradictions(
    said: Judged,
    found: Judged,
    manifest: Manifest,
    records: Sequence[Record],
    digests: Mapping[str, str],
    read: Read,
) -> Iterator[str]:
    """What of the bundle's conclusions its records do not bear out. Pure but for `read`.

    `said`: what the bundle says; `found`: the same claims judged by its records; `digests`: the
    sha256 of each sound file.
    """
    yield from differing(said, found)
    if not said.occasion.replay and not _was_measured_for(said, digests, read):
        yield (
            f"{VERDICTS_FILE} says that the runs were made for these verdicts, and no occasion in"
            " here rests on all of them"
        )
    # Made of what the records give, so that no word of theirs is taken on trust.
    true = dataclasses.replace(found, occasion=said.occasion)
    images = [image.facts for image in manifest.images]
    statement = statement_of(true, digests, [run.folder for run in manifest.runs], images)
    if _parsed(read(STATEMENT_FILE)) != statement:
        yield f"{STATEMENT_FILE} does not say what the records, claims and images give"
    if read(REPORT_FILE) != report_page(true, records):
        yield f"{REPORT_FILE} is not the page that the records give"


def _was_measured_for(said: Judged, digests: Mapping[str, str], read: Read) -> bool:
    names = [
        name
        for name in digests
        if name.startswith(f"{OCCASIONS_FOLDER}/") and name.endswith("/judged.json")
    ]
    runs = said.run_ids
    return not runs or any(rests_on(_parsed(read(name)), runs) for name in names)


def _parsed(content: bytes | None) -> Any:
    try:
        return None if content is None else json.loads(content)
    except (ValueError, RecursionError):
        return None
