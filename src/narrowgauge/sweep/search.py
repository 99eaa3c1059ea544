"""Points chosen by Optuna, from what earlier ones gave. The study's storage may be shared: any
number of launchers, on any machines that reach it, work on one sweep."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError, ToolchainMissing, UsageError
from narrowgauge.sweep.file import Choice, Domain, SweepSpec
from narrowgauge_contract.parameters import Scalar

__all__ = ["Search"]

_RUN, _OWNER, _ASKED = "run", "owner", "asked"
#: What of a database's URL is nobody else's: user:PASSWORD@host, and what options may hold.
_SECRETS = (
    (re.compile(r"(://[^:/@\s]*):\S*@"), r"\1:…@"),
    (re.compile(r"((?:password|passwd|pwd|secret|token)=)[^&\s'\"]+", re.IGNORECASE), r"\1…"),
)


class Search:
    """The study of one sweep. Its sampler is Optuna's TPE, seeded by the sweep's seed and, so that
    launchers beside each other do not ask for the same points, by what is in the study already."""

    def __init__(self, sweep: SweepSpec, folder: Path) -> None:
        """Raises ToolchainMissing without Optuna, UsageError for a storage that does not answer,
        and for a study that the file no longer describes."""
        self._optuna = _import_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._sweep = sweep
        self._distributions = {
            name: self._distribution(domain) for name, domain in sweep.domains.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        storage = self._storage(sweep.file.storage, folder)
        self.study = self._optuna.create_study(
            study_name=sweep.file.name,
            storage=storage,
            direction=sweep.file.direction,
            load_if_exists=True,
        )
        self._require_same()
        self.study.sampler = self._optuna.samplers.TPESampler(
            seed=sweep.file.seed + len(self.study.get_trials(deepcopy=False)),
            constant_liar=True,
        )

    @property
    def left(self) -> int:
        """How many points are still to be asked for: all that did not fail count."""
        failed = self._optuna.trial.TrialState.FAIL
        trials = self.study.get_trials(deepcopy=False)
        return max(0, self._sweep.file.runs - sum(trial.state is not failed for trial in trials))

    def next(self) -> tuple[int, dict[str, Scalar]]:
        """A trial's number and its values."""
        trial = self.study.ask(self._distributions)
        trial.set_user_attr(_OWNER, f"{socket.gethostname()} {os.getpid()}")
        return trial.number, dict(trial.params)

    def started(self, trial: int, run_id: str) -> None:
        """Which run a trial became: a launcher after this one finds its record by it."""
        self._trial(trial).set_user_attr(_RUN, run_id)

    def tell(self, trial: int, figures: Mapping[str, float], valid: bool) -> None:
        """What a run gave; one without a valid figure failed, and its point may come again."""
        value = figures.get(self._sweep.file.metric) if valid else None
        if valid and value is None:
            raise UsageError(
                f"the runs have no metric '{self._sweep.file.metric}' to be sought",
                why=f"they have: {', '.join(figures) or 'none'}",
                next_step="name one of these in [sweep] metric",
            )
        if value is None or value != value:
            self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial, value)

    def orphans(self) -> list[tuple[int, str]]:
        """Trials that a launcher of this host left behind, with their run ids; empty: none yet."""
        running = self._optuna.trial.TrialState.RUNNING
        found = []
        for trial in self.study.get_trials(deepcopy=False, states=(running,)):
            host, _, pid = str(trial.user_attrs.get(_OWNER, "")).partition(" ")
            if host == socket.gethostname() and pid.isdigit() and not _lives(int(pid)):
                found.append((trial.number, str(trial.user_attrs.get(_RUN, ""))))
        return found

    def elsewhere(self) -> dict[str, int]:
        """How many trials run by launchers of which other hosts. Whether those live cannot be seen
        from here."""
        running = self._optuna.trial.TrialState.RUNNING
        found: dict[str, int] = {}
        for trial in self.study.get_trials(deepcopy=False, states=(running,)):
            host = str(trial.user_attrs.get(_OWNER, "")).partition(" ")[0]
            if host != socket.gethostname():
                found[host or "an unknown host"] = found.get(host or "an unknown host", 0) + 1
        return found

    def _require_same(self) -> None:
        """Trials of another question would steer this search, and its best would be of neither."""
        file = self._sweep.file
        parts: dict[str, Any] = {
            "experiment": file.experiment, "profile": file.profile, "seed": file.seed,
            "metric": file.metric, "direction": file.direction,
            "vary": sorted((name, repr(domain)) for name, domain in self._sweep.domains.items()),
            "fixed": sorted((name, repr(value)) for name, value in self._sweep.fixed.items()),
        }  # fmt: skip
        digests = {name: sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}
        known = self.study.user_attrs.get(_ASKED)
        if known is None:
            self.study.set_user_attr(_ASKED, digests)
        elif known != digests:
            changed = [name for name, digest in digests.items() if known.get(name) != digest]
            raise UsageError(
                f"the study '{file.name}' seeks something else than the sweep file says now",
                why=f"changed since it was begun: {', '.join(changed)}",
                next_step="rename the file, which begins another study, or put back what it said;"
                " runs may grow",
            )

    def _trial(self, number: int) -> Any:
        # A trial's id in the storage is not its number; `ask` gave it, and the storage knows it.
        identity = self.study._storage.get_trial_id_from_study_id_trial_number(
            self.study._study_id, number
        )
        return self._optuna.trial.Trial(self.study, identity)

    def _distribution(self, domain: Domain) -> Any:
        kinds = self._optuna.distributions
        if isinstance(domain, Choice):
            return kinds.CategoricalDistribution(domain.values)
        step = domain.step or None
        if domain.whole:
            return kinds.IntDistribution(
                int(domain.low), int(domain.high), log=domain.log, step=int(step or 1)
            )
        return kinds.FloatDistribution(domain.low, domain.high, log=domain.log, step=step)

    def _storage(self, url: str, folder: Path) -> Any:
        """A database by its URL; else a journal in the results folder, which may be on NFS."""
        try:
            if url:
                return self._optuna.storages.get_storage(url)
            backend = self._optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log"))
            return self._optuna.storages.JournalStorage(backend)
        except NarrowgaugeError:
            raise
        except Exception as error:  # whatever the database's own library raises
            raise UsageError(
                f"the storage {_masked(url)} of the sweep does not answer",
                why=_masked(f"{type(error).__name__}: {error}".splitlines()[0]),
                next_step="without [sweep] storage a file of the results folder is used",
            ) from error


def _masked(text: str) -> str:
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ToolchainMissing(
            "a sweep by Optuna needs optuna, which is not installed",
            next_step=f"{sys.executable} -m pip install 'narrowgauge[sweep]'; or another method",
        ) from error
    return optuna
