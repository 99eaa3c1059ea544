"""From a checkout and a results folder to judgements. What reads, and nothing that measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.catalog import load_experiments
from narrowgauge.checkout import Checkout, git_facts
from narrowgauge.errors import UnknownNameError
from narrowgauge.index import Index, Listed
from narrowgauge.index.listed import check_untouched, digest_of_bytes
from narrowgauge.json_text import parse_json
from narrowgauge.judge.bars import Unmeasured
from narrowgauge.judge.figures import RATES
from narrowgauge.judge.judging import judge
from narrowgauge.judge.model import JUDGED_FORMAT, Judged, Occasion, Refused
from narrowgauge.noise import Floors
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract import __version__
from narrowgauge_contract.claims import Claim, load_claims
from narrowgauge_contract.codec import decode, read_json
from narrowgauge_contract.collector import without_collector
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.record import Record, load_record, parse_record
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "CLAIMS_FILE",
    "Claimed",
    "Records",
    "all_claims",
    "choose_claims",
    "judge_records",
    "judge_references",
    "judge_stored",
    "judge_with_records",
    "load_judged",
    "occasion_of",
    "read_references",
    "read_stored",
]

CLAIMS_FILE = "claims.toml"
#: Whether two records' energies are of one source is asked of every claim.
_ENERGY = ("J", "W")


@dataclass(frozen=True)
class Claimed:
    """A claim and the experiment it belongs to. `name` is what commands call it."""

    spec: ExperimentSpec
    claim: Claim

    @property
    def name(self) -> str:
        return f"{self.spec.id}/{self.claim.id}"


@dataclass(frozen=True)
class Records:
    """The records that could be read, by experiment, and those that were refused."""

    by_experiment: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()


def all_claims(experiments: Path) -> tuple[Claimed, ...]:
    """Every claim of a checkout, by experiment, in their files' order. Raises ClaimsError."""
    found: list[Claimed] = []
    for spec in load_experiments(experiments):
        path = experiments / spec.id / CLAIMS_FILE
        if path.is_file():
            found += [Claimed(spec, claim) for claim in load_claims(path, spec)]
    return tuple(found)


def choose_claims(known: Sequence[Claimed], words: Sequence[str]) -> tuple[Claimed, ...]:
    """The claims that words name (`EXPERIMENT/CLAIM`, `CLAIM`, or all of an `EXPERIMENT`), in the
    order of `known`; all of them without a word. Raises UnknownNameError."""
    chosen: set[str] = set()
    for word in words:
        found = {each.name for each in known if word in (each.name, each.claim.id, each.spec.id)}
        if not found:
            names = [n for each in known for n in (each.name, each.claim.id)]
            raise UnknownNameError("claim", word, [*names, *{e.spec.id for e in known}])
        chosen |= found
    return tuple(each for each in known if not words or each.name in chosen)


def read_stored(
    store: Store,
    experiments: Iterable[str],
    runs: Sequence[str] = (),
    metrics: Mapping[str, frozenset[str]] | None = None,
) -> Records:
    """The records of some experiments; with `runs`, of those alone. Damaged ones are refused by
    name and the others read.

    `metrics`: per experiment those that are asked for. The records of such an experiment come
    without other metrics (but for energies), and without what no judgement or card shows.
    """
    found: dict[str, tuple[Record, ...]] = {}
    refused: list[Refused] = []
    lean = _Lean(metrics or {})
    # Records are trees: to look for cycles among a million new objects finds none, and takes an
    # eighth of the time that reading them does.
    with without_collector(), Index(store.root, lean.witness) as index:
        for experiment in sorted(set(experiments)):
            records: list[Record] = []
            for run in index.runs(experiment=experiment):
                folder = index.folder(run)
                if (runs and run.run_id not in runs) or (not folder.recorded and not run.problem):
                    continue
                if run.problem:
                    refused.append(Refused(str(folder.record_path), run.problem))
                    continue
                _take(folder, run, lean, records, refused)
            found[experiment] = tuple(records)
    return Records(found, tuple(refused))


def _take(
    folder: RunFolder,
    run: Listed,
    lean: _Lean,
    records: list[Record],
    refused: list[Refused],
) -> None:
    try:
        record = lean.record(folder, run)
        if record is None:
            record = folder.record()
            check_untouched(folder, record)
        records.append(record)
    except (NarrowgaugeError, OSError) as error:
        refused.append(Refused(str(folder.record_path), str(error)))


class _Lean:
    """Records without what takes most of the time to decode and nobody asks for.

    `asked`: the metrics by experiment; records of others are left to be read whole. What the index
    had to read in this process is taken from there.
    """

    def __init__(self, asked: Mapping[str, frozenset[str]]) -> None:
        self._asked = asked
        self._seen: dict[str, tuple[str, Record]] = {}

    def witness(self, run: Listed, document: Any) -> None:
        """Keep of a record that the index reads what is asked for."""
        asked = self._asked.get(run.experiment)
        if asked is not None:
            self._seen[run.folder] = run.digest, _part_of(document, asked, run.folder)

    def record(self, folder: RunFolder, run: Listed) -> Record | None:
        """The record; None where it has to be read whole: its bytes are not those that the index
        has seen and checked, of which alone a part may be left unread."""
        asked = self._asked.get(run.experiment)
        if asked is None:
            return None
        digest, seen = self._seen.pop(run.folder, ("", None))
        if seen is not None and digest == run.digest:
            return seen
        raw = folder.record_path.read_bytes()
        if digest_of_bytes(raw) != run.digest:
            return None
        return _part_of(parse_json(raw), asked, str(folder.record_path))


