"""Which target a host gets from scripts/jetson.sh and desktop.sh, what is refused and noted."""

from __future__ import annotations

import json
import re

import board as boards
import pytest
from board import R32, R34, R35, R36, R39, ROOT, Board

from narrowgauge.machine import Gpu, Host
from narrowgauge.selection import pick_target
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.codec import decode
from narrowgauge_contract.errors import ExitCode, NotApplicableError
from narrowgauge_contract.record import HostNote


@pytest.mark.parametrize(
    ("release", "target"), [(R35, "jetson"), (R36, "jetson-next")], ids=["R35", "R36"]
)
def test_each_release_has_its_target(board: Board, release: str, target: str) -> None:
    boards.jetson(board, release, target)

    done = board.run("jetson.sh")

    assert done.returncode == 0, done.stderr
    assert f"target {target}\n" in done.stderr


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (R32, "flash JetPack 5.1"),
        (R34, "jetson: L4T 35.1 up to, not with, 36.0"),
        (R39, "jetson-next: L4T 36.0 up to, not with, 37.0"),
        ("# nothing of the kind", "./scripts/desktop.sh"),
    ],
    ids=["R32", "R34", "R39", "other"],
)
def test_a_release_that_fits_nothing_is_refused(board: Board, release: str, said: str) -> None:
    boards.jetson(board, release)

    done = board.run("jetson.sh", "mnist")

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert said in done.stderr
    assert board.calls() == []


@pytest.mark.parametrize(
    ("driver", "cards", "target"),
    [
        ("470.57.02", "", "desktop"),  # does not know the question for capabilities
        ("470.57.02", "8.6", "desktop"),
        ("580.65.06", "7.5", "desktop"),
        ("580.65.06", "8.9", "desktop-next"),
        ("580.65.06", "9.0", "desktop-next"),
        ("580.65.06", "8.6,12.0", "desktop-next"),
    ],
)
def test_the_card_and_the_driver_choose(dash: Board, driver: str, cards: str, target: str) -> None:
    boards.desktop(dash, driver, cards)

    done = dash.run("desktop.sh", "mnist")

    assert done.returncode == 0, done.stderr
    assert f"target {target}\n" in done.stderr
    (words,) = dash.runs()
    assert words[words.index("--gpus") + 1] == "all"


@pytest.mark.parametrize(
    ("driver", "cards", "said"),
    [
        ("460.32.03", "", "desktop: it needs driver 470.0 or newer, this host has 460.32.03"),
        ("535.104.05", "8.9", "desktop-next: it needs driver 580.0 or newer"),
        ("580.65.06", "6.1", "compute capability 7.0 to 8.6, one here has 6.1"),
        ("580.65.06", "13.0", "compute capability 7.5 to 12.1, one here has 13.0"),
        ("470.57.02", "8.6,6.1", "one here has 6.1"),
    ],
)
def test_what_fits_no_target_is_refused_with_a_reason_each(
    dash: Board, driver: str, cards: str, said: str
) -> None:
    boards.desktop(dash, driver, cards)

    done = dash.run("desktop.sh", "mnist")

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert said in done.stderr
    assert dash.runs() == []


def test_an_arm_server_is_refused(dash: Board) -> None:
    boards.desktop(dash, cards="9.0")
    dash.answer("machine", "aarch64\n")

    done = dash.run("desktop.sh")

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert "its image is for amd64, this host is arm64" in done.stderr


def test_a_board_is_no_desktop_and_a_pc_without_a_driver_is_told_so(board: Board) -> None:
    done = board.run("desktop.sh")
    assert (done.returncode, "./scripts/jetson.sh" in done.stderr) == (3, True)

    boards.desktop(board)
    (board.folder / "bin/nvidia-smi").unlink()
    done = board.run("desktop.sh")
    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert "there is no NVIDIA driver here" in done.stderr

    board.program("nvidia-smi", "#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    done = board.run("desktop.sh")
    assert "version mismatch" in done.stderr
    assert "reboot" in done.stderr

    board.program("nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    done = board.run("desktop.sh")
    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert "shows no card\nwhy:  No devices were found" in done.stderr


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            ExitCode.DOCKER_PERMISSION,
            "usermod -aG docker",
        ),
        (
            "WARNING: config.json: permission denied\nCannot connect to the Docker daemon",
            ExitCode.DOCKER_UNAVAILABLE,
            "systemctl start docker",
        ),
    ],
)
def test_an_engine_that_does_not_answer(
    board: Board, failure: str, code: ExitCode, said: str
) -> None:
    """`docker info` of 20.10 says nothing of use; a config that may not be read is no refusal."""
    board.answer("ps.fail", failure)

    done = board.run("jetson.sh")

    assert done.returncode == code
    assert failure.splitlines()[-1] in done.stderr
    assert said in done.stderr


