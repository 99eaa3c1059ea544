"""Notebooks made from declarations: their form, their cells against a record, and where they go."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from result_cases import SPEC, recorded

from narrowgauge.catalog import experiment_names, load_experiment
from narrowgauge.checkout import find_checkout
from narrowgauge.container import create_body, docker_run_words
from narrowgauge.errors import BadValueError, Busy, UnknownNameError
from narrowgauge.images.notebook import notebook_image_name
from narrowgauge.jupyter import _require_free, place_notebook, write_notebook
from narrowgauge.launch import World
from narrowgauge.machine import Host
from narrowgauge.notebook import Locations, notebook_of, notebook_text
from narrowgauge.plan import NotebookServer, User, plan_notebook
from narrowgauge.targets import Accelerator, load_targets
from narrowgauge_contract.record import ImageFacts
from narrowgauge_contract.spec import parse_spec

ROOT = Path(__file__).parents[2]
EXPERIMENTS = experiment_names(ROOT / "experiments")

#: The toy's lab: it hands back a run that is there already, and says what it was asked for.
LAB = """
import json, shutil, sys
words = sys.argv[1:]
print("asked", json.dumps(words))
results = words[words.index("--results") + 1]
place = results + "/toy/" + {name!r}
if {record}:
    shutil.copytree({run!r}, place)
    print("in all, not a folder")
    print("in", place)
    shutil.copytree({run!r}, results + "/toy/99990101T000000Z-of-somebody-else")
sys.exit({code})
"""
#: Runs cells one after another in one namespace, as a kernel does, and keeps every picture.
EXECUTOR = """
import json, sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
count = 0
def show():
    global count
    for number in plt.get_fignums():
        picture = plt.figure(number)
        picture.savefig(f"picture-{count}.png")
        print("ticks", [tick.get_text() for tick in picture.axes[0].get_xticklabels()])
        count += 1
    plt.close("all")
plt.show = show
cells = json.load(open(sys.argv[1]))["cells"]
namespace = {"__name__": "__main__"}
for cell in cells:
    if cell["cell_type"] == "code":
        exec(compile(cell["source"], cell["id"], "exec"), namespace)
