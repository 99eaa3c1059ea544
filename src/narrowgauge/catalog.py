"""The experiments of a checkout: one folder with an experiment.toml each."""

from __future__ import annotations

from pathlib import Path

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.spec import ExperimentSpec, load_spec

__all__ = ["EXPERIMENT_FILE", "experiment_names", "load_experiment", "load_experiments"]

EXPERIMENT_FILE = "experiment.toml"


def experiment_names(folder: Path) -> tuple[str, ...]:
    """The ids, sorted; hidden folders are none. Reads no file, so that completion is quick."""
    if not folder.is_dir():
        return ()
    names = (path.parent.name for path in folder.glob(f"*/{EXPERIMENT_FILE}"))
    return tuple(sorted(name for name in names if not name.startswith(".")))


def load_experiment(folder: Path, name: str) -> ExperimentSpec:
    """The declaration of one experiment. Raises UnknownNameError or ExperimentFileError."""
    known = experiment_names(folder)
    if name not in known:
        raise UnknownNameError("experiment", name, known)
    return load_spec(folder / name / EXPERIMENT_FILE)


def load_experiments(folder: Path) -> tuple[ExperimentSpec, ...]:
    """Every experiment, sorted by id. Raises ExperimentFileError for the first that is wrong."""
    return tuple(load_experiment(folder, name) for name in experiment_names(folder))
