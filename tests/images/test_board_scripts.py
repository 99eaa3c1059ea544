"""scripts/jetson.sh and desktop.sh, under dash and busybox, on boards that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import board as boards
import pytest
from board import R32, R35, R36, R39, ROOT, Board, make_board

from narrowgauge.container import Bind, ContainerPlan, docker_run_words
from narrowgauge.images.content import content_tag
from narrowgauge.plan import cache_volume
from narrowgauge.targets import TARGETS_FILE, Accelerator, load_targets
from narrowgauge_contract.codec import decode
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.record import HostNote


@pytest.fixture(params=["dash", "busybox"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return make_board(request.param, tmp_path)


@pytest.fixture
def dash(tmp_path: Path) -> Board:
    """For what does not depend on the shell."""
    return make_board("dash", tmp_path)


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
        (R39, "jetson-next: L4T 36.0 up to, not with, 37.0"),
        ("# nothing of the kind", "./scripts/desktop.sh"),
    ],
    ids=["R32", "R39", "other"],
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


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ("permission denied while trying to connect", 11, "usermod -aG docker"),
        ("Cannot connect to the Docker daemon. Is it running?", 10, "systemctl start docker"),
    ],
)
def test_an_engine_that_does_not_answer(board: Board, failure: str, code: int, said: str) -> None:
    board.answer("info.fail", failure)

    done = board.run("jetson.sh")

    assert done.returncode == code
    assert failure in done.stderr
    assert said in done.stderr


def test_no_docker_and_an_old_one(board: Board) -> None:
    board.answer("info", f"19.03.6|nvidia runc |nvidia|{board.folder}\n")
    done = board.run("jetson.sh")
    assert done.returncode == ExitCode.DOCKER_TOO_OLD
    assert "20.10 or newer is needed" in done.stderr

    (board.folder / "bin/docker").unlink()
    done = board.run("jetson.sh")
    assert done.returncode == ExitCode.DOCKER_UNAVAILABLE
    assert "apt-get install docker.io" in done.stderr


def test_a_jetson_without_the_runtime_is_refused_not_run_on_its_cpu(board: Board) -> None:
    board.answer("info", f"20.10.21|io.containerd.runc.v2 runc |runc|{board.folder}\n")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.CONTAINER_REFUSED
    assert "runs on the CPU, without a word" in done.stderr
    assert "nvidia-ctk runtime configure" in done.stderr
    assert board.runs() == []


def test_a_runtime_that_is_not_the_default_is_a_warning(board: Board) -> None:
    board.answer("info", f"20.10.21|nvidia runc |runc|{board.folder}\n")

    done = board.run("jetson.sh")

    assert done.returncode == 0
    assert '"default-runtime": "nvidia"' in done.stderr


def test_a_pc_takes_cdi_where_only_that_is(board: Board) -> None:
    boards.desktop(board, cards="9.0")
    board.answer("kind", "desktop-next|amd64\n")
    board.answer("info", f"28.1.0|runc |runc|{board.folder}\n")
    done = board.run("desktop.sh")
    assert done.returncode == ExitCode.CONTAINER_REFUSED
    assert "no CDI specification" in done.stderr

    board.place("etc/cdi/nvidia.yaml", "cdiVersion: 0.6.0\n")
    done = board.run("desktop.sh")
    assert done.returncode == 0, done.stderr
    (words,) = board.runs()
    assert words[words.index("--device") + 1] == "nvidia.com/gpu=all"


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
        dash.answer("info", f"28.1.0|runc |runc|{dash.folder}\n")
        dash.place("etc/cdi/nvidia.yaml", "")
    script = "jetson.sh" if machine == "jetson" else "desktop.sh"
    assert dash.run(script, "mnist").returncode == 0
    (words,) = dash.runs()
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


#: Of an AGX Xavier; as another user than root it prints one line and fails.
_CLOCKS = """#!/bin/sh
cat <<'EOF'
SOC family:tegra194  Machine:Jetson-AGX
Online CPUs: 0-7
cpu0: Online=1 Governor=schedutil MinFreq=1190400 MaxFreq=2265600 IdleStates: C1=1 c6=1
GPU MinFreq=114750000 MaxFreq=1377000000 CurrentFreq=1377000000
EMC MinFreq=204000000 MaxFreq=2133000000 CurrentFreq=2133000000 FreqOverride=0
Fan: PWM=0
NV Power Mode: MAXN
EOF
"""


def test_clocks_that_only_root_may_ask_are_left_out(board: Board) -> None:
    board.program("jetson_clocks", "#!/bin/sh\necho 'Error: Run this script as root'; exit 1\n")
    assert board.run("jetson.sh").returncode == 0

    note = json.loads((board.fake / "host.json").read_text(encoding="utf-8"))
    assert set(note["machine"]["clocks"]) == {"cpu_scaling_governor"}


def test_what_the_host_is_goes_into_a_file_that_the_lab_can_read(board: Board) -> None:
    """The board's model holds a quote, a backslash and a NUL."""
    board.program("jetson_clocks", _CLOCKS)
    board.place("sys/class/devfreq/17000000.ga10b/cur_freq", "930750000\n")
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
    assert note.machine.clocks["cpu_scaling_governor"] == "schedutil"
    assert note.machine.clocks["GPU"].startswith("MinFreq=114750000 MaxFreq=1377000000 Current")
    assert note.machine.clocks["EMC"].endswith("FreqOverride=0")
    assert note.machine.clocks["cpu0"].startswith("Online=1")
    assert note.machine.clocks["gpu_cur_freq"] == "930750000"
    assert note.machine.system == "Ubuntu 20.04.5 LTS"
    assert note.machine.docker == "20.10.21"
    assert note.image is not None
    assert note.image.base_digest == "sha256:2"
    assert not note.image.stand_in
    assert note.git is None


