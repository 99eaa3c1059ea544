"""Pictures of reference records, beside the pages that show them.

A repository holds records without their side files, from which maps and matrices are drawn. So what
a page shows is drawn while the run is at hand, and kept as one file for each picture.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from narrowgauge.draw import draw_what_is_whole
from narrowgauge.errors import UsageError, results_unwritable
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder
from narrowgauge_contract.record import Record

__all__ = ["find_pictures", "keep_pictures"]

#: Beside an experiment's page.
_PICTURES = "pictures"
#: The form that is kept where a name has none.
_FORM = ".svg"


def find_pictures(folder: RunFolder, names: Sequence[str], floors: Floors) -> list[Path]:
    """Draw a run, and find those of its pictures. A name is a file's in `derived`, as an SVG unless
    it says `.png`. Raises UsageError for a name that the run has no picture of, and
    DamagedRecordError for one that is drawn from a side file which is damaged or not there: a run
    that was brought from elsewhere has its record alone, and pictures of its metrics."""
    made, problems = draw_what_is_whole(folder, floors)
    drawn = {path.name: path for path in made}
    known = sorted(name.partition(".")[0] for name in drawn if name.endswith(_FORM))
    found = []
    for name in names:
        path = drawn.get(name if "." in name else f"{name}{_FORM}")
        if path is None:
            stem = name.partition(".")[0]
            for drawing, problem in problems.items():
                if stem == drawing or stem.startswith(f"{drawing}-"):
                    raise problem
            raise UsageError(
                f"{folder.record().run_id} has no picture '{name}'",
                why=f"it has {', '.join(known)}" if known else "it has none",
            )
        found.append(path)
    return found


def keep_pictures(found: Sequence[Path], record: Record, experiments: Path) -> list[str]:
    """Copy the pictures of a run to `experiments`/ID/pictures; for each the line of Markdown that
    shows it on that experiment's page. Raises ResultsUnwritable."""
    into = experiments / record.experiment / _PICTURES
    try:
        into.mkdir(exist_ok=True)
        for path in found:
            shutil.copyfile(path, into / path.name)
    except OSError as error:
        raise results_unwritable(into, error.strerror or str(error)) from error
    return [f"![{path.stem} of {record.run_id}]({_PICTURES}/{path.name})" for path in found]
