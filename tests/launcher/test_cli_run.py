"""The command line: what a user got wrong, what is missing on the host, and whole native runs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_lab
import pytest

from narrowgauge import environment
from narrowgauge import launch as launch_module
from narrowgauge.cli.app import TRACEBACK_VARIABLE, run_program
from narrowgauge.cli.options import data_root
from narrowgauge.machine import Host
from narrowgauge.store import Store
from narrowgauge_contract.errors import ExitCode

NO_ENGINE = "unix:///nonexistent/docker.sock"


class Cli:
    """Runs command lines in this process, on the tiny checkout."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capture = capture
        self.out = ""

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code and everything that was said to the user."""
        errors = io.StringIO()
        self._capture.readouterr()
        code = run_program([*words, "--project", str(self.root)], os.environ, errors)
        captured = self._capture.readouterr()
        self.out = captured.out
        return code, captured.err + errors.getvalue()


@pytest.fixture
def cli(
    tiny_checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """No engine answers, the lock is the test's own, and the lab is the fake one."""
    monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
    monkeypatch.setenv("NARROWGAUGE_LOCK", str(tmp_path / "lock"))
    fake_lab.install(tmp_path / "fake")
    target = tiny_checkout / "src" / "narrowgauge_lab"
    target.rmdir()
    target.symlink_to(tmp_path / "fake" / "narrowgauge_lab")
    contract = tiny_checkout / "src" / "narrowgauge_contract"
    contract.rmdir()
    contract.symlink_to(tmp_path / "fake" / "narrowgauge_contract")
    monkeypatch.setattr(environment, "ensure_lab_python", lambda *a, **k: Path(sys.executable))
    return Cli(tiny_checkout, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "tinny"), ["unknown experiment 'tinny'", "did you mean 'tiny'? Known: tiny"]),
        (("run", "tiny", "--on", "destop"), ["unknown target 'destop'", "'desktop'", "jetson"]),
        (("run", "tiny", "--profile", "smok"), ["unknown profile 'smok'", "paper, short, smoke"]),
        (("run", "tiny", "--executor", "doker"), ["unknown executor", "'docker'", "auto"]),
        (("run", "tiny", "-p", "epoch=1"), ["unknown parameter 'epoch'", "'epochs'", "precision"]),
        (("run", "tiny", "-p", "epochs"), ["is not name=value"]),
        (("run", "tiny", "-p", "epochs=1", "-p", "epochs=2"), ["given twice"]),
        (("run", "tiny", "-p", "epochs=two"), ["not of type int", "epochs: int >= 1 <= 100"]),
        (("run", "tiny", "-p", "epochs=0"), ["below 1", "How often the training set is seen"]),
        (("run", "tiny", "-p", "precision=bf15"), ["did you mean 'bf16'?", "one of fp32, bf16"]),
        (("run", "tiny", "--seed", "x"), ["--seed"]),
        (("run", "tiny", "--sede", "1"), ["--sede"]),
        (("run",), ["Missing argument 'EXPERIMENT'"]),
        (("rnu", "tiny"), ["rnu"]),
        (("plan", "tinny"), ["did you mean 'tiny'?"]),
        (("attach", "nothing"), ["unknown run 'nothing'"]),
        (("shell", "--executor", "dokcer"), ["unknown executor"]),
    ],
)
def test_what_a_user_got_wrong_is_exit_2(cli: Cli, words: tuple[str, ...], said: list[str]) -> None:
    code, told = cli(*words)

    assert code == ExitCode.USAGE
    for part in said:
        assert part in told
    assert not (cli.root / "results").exists()


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    errors = io.StringIO()

    assert run_program(["list", "--project", str(tmp_path)], {}, errors) == ExitCode.USAGE
    assert "is not a checkout" in errors.getvalue()


def test_an_experiment_file_that_is_wrong_is_named(cli: Cli) -> None:
    path = cli.root / "experiments" / "tiny" / "experiment.toml"
    path.write_text(path.read_text().replace("summary =", "sumary ="))
    code, told = cli("run", "tiny")

    assert code == ExitCode.USAGE
    assert "did you mean 'summary'?" in told