def test_a_pcs_facts_hold_driver_clocks_and_cards(dash: Board) -> None:
    boards.desktop(dash)
    dash.run("desktop.sh")

    body = json.loads((dash.fake / "host.json").read_text(encoding="utf-8"))
    machine = decode(HostNote, body, "host.json").machine

    assert machine.driver == "580.65.06"
    assert machine.clocks["gpu0_sm_limit_mhz"] == "1980"
    assert machine.gpus == ({"name": "NVIDIA RTX A6000"},)
    assert machine.l4t is None


def test_an_image_that_is_not_there_is_built_and_checked(board: Board) -> None:
    (board.fake / "there").unlink()

    done = board.run("jetson.sh")

    assert done.returncode == 0, done.stderr
    built = next(call for call in board.calls() if call[0] == "build")
    assert built[-1] == str(board.checkout)
    tag = content_tag(board.checkout, load_targets(ROOT / TARGETS_FILE)["jetson"])
    assert f"io.narrowgauge.content={tag}" in built
    name = f"narrowgauge/jetson:{tag}"
    checked = board.runs()[0]
    assert checked[-2:] == ["/opt/narrowgauge/verify", f"{name}-unchecked"]
    assert checked[checked.index("--runtime") + 1] == "nvidia"
    tagged = [call for call in board.calls() if call[0] == "tag"]
    assert tagged == [
        ["tag", f"{name}-unchecked", name],
        ["tag", f"{name}-unchecked", "narrowgauge/jetson:local"],
    ]
    assert "l4t-ml:r35.2.1-py3" in done.stderr
    assert "unresolved pins: base" in done.stderr
    assert " GB" in done.stderr


def test_a_newer_client_builds_with_buildx(board: Board) -> None:
    (board.fake / "there").unlink()
    board.answer("buildx")

    assert board.run("jetson.sh", "--build").returncode == 0
    assert any(call[:3] == ["buildx", "build", "--load"] for call in board.calls())


@pytest.mark.parametrize(("name", "text"), [("build.fail", ""), ("verify.code", "1\n")])
def test_a_build_or_a_check_that_fails(board: Board, name: str, text: str) -> None:
    (board.fake / "there").unlink()
    board.answer(name, text)

    for _ in range(2):  # what failed once is not taken for good the next time
        done = board.run("jetson.sh")
        assert done.returncode == ExitCode.BUILD_FAILED
        assert "--load FILE" in done.stderr or "--build" in done.stderr
    assert not any(call[0] == "tag" for call in board.calls())


def test_an_image_of_another_target_or_machine_is_refused(board: Board) -> None:
    for kind in ("desktop|arm64\n", "jetson|amd64\n"):
        board.answer("kind", kind)
        done = board.run("jetson.sh", "--image", "some/image:1", "mnist")
        assert done.returncode == ExitCode.NOT_APPLICABLE
        assert "not for this host" in done.stderr
    assert board.runs() == []


