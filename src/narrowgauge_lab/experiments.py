"""Finding an experiment's folder and loading its code, without touching sys.path."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Callable, List, Optional

from narrowgauge_contract.errors import ExperimentFileError, UnknownNameError, UsageError
from narrowgauge_contract.spec import ExperimentSpec, load_spec

__all__ = ["find_experiments", "find_run", "find_spec", "load_run", "package_name"]

_ROOT_PACKAGE = "narrowgauge_experiments"


def find_experiments(given: Optional[Path], start: Path) -> Path:
    """The folder of experiments: as given, or of the checkout around `start`, or of the image.

    Raises UsageError where there is none.
    """
    candidates = [given] if given else []
    if not given:
        candidates = [folder / "experiments" for folder in (start, *start.parents)]
        candidates += [Path(__file__).resolve().parents[2] / "experiments", Path("/experiments")]
    for folder in candidates:
        if folder.is_dir() and (given or any(folder.glob("*/experiment.toml"))):
            return folder.resolve()
    raise UsageError(
        "there is no folder of experiments" + (f" at {given}" if given else ""),
        next_step="--experiments DIR names the one of a checkout",
    )


def find_spec(experiments: Path, name: str) -> ExperimentSpec:
    """The declaration of an experiment. Raises UnknownNameError with the list of known ones."""
    known = _known(experiments)
    if name not in known:
        raise UnknownNameError("experiment", name, known)
    return load_spec(experiments / name / "experiment.toml")


def _known(experiments: Path) -> List[str]:
    return sorted(found.parent.name for found in experiments.glob("*/experiment.toml"))


def package_name(experiment: str) -> str:
    """`per-layer` is loaded as `narrowgauge_experiments.per_layer`."""
    return f"{_ROOT_PACKAGE}.{experiment.replace('-', '_')}"


def find_run(experiments: Path, experiment: str) -> Path:
    """The experiment's run.py. Raises UnknownNameError; ExperimentFileError where it has none."""
    folder = experiments / experiment
    if not folder.is_dir():
        raise UnknownNameError("experiment", experiment, _known(experiments))
    if not (folder / "run.py").is_file():
        raise ExperimentFileError(f"{folder} has no run.py")
    return folder / "run.py"


def load_run(experiments: Path, experiment: str) -> Callable[[Any], None]:
    """The function `run(ctx)` of an experiment's run.py; siblings import each other relatively.

    Raises UnknownNameError, ExperimentFileError, and what the experiment's own code raises.
    """
    folder = find_run(experiments, experiment).parent
    name = package_name(experiment)
    _package(_ROOT_PACKAGE, experiments)
    _package(name, folder)
    module = importlib.import_module(f"{name}.run")
    run = getattr(module, "run", None)
    if not callable(run):
        raise ExperimentFileError(f"{folder}/run.py has no function run(ctx)")
    function: Callable[[Any], None] = run
    return function


def _package(name: str, folder: Path) -> None:
    """Make `name` a package whose modules are the files of `folder`, unless it is already."""
    loaded = sys.modules.get(name)
    if loaded is not None and list(loaded.__path__) == [str(folder)]:
        return
    for stale in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
        del sys.modules[stale]
    init = folder / "__init__.py"
    if init.is_file():
        spec = importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ExperimentFileError(f"{init} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = [str(folder)]
    sys.modules[name] = module