def test_docker_never_turns_into_native(cli: Cli) -> None:
    code, told = cli("run", "tiny", "--executor", "docker")

    assert code == ExitCode.DOCKER_UNAVAILABLE
    assert "its socket does not exist" in told
    assert "--executor native" in told
    assert not (cli.root / "results" / "tiny").exists()


def test_left_alone_it_goes_native_and_says_why_in_one_line(cli: Cli) -> None:
    code, told = cli("run", "tiny", "-p", "width=0")

    assert code == ExitCode.OK, told
    reasons = [line for line in told.splitlines() if line.startswith("native: ")]
    assert len(reasons) == 1
    assert "no Docker engine answers" in reasons[0]
    record = Store(cli.root / "results").find("latest").record()
    assert record.target == "native"


def test_a_target_for_other_hardware_is_refused_first(cli: Cli) -> None:
    code, told = cli("run", "tiny", "--on", "jetson")

    assert code == ExitCode.NOT_APPLICABLE
    assert "target 'jetson' cannot work on this host" in told


def test_json_is_the_only_thing_on_standard_output(cli: Cli) -> None:
    code, _ = cli("run", "tiny", "--executor", "native", "-p", "width=0", "--json")
    said = json.loads(cli.out)["runs"]

    assert code == ExitCode.OK
    assert said[0]["status"] == "complete"
    assert said[0]["valid_rows"] == 1
    assert Path(said[0]["folder"], "record.json").is_file()


def test_a_list_along_the_run_axis_makes_runs_and_the_worst_is_the_exit_code(cli: Cli) -> None:
    code, told = cli("run", "tiny", "--executor", "native", "-p", "width=2,0", "--json")
    said = json.loads(cli.out)["runs"]

    assert code == ExitCode.RUN_FAILED, told
    assert [run["exit_code"] for run in said] == [30, 0]