def archive(board: Board, content: str = "layers") -> Path:
    file = board.folder / "jetson.tar"
    file.write_text(content)
    digest = subprocess.run(
        ["sha256sum", str(file)], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    body = {"image": "narrowgauge/jetson:feed", "sha256": digest, "bytes": 6}
    Path(f"{file}.json").write_text(json.dumps(body, indent=1))
    return file


def test_an_archive_is_checked_and_loaded(board: Board) -> None:
    file = archive(board)

    done = board.run("jetson.sh", "--load", str(file), "mnist")

    assert done.returncode == 0, done.stderr
    assert ["load", "--input", str(file)] in board.calls()
    assert ["tag", "narrowgauge/jetson:feed", "narrowgauge/jetson:local"] in board.calls()
    (words,) = board.runs()
    assert "narrowgauge/jetson:feed" in words


def test_an_archive_that_changed_is_not_loaded(board: Board) -> None:
    file = archive(board)
    file.write_text("layerz")
    done = board.run("jetson.sh", "--load", str(file))
    assert done.returncode == ExitCode.DATA_CORRUPT

    Path(f"{file}.json").unlink()
    done = board.run("jetson.sh", "--load", str(file))
    assert done.returncode == ExitCode.USAGE
    assert not any(call[0] == "load" for call in board.calls())


def test_data_is_fetched_by_the_container_where_it_is_missing(board: Board) -> None:
    shutil.rmtree(board.data / "cifar10")

    assert board.run("jetson.sh", "resnet").returncode == 0

    fetching, _ = board.runs()
    assert fetching[-2:] == ["fetch", "cifar10"]
    assert f"type=bind,source={board.data},target=/data" in fetching
    assert "--network" not in fetching
    assert "--runtime" not in fetching


@pytest.mark.parametrize(
    "words",
    [
        ("-p", "data=synthetic"),
        ("-p", "data=fashion-mnist"),
        ("-pdata=fashion-mnist",),
        ("--parameter=data=fashion-mnist",),
        ("--parameter", "data=fashion-mnist"),
    ],
)
def test_the_parameter_says_which_data(dash: Board, words: tuple[str, ...]) -> None:
    assert dash.run("jetson.sh", "mnist", *words).returncode == 0

    fetched = [call[-1] for call in dash.runs() if "fetch" in call]
    assert fetched == ([] if "data=synthetic" in words else ["fashion-mnist"])


def test_data_that_cannot_be_had_ends_it_with_its_own_code(board: Board) -> None:
    shutil.rmtree(board.data / "mnist")
    board.answer("fetch.code", "20\n")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.DATA_UNAVAILABLE
    assert "data=synthetic" in done.stderr
    assert len(board.runs()) == 1


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
    _, err = process.communicate(timeout=30)

    assert process.returncode == ExitCode.INTERRUPTED, err
    assert any(call[:3] == ["stop", "--time", "30"] for call in board.calls())
    assert "results: " in err


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


def test_odd_words_reach_the_lab_as_they_are(board: Board) -> None:
    words = ["-p", "a=$HOME `id` \"x\" \\ 'y'", "-p", "b=*", "-p", "c="]

    assert board.run("jetson.sh", "mnist", *words).returncode == 0

    (call,) = board.runs()
    assert call[-len(words) :] == words


def test_an_experiment_that_is_not_there(board: Board) -> None:
    done = board.run("jetson.sh", "resnett")

    assert done.returncode == ExitCode.USAGE
    assert "mnist resnet" in done.stderr
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


def test_results_that_cannot_be_written_are_told_before_anything_is_built(board: Board) -> None:
    (board.fake / "there").unlink()
    board.results.write_text("a file")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.RESULTS_UNWRITABLE
    assert "--results DIR" in done.stderr
    assert not any(call[0] in ("build", "run") for call in board.calls())


def test_a_warning_before_the_engines_answer_is_no_refusal(board: Board) -> None:
    warning = "WARNING: Error loading config file: /root/.docker/config.json: permission denied\n"
    board.answer("info", f"{warning}20.10.21|nvidia runc |nvidia|{board.folder}\n")

    assert board.run("jetson.sh").returncode == 0


def test_a_pc_with_the_hook_alone_is_given_its_card(dash: Board) -> None:
    boards.desktop(dash)
    dash.answer("info", f"28.1.0|runc |runc|{dash.folder}\n")
    dash.program("nvidia-container-runtime-hook", "#!/bin/sh\n")

    assert dash.run("desktop.sh").returncode == 0


def test_an_archive_of_another_target_does_not_take_the_name(board: Board) -> None:
    board.answer("kind", "jetson-next|arm64\n")

    done = board.run("jetson.sh", "--load", str(archive(board)))

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert not any(call[0] == "tag" for call in board.calls())


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
