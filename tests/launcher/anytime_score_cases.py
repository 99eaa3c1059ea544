"""What the tests of anytime scoring share: recorded runs whose rows kept made-up answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from result_cases import host

from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import resolve
from narrowgauge_contract.outcome import InsideFacts, Outcome, Row, SideFile, Status, Validity
from narrowgauge_contract.record import compose
from narrowgauge_contract.spec import parse_spec
from narrowgauge_scores.side_file import RunLogits, Split, write_logits

SPEC: dict[str, Any] = {
    "experiment": {"id": "exits", "title": "Exits", "summary": "For tests.", "headline": []},
    "parameters": {
        "system": {"type": "str", "default": "a", "axis": "row", "help": "Which network."},
    },
    "profiles": {"short": {"repeats": 1}},
    "draw": [{"name": "exits", "kind": "anytime", "title": "Exits"}],
}
MACS = (400_000, 1_500_000, 6_000_000)


def split(
    skill: float = 1.0, *, images: int = 300, exits: int = 3, classes: int = 4, seed: int = 0
) -> Split:
    """Answers that get better from exit to exit; how hard an image is, all seeds share."""
    shared, own = np.random.default_rng(images), np.random.default_rng([seed, 7])
    labels = shared.integers(classes, size=images)
    hard = shared.normal(size=(images, classes))
    signal = np.eye(classes)[labels]
    strength = skill * np.linspace(1.5, 3.0, exits)
    logits = np.stack(
        [hard + s * signal + 0.3 * own.normal(size=hard.shape) for s in strength]
    ).astype(np.float32)
    return Split(logits, labels.astype(np.int64), np.arange(images))


def answers(family: str = "toynet", skill: float = 1.0, **changes: Any) -> RunLogits:
    """A run's answers on CIFAR-10's costs; `images`, `exits`, `seed` and the fields of RunLogits as
    keywords."""
    exits, images = changes.pop("exits", 3), changes.pop("images", 300)
    seed = changes.get("seed", 0)
    macs = changes.pop("macs", MACS[:exits])
    fields: dict[str, Any] = {
        "variant": "",
        "data": "cifar10",
        "seed": seed,
        "test": split(skill, images=images, exits=exits, seed=seed),
        "val": split(skill, images=200, exits=exits, seed=seed + 100),
        "cumulative_macs": np.array(macs, np.int64),
        "direct_macs": np.array(macs, np.int64),
    }
    return RunLogits(family=family, **{**fields, **changes})


def latencies(*milliseconds: float, repeats: int = 9) -> NDArray[np.float64]:
    """[exits, repeats] seconds, a tenth of noise around each."""
    noise = 1.0 + 0.1 * np.random.default_rng(0).random((len(milliseconds), repeats))
    return np.array(milliseconds)[:, np.newaxis] / 1e3 * noise


def recorded(
    root: Path,
    *runs: RunLogits | None,
    number: int = 0,
    reasons: tuple[str, ...] = (),
    source: str = "b" * 64,
    **inside: Any,
) -> RunFolder:
    """A recorded run with a row for each of these answers; None keeps none. `reasons` make its
    rows invalid. `source`: the hash of the code; `inside`: what else the lab saw."""
    names = tuple(chr(ord("a") + place) for place in range(len(runs)))
    run_id = f"20261122T1000{number:02d}Z-exits-{number:06x}"
    job = resolve(
        parse_spec(SPEC), {"system": names}, profile="short", target="cpu", seed=0, run_id=run_id
    )
    folder = Store(root).new_run(job)
    rows = tuple(_row(plan, run, folder, reasons) for plan, run in zip(job.rows, runs, strict=True))
    seen = InsideFacts(
        "3.11.2", "Linux", **{"torch": "2.13.0", "cpu": "EPYC", "threads": 2, **inside}
    )
    outcome = Outcome(
        1, run_id, Status.COMPLETE, 0, rows, seen, source, "c" * 64, 1e9, 1e9 + 190, 190.0
    )
    write_json_atomic(folder.outcome_path, outcome)
    folder.write_record(compose(job, outcome, (), host()))
    return folder


def _row(plan: Any, run: RunLogits | None, folder: RunFolder, reasons: tuple[str, ...]) -> Row:
    side_files: tuple[SideFile, ...] = ()
    if run is not None:
        path = folder.out / f"row-{plan.index}" / "logits.npz"
        path.parent.mkdir(parents=True)
        write_logits(path, run)
        name = f"row-{plan.index}/logits.npz"
        side_files = (SideFile(name, sha256_file(path), path.stat().st_size),)
    return Row(
        index=plan.index, repeat=plan.repeat, seed=plan.seed, parameters=plan.parameters,
        status=Status.COMPLETE, validity=Validity(not reasons, reasons), side_files=side_files,
    )  # fmt: skip


def with_samples(run: RunLogits, samples: NDArray[np.int64]) -> RunLogits:
    """The same answers of other test images."""
    return dataclasses.replace(run, test=dataclasses.replace(run.test, samples=samples))