def test_runs_that_a_late_stop_left_out_are_not_a_success(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the first run is over already, and went well."""
    monkeypatch.setattr(
        launch_module, "draw_quietly", lambda *a: os.kill(os.getpid(), signal.SIGINT)
    )
    code, told = cli("run", "tiny", "--executor", "native", "-p", "width=0,2", "--json")

    assert [run["exit_code"] for run in json.loads(cli.out)["runs"]] == [0]
    assert code == ExitCode.INTERRUPTED, told
    assert "1 of 2 runs were not started" in told


def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "relative")

    assert data_root(None).is_relative_to(Path.home())


def test_unwritable_results_are_told_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "results")
    code, told = cli("run", "tiny", "--executor", "native", "--results", place)

    assert code == ExitCode.RESULTS_UNWRITABLE
    assert "--results DIR" in told


def test_two_at_once_are_one_too_many(cli: Cli, tmp_path: Path) -> None:
    from narrowgauge.lock import Holder, hold

    first = Holder("20261121T000000Z-tiny-first", str(tmp_path), os.getpid())
    lock = tmp_path / "lock"
    with hold(lock, first, still_running=lambda other: False, wait=False, note=print):
        code, told = cli("run", "tiny", "--executor", "native")

    assert code == ExitCode.BUSY
    assert "20261121T000000Z-tiny-first" in told


def test_attach_says_that_a_run_is_recorded(cli: Cli) -> None:
    cli("run", "tiny", "--executor", "native", "-p", "width=0")
    code, told = cli("attach", "latest")

    assert code == ExitCode.OK
    assert "is already recorded" in told


def test_an_unexpected_error_says_where_its_trace_is(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*words: object, **options: object) -> Path:
        raise ValueError("a bug")

    monkeypatch.setattr(environment, "ensure_lab_python", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, told = cli("run", "tiny", "--executor", "native")
    assert code == ExitCode.INTERNAL
    assert "unexpected ValueError: a bug" in told
    trace = next(tmp_path.glob("narrowgauge-*.trace"))
    assert str(trace) in told
    assert "Traceback" in trace.read_text()

    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert "Traceback" in cli("run", "tiny", "--executor", "native")[1]


def test_plan_starts_nothing_and_asks_no_engine(cli: Cli) -> None:
    code, told = cli("plan", "tiny", "-p", "precision=fp32,bf16")

    assert code == ExitCode.OK, told
    assert cli.out.startswith("docker run \\\n  --detach")
    assert '"precision": [' in cli.out
    assert not (cli.root / "results").exists()


def test_plan_for_scripts(cli: Cli) -> None:
    cli("plan", "tiny", "-p", "width=1,2", "--json")
    docker = json.loads(cli.out)
    cli("plan", "tiny", "--executor", "native", "--json")
    native = json.loads(cli.out)

    assert [run["job"]["parameters"]["width"] for run in docker] == [1, 2]
    assert docker[0]["create"]["HostConfig"]["ReadonlyRootfs"] is True
    assert native[0]["job"]["target"] == "native"
    assert "-m narrowgauge_lab run --job" in native[0]["command"]


def test_results_that_cannot_be_written_are_refused_before_anything_is_prepared(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(*_: object) -> Path:
        raise AssertionError("an environment was made for a run that cannot be kept")

    monkeypatch.setattr("narrowgauge.environment.ensure_lab_python", prepared)
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "results")
    code, told = cli("run", "tiny", "--executor", "native", "--results", place)

    assert code == ExitCode.RESULTS_UNWRITABLE
    assert "is not a folder" in told


def test_list_shows_experiments_and_targets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli("list")[0] == ExitCode.OK
    assert "Tiny" in cli.out
    cli("list", "--json")
    said = json.loads(cli.out)

    assert said["experiments"][0]["id"] == "tiny"
    assert said["experiments"][0]["profiles"]["smoke"]["minutes"] == 0.1
    assert {target["name"] for target in said["targets"]} >= {"cpu", "jetson"}


LAUNCHER = """
import signal, sys
{prelude}
from pathlib import Path
from narrowgauge import environment
environment.ensure_lab_python = lambda *a, **k: Path(sys.executable)
from narrowgauge.cli.app import main
main()
"""


def launch(cli: Cli, width: int, prelude: str = "") -> subprocess.Popen[str]:
    """`narrowgauge run` as a process of its own, once the lab has measured something."""
    code = LAUNCHER.format(prelude=prelude)
    words = ["run", "tiny", "--executor", "native", "-p", f"width={width}", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--project", str(cli.root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = lambda: list((cli.root / "results").glob("tiny/*/out/events.jsonl"))  # noqa: E731
    until(lambda: bool(events()) and "metric" in events()[0].read_text())
    return process


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it did not happen in 120 s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "prelude"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        # What `narrowgauge run … &` in a script inherits.
        (signal.SIGINT, "signal.signal(signal.SIGINT, signal.SIG_IGN)"),
    ],
)
def test_a_signal_stops_the_lab_and_keeps_the_record(
    cli: Cli, number: signal.Signals, prelude: str
) -> None:
    process = launch(cli, fake_lab.SLOW, prelude)
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)

    assert process.returncode == ExitCode.INTERRUPTED, errors
    said = json.loads(out)["runs"][0]
    assert said["status"] == "interrupted"
    record = Store(cli.root / "results").find("latest").record()
    assert record.rows[0].metric("loss") is not None


def test_a_killed_launcher_leaves_the_run_for_attach(cli: Cli) -> None:
    process = launch(cli, fake_lab.SLOW)
    process.kill()
    process.communicate()
    folder = Store(cli.root / "results").find("latest")

    code, told = cli("run", "tiny", "--executor", "native", "-p", "width=0")
    assert code == ExitCode.BUSY, told  # it still measures, launcher or not
    assert folder.name in told

    os.kill(json.loads(folder.handle_path.read_text())["identity"]["pid"], signal.SIGTERM)
    code, told = cli("attach", folder.name)
    assert code == ExitCode.INTERRUPTED, told
    assert folder.record().rows[0].metric("loss") is not None


def test_a_broken_driver_never_becomes_a_run_on_the_cpu_without_a_word(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Host(architecture="amd64", driver_problem="Driver/library version mismatch")
    monkeypatch.setattr("narrowgauge.machine.probe_host", lambda: broken)

    code, said = cli("run", "tiny")

    assert code == ExitCode.NOT_APPLICABLE
    assert "Driver/library version mismatch" in said
    assert "--on cpu" in said
