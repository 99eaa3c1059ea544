"""Makes the folder of a new experiment, whole or not at all, and checks what it made."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import string
import tempfile
from pathlib import Path

from narrowgauge.catalog import EXPERIMENT_FILE, experiment_names
from narrowgauge.checkout import Checkout
from narrowgauge.errors import UsageError, results_unwritable
from narrowgauge.scaffold.files import FILES
from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.spec import load_spec

__all__ = ["create_experiment"]

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40
#: Commands take these words where an experiment could stand.
_TAKEN = ("latest", "all")


def create_experiment(checkout: Checkout, name: str, title: str) -> Path:
    """Write `experiments/<name>/` from the template; its folder.

    Raises UsageError for a name that cannot be one or is taken, a title that a TOML text cannot
    hold on one line, and ResultsUnwritable where the folder cannot be written.
    """
    _check_name(checkout, name)
    if not title.strip() or not title.isprintable() or '"' in title or "\\" in title:
        raise UsageError(
            f"{title!a} cannot be a title", why='one line, without " and \\, and not empty'
        )
    folder = checkout.experiments / name
    try:
        # Beside the experiments, not among them, where a listing would take it for one.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=checkout.root) as scratch:
            made = Path(scratch, name)
            _write(made, name, title)
            os.replace(made, folder)
    except OSError as error:
        raise results_unwritable(folder, error.strerror or str(error)) from error
    return folder


def _check_name(checkout: Checkout, name: str) -> None:
    package = name.replace("-", "_")
    fits = _ID.fullmatch(name) is not None and len(name) <= _LONGEST
    if not fits or name in _TAKEN or keyword.iskeyword(package):
        raise UsageError(
            f"{name!a} cannot be the name of an experiment",
            why=f"small letters and digits, parted by single '-', at most {_LONGEST}, a letter"
            f" first; no word of Python, and not {' or '.join(_TAKEN)}",
            next_step="for example: narrowgauge new my-paper",
        )
    packages = {known.replace("-", "_"): known for known in experiment_names(checkout.experiments)}
    if package in packages or (checkout.experiments / name).exists():
        raise UsageError(
            f"there is an experiment '{packages.get(package, name)}' already",
            why=f"its folder is {checkout.experiments / packages.get(package, name)}",
            next_step="take another name",
        )


def _write(folder: Path, name: str, title: str) -> None:
    """The files, checked as a run will read them: a template that is wrong is found here."""
    folder.mkdir()
    try:
        for file, text in FILES.items():
            filled = string.Template(text).substitute(id=name, title=title)
            (folder / file).write_text(filled, encoding="utf-8")
        load_claims(folder / "claims.toml", load_spec(folder / EXPERIMENT_FILE))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
