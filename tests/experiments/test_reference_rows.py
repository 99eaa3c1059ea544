"""What the lists of reference jobs ask of rows is text that the rows can read: a slip there would
cost a lent GPU's time to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import pytest

from narrowgauge_contract.job import parse_overrides, resolve_all
from narrowgauge_contract.spec import load_spec, load_toml
from narrowgauge_kernels.sparse.shapes import Shape, Tile
from narrowgauge_lab.layers.manual.policies import parse_gradient, parse_policy

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted((ROOT / "benchmarks" / "reference" / "lists").glob("*.toml"))
#: By experiments and parameter, what reads its text.
READ: Dict[Tuple[str, str], Callable[[str], Any]] = {
    ("sparse-kernels", "shape"): Shape.parse,
    ("sparse-kernels", "tile"): lambda text: text == "auto" or Tile.parse(text),
    **{(each, "policy"): parse_policy for each in ("approx-train", "manual-layers", "robustness")},
    **{(each, "gradient"): parse_gradient for each in ("approx-train", "robustness")},
}


def _texts(path: Path) -> Iterator[Tuple[str, str, Any]]:
    for job in load_toml(path)["job"]:
        if "experiment" not in job:
            continue
        spec = load_spec(ROOT / "experiments" / job["experiment"] / "experiment.toml")
        words = [f"{name}={value}" for name, value in job.get("parameters", {}).items()]
        profile = job.get("profile", "short")
        for run in resolve_all(
            spec, parse_overrides(spec, words), profile=profile, target="native", seed=0
        ):
            for row in run.rows:
                for name, value in row.parameters.items():
                    yield spec.id, name, value


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_rows_of_the_reference_lists_can_read_their_parameters(path: Path) -> None:
    for experiment, name, value in sorted(set(_texts(path)), key=str):
        read = READ.get((experiment, name))
        if read is not None:
            read(value)


def test_every_reader_is_of_a_parameter() -> None:
    for experiment, name in READ:
        spec = load_spec(ROOT / "experiments" / experiment / "experiment.toml")
        assert spec.parameters[name].type == "str"