def _part_of(document: Any, asked: frozenset[str], where: str) -> Record:
    for row in document["rows"]:
        row["side_files"] = []
        row["metrics"] = [
            each for each in row["metrics"] if each["name"] in asked or each["unit"] in _ENERGY
        ]
    lean = {**document, "spec": {}, "side_files": []}
    if lean["inside"] is not None:
        lean["inside"] = {**lean["inside"], "packages": {}}
    if lean["host"] is not None:
        lean["host"] = {**lean["host"], "log_tail": ""}
    return parse_record(lean, where)


def _asked_for(claims: Iterable[Claimed]) -> dict[str, frozenset[str]]:
    """Per experiment, the metrics that its claims are about; none of an experiment with a rate,
    which counts comparisons whatever they are of."""
    names: dict[str, set[str]] = {}
    rates: set[str] = set()
    for each in claims:
        known = names.setdefault(each.spec.id, set())
        known |= {selection.metric for selection in each.claim.selections}
        if each.claim.statistic in RATES:
            rates.add(each.spec.id)
    return {spec: frozenset(known) for spec, known in names.items() if spec not in rates}


def read_references(experiments: Path, names: Iterable[str]) -> Records:
    """The reference records of some experiments of a checkout."""
    found: dict[str, tuple[Record, ...]] = {}
    refused: list[Refused] = []
    for name in sorted(set(names)):
        records: list[Record] = []
        for path in sorted((experiments / name / "reference").glob("*/*.json.gz")):
            try:
                records.append(load_record(path))
            except (NarrowgaugeError, OSError) as error:
                refused.append(Refused(str(path), str(error)))
        found[name] = tuple(records)
    return Records(found, tuple(refused))


def judge_records(
    chosen: Sequence[Claimed],
    records: Records,
    occasion: Occasion,
    floors: Floors,
    unmeasured: Mapping[str, Unmeasured] | None = None,
) -> Judged:
    """Judge claims by records. Pure. `unmeasured`: by a claim's name, why it was not measured."""
    why = unmeasured or {}
    judgements = tuple(
        judge(
            each.claim,
            each.spec,
            records.by_experiment.get(each.spec.id, ()),
            floors,
            why.get(each.name),
        )
        for each in chosen
    )
    return Judged(JUDGED_FORMAT, occasion, judgements, records.refused)


def judge_stored(
    checkout: Checkout,
    store: Store,
    words: Sequence[str] = (),
    *,
    replay: bool = False,
    clock: Callable[[], float] = time.time,
) -> Judged:
    """Judge claims by what a results folder holds, now. Raises UnknownNameError, ClaimsError."""
    return judge_with_records(checkout, store, words, replay=replay, clock=clock)[0]


def judge_with_records(
    checkout: Checkout,
    store: Store,
    words: Sequence[str] = (),
    *,
    replay: bool = False,
    clock: Callable[[], float] = time.time,
) -> tuple[Judged, Records]:
    """What `judge_stored` gives, and the records that it read, for their cards."""
    chosen = choose_claims(all_claims(checkout.experiments), words)
    records = read_stored(store, {each.spec.id for each in chosen}, metrics=_asked_for(chosen))
    occasion = occasion_of(checkout, str(store.root), clock(), replay=replay)
    return judge_records(chosen, records, occasion, Floors.in_store(store)), records


def judge_references(
    checkout: Checkout, words: Sequence[str] = (), *, clock: Callable[[], float] = time.time
) -> Judged:
    """Replay the reference records of a checkout, which nobody here has measured."""
    chosen = choose_claims(all_claims(checkout.experiments), words)
    records = read_references(checkout.experiments, {each.spec.id for each in chosen})
    source = "the reference records of the checkout"
    occasion = occasion_of(checkout, source, clock(), replay=True)
    return judge_records(chosen, records, occasion, Floors.in_references(checkout.experiments))


def load_judged(path: Path) -> Judged:
    """Read what was judged. Raises DamagedRecordError for anything else."""
    try:
        data = read_json(path)
    except OSError as error:
        raise DamagedRecordError(f"{path} cannot be read", why=str(error)) from error
    if isinstance(data, dict) and data.get("format") != JUDGED_FORMAT:
        raise DamagedRecordError(
            f"{path} has format {data.get('format')!r} of judgements, this reads {JUDGED_FORMAT}"
        )
    return decode(Judged, data, str(path))


def occasion_of(checkout: Checkout, source: str, now: float, *, replay: bool) -> Occasion:
    """When, by which version and commit, and from where."""
    return Occasion(
        made_utc=now,
        version=__version__,
        git=git_facts(checkout.root),
        replay=replay,
        source=_told(source, checkout.root),
    )


def _told(source: str, root: Path) -> str:
    """A folder as it may be told to anybody: a home names whoever evaluates."""
    path = Path(source)
    if path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    if path.is_relative_to(Path.home()):
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    return source