def test_no_docker_and_an_old_one(board: Board) -> None:
    board.answer("info", boards.info(board, "19.03.6", "runc nvidia"))
    done = board.run("jetson.sh")
    assert done.returncode == ExitCode.DOCKER_TOO_OLD
    assert "20.10 (API 1.41) or newer is needed" in done.stderr

    (board.folder / "bin/docker").unlink()
    done = board.run("jetson.sh")
    assert done.returncode == ExitCode.DOCKER_UNAVAILABLE
    assert "apt-get install docker.io" in done.stderr


def test_a_jetson_without_the_runtime_is_refused_not_run_on_its_cpu(board: Board) -> None:
    board.answer("info", boards.info(board, "20.10.21", "io.containerd.runc.v2 runc"))

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.CONTAINER_REFUSED
    assert "runs on the CPU, without a word" in done.stderr
    lines = done.stderr[done.stderr.index("{") : done.stderr.rindex("}") + 1]
    assert json.loads(lines) == {
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}},
        "default-runtime": "nvidia",
    }
    assert board.runs() == []


def test_a_runtime_that_is_not_the_default_is_a_warning(board: Board) -> None:
    board.answer("info", boards.info(board, "20.10.21", "nvidia runc"))

    done = board.run("jetson.sh")

    assert done.returncode == 0
    assert '"default-runtime": "nvidia"' in done.stderr


def test_a_pc_takes_cdi_where_only_that_is(board: Board) -> None:
    """The engine must offer it, and NVIDIA's specification be there."""
    boards.desktop(board, cards="9.0")
    board.answer("kind", "desktop-next|amd64\n")
    board.answer("info", boards.info(board, "28.1.0", "runc", cdi=True))
    done = board.run("desktop.sh")
    assert done.returncode == ExitCode.CONTAINER_REFUSED
    assert "runtimes: runc; CDI for NVIDIA: no" in done.stderr

    board.place("etc/cdi/nvidia.yaml", "cdiVersion: 0.6.0\n")
    done = board.run("desktop.sh")
    assert done.returncode == 0, done.stderr
    (words,) = board.runs()
    assert words[words.index("--device") + 1] == "nvidia.com/gpu=all"

    board.answer("info", boards.info(board, "24.0.7", "runc"))
    assert board.run("desktop.sh").returncode == ExitCode.CONTAINER_REFUSED


def test_the_toolkits_hook_without_its_runtime_will_do(dash: Board) -> None:
    boards.desktop(dash)
    dash.answer("info", boards.info(dash, "24.0.7", "runc"))
    assert dash.run("desktop.sh").returncode == ExitCode.CONTAINER_REFUSED

    dash.program("nvidia-container-runtime-hook", "#!/bin/sh\n")
    assert dash.run("desktop.sh").returncode == 0
    (words,) = dash.runs()
    assert "--gpus" in words


def test_a_card_that_the_driver_does_not_tell_is_not_guessed(board: Board) -> None:
    """An old driver fits one target only, and a warning says what that is for."""
    boards.desktop(board, "470.57.02", "")
    done = board.run("desktop.sh")
    assert done.returncode == 0
    assert "too old to tell the compute capability; desktop is for 7.0 to 8.6" in done.stderr

    boards.desktop(board, "580.65.06", "")
    done = board.run("desktop.sh")
    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert "no target can be chosen" in done.stderr


def test_the_driver_is_asked_once(dash: Board) -> None:
    """Each question takes it up to a second where no other program holds it."""
    boards.desktop(dash)
    assert dash.run("desktop.sh").returncode == 0
    assert (dash.fake / "asked").read_text().splitlines() == ["asked"]


@pytest.mark.parametrize(
    ("driver", "cards"),
    [
        ("470.57.02", "7.0"),
        ("460.32.03", "8.0"),
        ("535.104.05", "8.6"),
        ("535.104.05", "8.9"),
        ("580.65.06", "6.1"),
        ("580.65.06", "7.0"),
        ("580.65.06", "8.0,9.0"),
        ("580.65.06", "10.0"),
        ("580.65.06", "12.0"),
    ],
)
def test_the_launcher_would_choose_the_same(dash: Board, driver: str, cards: str) -> None:
    boards.desktop(dash, driver, cards)
    gpus = tuple(Gpu("a card", card, None, {}) for card in cards.split(","))
    try:
        wanted = pick_target(
            load_targets(ROOT / TARGETS_FILE), Host("amd64", gpus, driver), None
        ).name
    except NotApplicableError:
        wanted = ""

    done = dash.run("desktop.sh", "--dry-run")

    said = re.search(r": target (\S+)$", done.stderr, re.MULTILINE)
    assert (said[1] if said else "") == wanted, done.stderr