"""


def _whole() -> dict[str, Any]:
    """The toy with a picture of every kind, and closing lines."""
    body: dict[str, Any] = copy.deepcopy(SPEC)
    body["parameters"]["precision"]["choices"] += ["slow", "fast"]
    body["draw"][0]["ticks"] = {"fact": "passes"}
    body["draw"].append(
        {
            "name": "ladder", "kind": "ladder", "title": "Ladder", "parameter": "precision",
            "metric": "images_per_second", "order": ["fp32", "bf16"], "ends": ["slow", "fast"],
            "names": {"fp32": "full"},
        }
    )  # fmt: skip
    body["draw"].append(
        {
            "name": "parts", "kind": "stacked", "title": "Parts", "parameter": "precision",
            "metrics": ["images_per_second", "nothing_measured_this"], "x": "per second",
        }
    )  # fmt: skip
    body["summary"] = {
        "parameter": "precision", "metric": "images_per_second", "order": ["bf16", "fp32"],
        "baseline": "fp32", "better": "more", "line": "{name} is {ratio:.1f} times as fast",
    }  # fmt: skip
    return body


WHOLE = _whole()


def _code(notebook: Mapping[str, Any]) -> list[str]:
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _toy(**more: Any) -> Any:
    return parse_spec({**SPEC, **more})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_makes_a_notebook(name: str) -> None:
    spec = load_experiment(ROOT / "experiments", name)
    page = ROOT / "experiments" / name / "README.md"
    readme = page.read_text() if page.is_file() else ""

    notebook = notebook_of(spec, readme)

    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
    for source in _code(notebook):
        ast.parse(source, feature_version=(3, 8))  # the desktop's Python
    settings: dict[str, Any] = {}
    exec(_code(notebook)[0], settings)
    assert list(settings["parameters"]) == list(spec.parameters)
    assert set(settings["parameters"].values()) == {None}
    assert notebook_text(notebook) == notebook_text(notebook_of(spec, readme))


def test_names_that_python_has_taken_are_mended() -> None:
    body = SPEC["parameters"]["epochs"]
    spec = _toy(parameters={"lambda": body, "per-layer": body, "parameters": body}, draw=[],
                experiment={**SPEC["experiment"], "headline": []})  # fmt: skip
    settings: dict[str, Any] = {}

    exec(_code(notebook_of(spec, ""))[0], settings)

    assert settings["parameters"] == {"lambda": None, "per-layer": None, "parameters": None}
    assert {"lambda_", "per_layer", "parameters_"} <= set(settings)


def test_the_readme_is_a_part_of_it_one_level_down() -> None:
    readme = (
        "# toy\n\n<!-- table: x -->\n| a |\n<!-- /table -->\n```sh\n# not a heading\n```\n## b\n"
    )

    last = notebook_of(_toy(), readme)["cells"][-1]

    assert last["cell_type"] == "markdown"
    assert last["source"] == "## toy\n\n| a |\n```sh\n# not a heading\n```\n### b"


def _execute(
    tmp_path: Path, code: int = 0, settings: str = "", record: bool = True
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Every cell of the toy's notebook, in a process of its own, with a lab that is a stand-in."""
    run = recorded(tmp_path / "made").path
    package = tmp_path / "packages" / "narrowgauge_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        LAB.format(run=str(run / "out"), name=run.name, code=code, record=record)
    )
    whole = json.loads((run / "record.json").read_text())
    whole["rows"][0]["facts"]["profiled"] = "torch"
    for row in whole["rows"]:
        row["facts"]["passes"] = ["first", "second", "third"]
    (run / "out" / "record.json").write_text(json.dumps({**whole, "spec": WHOLE}))
    results = tmp_path / "results"
    notebook = notebook_of(
        parse_spec(WHOLE), "", Locations(str(results), "/somewhere", "/data sets")
    )
    notebook["cells"][2]["source"] += f"\n{settings}"
    (tmp_path / "toy.ipynb").write_text(notebook_text(notebook))
    (tmp_path / "executor.py").write_text(EXECUTOR)
    done = subprocess.run(
        [sys.executable, "executor.py", "toy.ipynb"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, results


def test_its_cells_run_the_lab_and_show_what_it_measured(tmp_path: Path) -> None:
    settings = 'parameters.update(precision=["fp32", "bf16"], epochs=3)\nPROFILE = "short"'

    done, results = _execute(tmp_path, settings=settings)

    assert done.returncode == 0, done.stderr
    asked = next(line for line in done.stdout.splitlines() if line.startswith("asked"))
    assert json.loads(asked.partition(" ")[2]) == [
        "run", "toy", "--profile", "short", "--seed", "0", "--device", "auto",
        "-p", "precision=fp32,bf16", "-p", "epochs=3",
        "--results", str(results), "--experiments", "/somewhere", "--data", "/data sets",
    ]  # fmt: skip
    assert "profiled (torch): timings include the profiler" in done.stdout
    assert "precision=fp32\n    accuracy: 99.1 % (99 to 99.2; n=3)" in done.stdout
    assert "precision=bf16\n    accuracy: 98.1 % (98 to 98.2; n=3)" in done.stdout
    assert "fp32 is 1.0 times as fast" in done.stdout
    assert "ticks ['first', 'second', 'third']" in done.stdout
    pictures = sorted(tmp_path.glob("picture-*.png"))
    assert len(pictures) == 6, "loss, speed, ladder, parts, a confusion matrix of each precision"
    assert all(path.stat().st_size > 5000 for path in pictures)


def test_a_lab_that_fails_stops_the_notebook_there(tmp_path: Path) -> None:
    done, _ = _execute(tmp_path, code=31, record=False)

    assert done.returncode == 1
    assert "RuntimeError: the lab ended with exit code 31" in done.stderr


def test_a_run_with_rows_that_failed_is_shown_all_the_same(tmp_path: Path) -> None:
    """And it is the run that the lab named, not the last folder."""
    done, results = _execute(tmp_path, code=37, settings=f"print('{'-' * 9}')")

    assert done.returncode == 0, done.stderr
    assert "exit code 37: not every row went well" in done.stdout
    assert "precision=fp32\n    accuracy: 99.1" in done.stdout
    assert (results / "toy" / "99990101T000000Z-of-somebody-else").is_dir()


@pytest.fixture
def world(tiny_checkout: Path) -> tuple[World, list[str]]:
    said: list[str] = []
    return World(find_checkout(tiny_checkout), {}, Host("amd64"), said.append), said


def test_it_is_written_once_and_never_over_somebodys_work(
    world: tuple[World, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "tiny.ipynb"

    write_notebook(world[0], "tiny", path)

    assert json.loads(path.read_text())["nbformat"] == 4
    with pytest.raises(BadValueError, match="there already"):
        write_notebook(world[0], "tiny", path)
    with pytest.raises(UnknownNameError):
        write_notebook(world[0], "tinny", tmp_path / "x.ipynb")
    with pytest.raises(BadValueError, match="cannot write"):
        write_notebook(world[0], "tiny", path / "below-a-file.ipynb")


def test_a_notebook_that_was_worked_in_stays(
    world: tuple[World, list[str]], tmp_path: Path
) -> None:
    spec = load_experiment(world[0].checkout.experiments, "tiny")
    place = place_notebook(world[0], spec, tmp_path)
    assert place == "notebooks/tiny.ipynb"
    assert place_notebook(world[0], spec, tmp_path) == place
    assert world[1] == []

    (tmp_path / place).write_text("{}")

    assert place_notebook(world[0], spec, tmp_path) == place
    assert (tmp_path / place).read_text() == "{}"
    assert "was changed or run, and stays" in world[1][0]


def test_one_that_nobody_touched_follows_its_declaration(
    world: tuple[World, list[str]], tmp_path: Path
) -> None:
    folder = world[0].checkout.experiments
    spec = load_experiment(folder, "tiny")
    path = tmp_path / place_notebook(world[0], spec, tmp_path)
    saved = json.loads(path.read_text())
    for cell in saved["cells"]:  # as JupyterLab saves what it merely opened
        cell["source"] = cell["source"].splitlines(keepends=True)
        cell["metadata"] = {"tags": []}
    saved["metadata"]["language_info"]["version"] = "3.12.1"
    path.write_text(json.dumps(saved))
    (folder / "tiny" / "README.md").write_text("# Now it says more\n")

    place_notebook(world[0], spec, tmp_path)

    assert "Now it says more" in path.read_text()
    assert world[1] == []


@pytest.mark.parametrize(
    "change",
    [
        {"source": "SEED = 1"},
        {"execution_count": 1},
        {"outputs": [{"output_type": "stream", "name": "stdout", "text": ["x"]}]},
    ],
)
def test_one_that_was_edited_or_run_does_not(
    world: tuple[World, list[str]], tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = world[0].checkout.experiments
    spec = load_experiment(folder, "tiny")
    path = tmp_path / place_notebook(world[0], spec, tmp_path)
    saved = json.loads(path.read_text())
    next(cell for cell in saved["cells"] if cell["cell_type"] == "code").update(change)
    path.write_text(json.dumps(saved))
    (folder / "tiny" / "README.md").write_text("# Now it says more\n")

    place_notebook(world[0], spec, tmp_path)

    assert json.loads(path.read_text()) == saved
    assert "was changed" in world[1][0]


def test_the_image_of_somebody_else_is_named_by_its_digest() -> None:
    target = load_targets(ROOT / "docker/targets.toml")["cpu"]
    image = ImageFacts("theirs", "sha256:0123ab", "unknown", None, "")

    assert notebook_image_name(target, image) == "narrowgauge/cpu-notebook:0123ab"
    tagged = dataclasses.replace(image, content_tag="t")
    assert notebook_image_name(target, tagged) == "narrowgauge/cpu-notebook:t"


def _plan(**more: Any) -> Any:
    places: dict[str, Any] = {
        "results": Path("/r"), "experiments": Path("/e"), "data": Path("/d"), **more
    }  # fmt: skip
    return plan_notebook(
        load_targets(ROOT / "docker/targets.toml")["cpu"],
        name="narrowgauge-notebook-x",
        image="narrowgauge/cpu-notebook:t",
        cache="cache",
        user=User(1000, 1000),
        accelerator=Accelerator.NONE,
        server=NotebookServer(9999, "secret"),
        **places,
    )


def test_its_container_is_a_runs_but_for_a_port_of_the_loopback() -> None:
    body = create_body(_plan())
    host = body["HostConfig"]

    assert host["PortBindings"] == {"8888/tcp": [{"HostIp": "127.0.0.1", "HostPort": "9999"}]}
    assert host["NetworkMode"] == "narrowgauge-notebook-x"
    assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert [(m["Target"], m.get("ReadOnly")) for m in host["Mounts"]] == [
        ("/results", False), ("/experiments", True), ("/data", True), ("/cache", None),
    ]  # fmt: skip
    assert "secret" not in " ".join(body["Cmd"]), "every user of the host can read a command line"
    assert "JUPYTER_TOKEN=secret" in body["Env"]
    assert [m["Target"] for m in create_body(_plan(data=None))["HostConfig"]["Mounts"]] == [
        "/results", "/experiments", "/cache",
    ]  # fmt: skip


def test_the_line_and_the_body_say_the_same_of_the_port() -> None:
    words = docker_run_words(_plan())

    assert words[words.index("--publish") + 1] == "127.0.0.1:9999:8888"


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("", "http://127.0.0.1:9999/lab?token=secret"),
        (
            "notebooks/a b.ipynb",
            "http://127.0.0.1:9999/lab/tree/notebooks/a%20b.ipynb?token=secret",
        ),
    ],
)
def test_the_address_leads_into_the_notebook(path: str, url: str) -> None:
    server = NotebookServer(9999, "secret")

    assert server.url(path) == url
    assert "secret" not in repr(server)


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Busy, match=f"port {port} "):
            _require_free(port)
