"""The notebook of an experiment, run cell by cell by the Python that experiments run in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 10), reason="what makes notebooks is the launcher's, which needs 3.10"
)

#: In place of matplotlib, which the image for runs lacks: takes every call, and counts pictures.
PYPLOT = """
import sys
class Anything:
    def __getattr__(self, name): return lambda *words, **named: Anything()
    def __getitem__(self, number): return self
    def __iter__(self): return iter([self, self])
def subplots(rows=1, columns=1, **named):
    panels = [[Anything() for _ in range(columns)]]
    return Anything(), (panels if "squeeze" in named else panels[0][0])
def show(): print("picture shown")
"""
EXECUTOR = """
import json, sys
namespace = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile(cell["source"], cell["id"], "exec"), namespace)
"""


def _environment(tmp_path: Path) -> Dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path / "packages")])
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}


def _notebook(tmp_path: Path, experiment: str) -> Path:
    """Made by a process of its own: this one must not import the launcher."""
    words = [str(tmp_path / "results"), str(ROOT / "experiments"), str(tmp_path)]
    code = f"""
from pathlib import Path
from narrowgauge.catalog import load_experiment
from narrowgauge.notebook import Locations, notebook_of, notebook_text
spec = load_experiment(Path({str(ROOT / "experiments")!r}), {experiment!r})
print(notebook_text(notebook_of(spec, "", Locations(*{words!r}))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environment(tmp_path), stdout=subprocess.PIPE, check=True
    )
    path = tmp_path / f"{experiment}.ipynb"
    path.write_bytes(done.stdout)
    return path


def test_mnist_runs_from_its_notebook(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pyplot.py").write_text(PYPLOT)
    path = _notebook(tmp_path, "mnist")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    settings = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    settings["source"] += (
        '\nDEVICE = "cpu"\nparameters.update(data="synthetic", precision=["fp32"], train_limit=256)'
    )
    path.write_text(json.dumps(notebook), encoding="utf-8")
    (tmp_path / "executor.py").write_text(EXECUTOR)

    done = subprocess.run(
        [sys.executable, "executor.py", path.name],
        cwd=str(tmp_path),
        env=_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "complete, 1 of 1 rows valid" in done.stdout
    assert "    test_accuracy: " in done.stdout
    assert "    images_per_second: " in done.stdout
    assert done.stdout.count("picture shown") == 3
    (record,) = (tmp_path / "results" / "mnist").glob("*/record.json")
    assert json.loads(record.read_text())["parameters"]["train_limit"] == 256