_CLOCKS = """SOC family:tegra194  Machine:Jetson-AGX
Online CPUs: 0-7
cpu0: Online=1 Governor=schedutil MinFreq=1190400 IdleStates: C1=1 c6=1
GPU MinFreq=318750000 MaxFreq=1377000000 CurrentFreq=318750000
EMC MinFreq=204000000 MaxFreq=2133000000 FreqOverride=0
"""


def test_what_the_host_is_goes_into_a_file_that_the_lab_can_read(board: Board) -> None:
    """The board's model holds a quote, a backslash and a NUL."""
    board.program("jetson_clocks", f"#!/bin/sh\ncat <<END\n{_CLOCKS}END\n")
    for name, hertz in (("cur", 318750000), ("min", 114750000), ("max", 1377000000)):
        board.place(f"sys/class/devfreq/17000000.gv11b/{name}_freq", f"{hertz}\n")
    board.place("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "2265600\n")
    assert board.run("jetson.sh").returncode == 0

    body = json.loads((board.fake / "host.json").read_text(encoding="utf-8"))
    note = decode(HostNote, body, "host.json")

    assert note.format == 1
    assert note.executor == "script"
    assert note.machine.cpu == 'Jetson "AGX" Xavier\\'
    assert note.machine.cpu_count == 2
    assert note.machine.memory_bytes == 32000000 * 1024
    assert note.machine.l4t == R35
    assert note.machine.power_mode == "NV Power Mode: MAXN 0"
    assert note.machine.clocks == {
        "cpu_scaling_governor": "schedutil",
        "cpu_scaling_max_freq": 2265600000,
        "gpu_cur_freq": 318750000,
        "gpu_min_freq": 114750000,
        "gpu_max_freq": 1377000000,
        "cpu0": "Online=1 Governor=schedutil MinFreq=1190400 IdleStates: C1=1 c6=1",
        "GPU": "MinFreq=318750000 MaxFreq=1377000000 CurrentFreq=318750000",
        "EMC": "MinFreq=204000000 MaxFreq=2133000000 FreqOverride=0",
    }
    assert note.machine.system == "Ubuntu 20.04.5 LTS"
    assert note.machine.docker == "20.10.21"
    assert note.image is not None
    assert note.image.base_digest == "sha256:2"
    assert not note.image.stand_in
    assert note.git is None


def test_clocks_that_only_root_may_see_are_left_out(dash: Board) -> None:
    dash.program("jetson_clocks", "#!/bin/sh\necho 'cpu0: Error=run me as root'; exit 1\n")
    (dash.folder / "bin/nvpmodel").unlink()
    assert dash.run("jetson.sh").returncode == 0

    body = json.loads((dash.fake / "host.json").read_text(encoding="utf-8"))
    machine = decode(HostNote, body, "host.json").machine

    assert machine.clocks == {"cpu_scaling_governor": "schedutil"}
    assert machine.power_mode is None


def test_a_pcs_facts_hold_driver_clocks_and_cards(dash: Board) -> None:
    boards.desktop(dash)
    dash.run("desktop.sh")

    body = json.loads((dash.fake / "host.json").read_text(encoding="utf-8"))
    machine = decode(HostNote, body, "host.json").machine

    assert machine.driver == "580.65.06"
    clocks = {"sm": 1410, "sm_limit": 1980, "memory": 9501, "memory_limit": 9501}
    assert {f"gpu0_{name}_mhz": value for name, value in clocks.items()}.items() <= (
        machine.clocks.items()
    )
    card = {"name": "NVIDIA RTX A6000", "capability": "8.6", "memory_bytes": 49140 << 20}
    assert machine.gpus == (card,)
    assert machine.l4t is None


def test_a_pc_is_no_jetson_and_is_told_what_to_use(board: Board) -> None:
    """There is no file to read at all, which must not end the script without a word."""
    boards.desktop(board)

    done = board.run("jetson.sh", "resnet")

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert "this is no Jetson" in done.stderr
    assert "./scripts/desktop.sh" in done.stderr
