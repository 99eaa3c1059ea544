"""scripts/jetson.sh and desktop.sh, under dash and busybox, on boards that are made up: the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import board as boards
import pytest
from board import ROOT, Board

from narrowgauge.container import Bind, ContainerPlan, docker_run_words
from narrowgauge.images.content import content_tag
from narrowgauge.plan import cache_volume
from narrowgauge.targets import TARGETS_FILE, Accelerator, load_targets
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.hashing import sha256_file


def test_a_run_on_a_jetson(board: Board) -> None:
    done = board.run("jetson.sh", "resnet", "-p", "batch=32", "--profile", "short")

    assert done.returncode == 0, done.stderr
    assert "L4T 35.2.1: target jetson" in done.stderr
    (words,) = board.runs()
    assert words[words.index("--runtime") + 1] == "nvidia"
    image = words.index("run", 1)
    assert words[image:] == [
        *("run", "resnet", "--experiments", "/experiments", "--data", "/data"),
        *("--results", "/results", "--host-facts", "/host.json"),
        *("-p", "batch=32", "--profile", "short"),
    ]
    tag = content_tag(board.checkout, load_targets(ROOT / TARGETS_FILE)["jetson"])
    assert words[image - 1] == f"narrowgauge/jetson:{tag}"
    env = (board.checkout / ".env").read_text()
    assert f"NARROWGAUGE_UID={os.getuid()}\n" in env
    assert "NARROWGAUGE_TARGET=jetson\n" in env


@pytest.mark.parametrize(
    ("machine", "way"),
    [
        ("jetson", Accelerator.NVIDIA_RUNTIME),
        ("desktop", Accelerator.DEVICE_REQUEST),
        ("cdi", Accelerator.CDI),
    ],
)
def test_the_container_is_the_one_that_the_launcher_would_make(
    dash: Board, machine: str, way: Accelerator
) -> None:
    """Word by word, from `docker run` to the image; the command differs."""
    if machine != "jetson":
        boards.desktop(dash, cards="9.0")
        dash.answer("kind", "desktop-next|amd64\n")
    if machine == "cdi":
        dash.answer("info", boards.info(dash, "28.1.0", "runc", cdi=True))
        dash.place("etc/cdi/nvidia.yaml", "")
    script = "jetson.sh" if machine == "jetson" else "desktop.sh"
    assert dash.run(script, "mnist").returncode == 0
    (words,) = dash.runs()
    words.remove("--sig-proxy=false")  # the launcher's is detached: nobody passes signals on
    name = words[words.index("--name") + 1]
    command = words.index("run", 1)
    mounted = next(word for word in words if "target=/host.json" in word)

    target = "jetson" if machine == "jetson" else "desktop-next"
    plan = ContainerPlan(
        name=name,
        image=words[command - 1],
        command=(),
        user=f"{os.getuid()}:{os.getgid()}",
        binds=(
            Bind(mounted.split(",")[1].removeprefix("source="), "/host.json", True),
            Bind(str(dash.results), "/results", False),
            Bind(str(dash.checkout / "experiments"), "/experiments", True),
            Bind(str(dash.data), "/data", True),
        ),
        cache_volume=cache_volume(target, "0123456789abcdef", os.getuid()),
        accelerator=way,
        environment=(("HOME", "/cache"), ("LOGNAME", "narrowgauge"), ("USER", "narrowgauge")),
        labels=(
            ("io.narrowgauge.run", name),
            ("io.narrowgauge.experiment", "mnist"),
            ("io.narrowgauge.folder", str(dash.results)),
        ),
    )
    assert ["docker", *words[:command]] == list(docker_run_words(plan, mode=()))


@pytest.mark.parametrize("script", ["jetson.sh", "desktop.sh"])
def test_a_run_says_a_line_a_step_and_no_more(board: Board, script: str) -> None:
    """What a host lacks is asked for without a word: a PC has no device tree."""
    if script == "desktop.sh":
        boards.desktop(board)
        (board.system / "proc/device-tree/model").unlink()

    done = board.run(script)

    first, second, third = done.stderr.splitlines()
    assert ": target " in first
    assert second.startswith("running mnist in narrowgauge/")
    assert third.startswith("results: ")


def test_the_groups_of_a_jetsons_device_files_are_given(board: Board) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file another group")
    board.place("dev/nvmap", "")
    os.chown(board.system / "dev/nvmap", 0, 44)

    board.run("jetson.sh")

    (words,) = board.runs()
    assert words[words.index("--group-add") + 1] == "44"
    note = json.loads((board.fake / "host.json").read_text(encoding="utf-8"))
    assert note["exceptions"] == ["device groups 44"]


@pytest.mark.parametrize("code", [0, 30, 33])
def test_the_labs_exit_code_is_the_scripts(board: Board, code: int) -> None:
    board.answer("code", f"{code}\n")

    done = board.run("jetson.sh")

    assert done.returncode == code
    assert f"results: {board.results}/mnist/1" in done.stderr


def test_a_run_that_was_killed_for_memory_is_recorded_and_said(board: Board) -> None:
    board.answer("code", "137\n")
    board.answer("oom", "true\n")
    board.answer("no-record")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.OUT_OF_MEMORY
    saved = board.runs()[-1]
    assert saved[saved.index("record") :] == [
        *("record", "--out", "/results/mnist/1", "--host-facts", "/host.json", "--out-of-memory")
    ]


def test_a_run_that_was_killed_otherwise_is_recorded_as_such(board: Board) -> None:
    board.answer("code", "137\n")
    board.answer("no-record")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.KILLED
    assert board.runs()[-1][-1] == "/host.json"


def test_a_container_that_docker_does_not_start(board: Board) -> None:
    board.answer("code", "125\n")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.CONTAINER_REFUSED
    assert any(call[:2] == ["rm", "--force"] for call in board.calls())


def test_a_signal_stops_the_container_and_waits_for_its_record(board: Board) -> None:
    board.answer("long")
    process = board.start("jetson.sh", "mnist")
    board.wait_for("running")

    boards.terminate(process)
    _, err = process.communicate(timeout=300)

    assert process.returncode == ExitCode.INTERRUPTED, err
    assert any(call[:3] == ["stop", "-t", "30"] for call in board.calls())
    assert "results: " in err


def test_a_signal_before_there_is_a_container_stops_the_client(board: Board) -> None:
    board.answer("early")
    process = board.start("jetson.sh", "mnist")
    board.wait_for("running")

    boards.terminate(process)
    process.communicate(timeout=60)  # by itself the client would end after 120 s

    assert process.returncode == ExitCode.INTERRUPTED
    assert any(call[:2] == ["rm", "--force"] for call in board.calls())


def test_a_run_that_began_meanwhile_is_not_taken_for_this_one(board: Board) -> None:
    """The lab's last line names its own folder."""
    board.answer("log", "in /results/mnist/0\n")

    done = board.run("jetson.sh")

    assert f"results: {board.results}/mnist/0\n" in done.stderr


def test_a_dry_run_prints_the_line_and_starts_nothing(board: Board) -> None:
    (board.fake / "there").unlink()

    done = board.run("jetson.sh", "--dry-run", "mnist", "-p", "odd=a b'c")

    assert done.returncode == 0
    assert board.runs() == []
    assert not any(call[0] == "build" for call in board.calls())
    assert not (board.checkout / ".env").exists()
    assert not board.results.exists()
    assert done.stdout.startswith("docker run --name narrowgauge-mnist-")
    words = done.stdout.strip().removeprefix("docker ")
    again = subprocess.run(
        ["sh", "-c", f'for word in {words}; do echo "[$word]"; done'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[odd=a b'c]" in again.stdout


def test_a_dry_run_builds_loads_fetches_and_writes_nothing(board: Board) -> None:
    (board.fake / "there").unlink()
    shutil.rmtree(board.data)
    file = board.folder / "jetson.tar"
    file.write_text("layers")
    body = {"image": "narrowgauge/jetson:feed", "sha256": sha256_file(file), "content": "feed"}
    Path(f"{file}.json").write_text(json.dumps(body))

    for words in ([], ["--build"], ["--load", str(file)]):
        done = board.run("jetson.sh", "--dry-run", *words, "mnist")
        assert done.returncode == 0, done.stderr
        assert " first\n" in done.stderr
        assert re.search(r"source=narrowgauge-cache-jetson-[0-9a-f]+-[0-9]+,", done.stdout)
    assert {call[0] for call in board.calls()} == {"info", "image"}
    assert not (board.checkout / ".env").exists()
    assert not board.data.exists()


def test_odd_words_reach_the_lab_as_they_are(board: Board) -> None:
    words = ["-p", "a=$HOME `id` \"x\" \\ 'y'", "-p", "b=*", "-p", "c="]

    assert board.run("jetson.sh", "mnist", *words).returncode == 0

    (call,) = board.runs()
    assert call[-len(words) :] == words


def test_an_experiment_that_is_not_there(board: Board) -> None:
    for name in ("resnett", "../experiments/mnist", "mnist/", "."):
        done = board.run("jetson.sh", name)
        assert done.returncode == ExitCode.USAGE
        known = [path.parent.name for path in sorted(ROOT.glob("experiments/*/experiment.toml"))]
        assert f"one of: {' '.join(known)}" in done.stderr
    assert board.calls() == []


@pytest.mark.parametrize("script", ["jetson.sh", "desktop.sh"])
def test_help_is_the_head_of_the_script(board: Board, script: str) -> None:
    done = board.run(script, "--help")

    assert done.returncode == 0
    assert f"./scripts/{script} resnet" in done.stdout
    assert "--dry-run" in done.stdout
    assert "set -eu" not in done.stdout


def test_an_option_without_its_value(board: Board) -> None:
    done = board.run("jetson.sh", "--image")

    assert done.returncode == ExitCode.USAGE
    assert "--image needs a value" in done.stderr


@pytest.mark.parametrize(
    "word", ["--data", "--results=x", "--image", "--dry-run", "--out", "--job"]
)
def test_an_option_in_the_wrong_place_is_refused_before_anything(board: Board, word: str) -> None:
    """In the container it would name a folder that is not there."""
    done = board.run("jetson.sh", "mnist", word, "x")

    assert done.returncode == ExitCode.USAGE
    assert word.partition("=")[0] in done.stderr
    assert board.calls() == []


def test_folders_of_ones_own(board: Board) -> None:
    data = board.folder / "data, mine"
    for name in ("mnist", "cifar10"):
        (data / name).mkdir(parents=True)
        (data / name / "verified.json").touch()

    words = ["--data", "data, mine", f"--results={board.folder}/kept"]
    done = board.run("jetson.sh", *words, "mnist")

    assert done.returncode == 0, done.stderr
    (call,) = board.runs()
    assert f'type=bind,"source={data}",target=/data,readonly' in call
    assert f"type=bind,source={board.folder}/kept,target=/results" in call


def test_lines_of_ones_own_in_the_settings_stay(board: Board) -> None:
    env = board.checkout / ".env"
    env.write_text("MINE=1\nNARROWGAUGE_UID=7\n# a note\n")

    board.run("jetson.sh")
    once = env.read_text()
    board.run("jetson.sh")

    assert once.startswith("MINE=1\n# a note\n")
    assert once.count("NARROWGAUGE_UID") == 1
    assert f"NARROWGAUGE_DATA={board.data}\n" in once
    assert env.read_text() == once


def test_the_scripts_are_clean() -> None:
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed; the suite's static stage has it")
    scripts = [str(ROOT / "scripts" / name) for name in ("jetson.sh", "desktop.sh", "env.sh")]
    done = subprocess.run([checker, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_a_row_that_was_killed_for_memory_is_not_the_run(board: Board) -> None:
    board.answer("oom", "true\n")

    done = board.run("jetson.sh")

    assert done.returncode == 0
    assert not any("record" in call for call in board.runs())


def test_a_run_that_made_no_folder_has_no_results(board: Board) -> None:
    board.answer("code", "3\n")
    board.answer("no-folder")
    (board.results / "mnist").mkdir(parents=True)
    (board.folder / "a file of mine").touch()

    done = board.run("jetson.sh")

    assert done.returncode == 3
    assert "results:" not in done.stderr
    assert len(board.runs()) == 1


def test_results_that_cannot_be_written_are_told_before_anything_is_built(board: Board) -> None:
    (board.fake / "there").unlink()
    board.results.write_text("a file")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.RESULTS_UNWRITABLE
    assert "--results DIR" in done.stderr
    assert not any(call[0] in ("build", "run") for call in board.calls())


def test_building_and_naming_an_image_contradict_each_other(board: Board) -> None:
    done = board.run("jetson.sh", "--build", "--image", "x", "mnist")

    assert done.returncode == ExitCode.USAGE


def test_settings_that_cannot_be_read_are_left_alone(board: Board) -> None:
    env = board.checkout / ".env"
    env.mkdir()  # what root, who may read everything, cannot read either

    done = board.run("jetson.sh")

    assert done.returncode == 0
    assert ".env cannot be written" in done.stderr


def test_settings_keep_their_mode(board: Board) -> None:
    env = board.checkout / ".env"
    env.write_text("TOKEN=secret\n")
    env.chmod(0o600)

    assert board.run("jetson.sh").returncode == 0
    assert env.stat().st_mode & 0o777 == 0o600
    assert "TOKEN=secret\n" in env.read_text()
