"""A board to try the scripts on: a file system of its own, and a docker that only writes down."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

R32 = (
    "# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t186ref, EABI: aarch64, "
    "DATE: Sat Feb 19 17:07:00 UTC 2022"
)
R34 = (
    "# R34 (release), REVISION: 1.1, GCID: 30414990, BOARD: t186ref, EABI: aarch64, "
    "DATE: Tue May 17 04:20:55 UTC 2022"
)
R35 = (
    "# R35 (release), REVISION: 2.1, GCID: 32413640, BOARD: t186ref, EABI: aarch64, "
    "DATE: Tue Jan 24 23:38:33 UTC 2023"
)
R36 = (
    "# R36 (release), REVISION: 2.0, GCID: 34956989, BOARD: generic, EABI: aarch64, "
    "DATE: Thu Nov 30 19:03:58 UTC 2023"
)
R39 = "# R39 (release), REVISION: 0.1, GCID: 1, BOARD: generic, EABI: aarch64, DATE: x"

#: Every call is a paragraph of words in $FAKE/calls. What it answers lies in files beside.
_DOCKER = r"""#!/bin/sh
{ for word; do printf '%s\n' "$word"; done; echo; } >>"$FAKE/calls"
case "$1 ${2-}" in
"info --format")
    echo "WARNING: Error loading config file: /home/x/.docker/config.json: permission denied" >&2
    if [ -f "$FAKE/ps.fail" ]; then echo 'template: nil pointer' >&2; exit 1; fi
    cat "$FAKE/info" ;;
"ps ") cat "$FAKE/ps.fail" >&2; exit 1 ;;
"--version ") cat "$FAKE/version" 2>/dev/null || echo "Docker version 20.10.21, build 1" ;;
"image inspect")
    case $* in
    *RepoDigests*) echo "nvcr.io/nvidia/base@sha256:ba5e sha256:1d" ;;
    *io.narrowgauge.target*) cat "$FAKE/kind" ;;
    */l4t-ml:*) [ -f "$FAKE/base" ] || exit 1 ;;
    *--format*) [ -f "$FAKE/there" ] || exit 1; cat "$FAKE/described" ;;
    *) [ -f "$FAKE/there" ] || { echo "Error: No such image: $3" >&2; exit 1; } ;;
    esac ;;
"buildx version") [ -f "$FAKE/buildx" ] || exit 1 ;;
"pull "*) [ ! -f "$FAKE/pull.fail" ] || exit 1 ;;
"build "* | "buildx build") [ ! -f "$FAKE/build.fail" ] || exit 1 ;;
"tag "*) : >"$FAKE/there" ;;
"logs --tail") cat "$FAKE/log" 2>/dev/null ;;
"inspect --format") cat "$FAKE/oom" 2>/dev/null || echo false ;;
"stop "*) if [ -f "$FAKE/early" ]; then exit 1; fi
    : >"$FAKE/stopped" ;;
"run "*)
    case $* in
    *" fetch "*) exit "$(cat "$FAKE/fetch.code" 2>/dev/null || echo 0)" ;;
    *" record --out"*) exit 0 ;;
    *"/verify "*) exit "$(cat "$FAKE/verify.code" 2>/dev/null || echo 0)" ;;
    esac
    for word; do case $word in
        type=bind,source=*,target=/host.json*) file=${word#type=bind,source=}
            cat "${file%%,target*}" >"$FAKE/host.json" ;;
    esac; done
    if [ -f "$FAKE/early" ]; then
        : >"$FAKE/running"
        exec sleep 120
    fi
    sleep 0.05
    case $* in *" run resnet "*) made=$RESULTS/resnet/1 ;; *) made=$RESULTS/mnist/1 ;; esac
    if [ -f "$FAKE/no-folder" ]; then exit "$(cat "$FAKE/code")"; fi
    mkdir -p "$made"
    [ -f "$FAKE/no-record" ] || : >"$made/record.json"
    if [ -f "$FAKE/long" ]; then
        : >"$FAKE/running"
        until [ -f "$FAKE/stopped" ]; do sleep 0.05; done
        exit 130
    fi
    exit "$(cat "$FAKE/code" 2>/dev/null || echo 0)" ;;
esac
exit 0
"""
#: Drivers before 510 answer so to the question for capabilities.
_SMI = """#!/bin/sh
echo asked >>"$FAKE/asked"
case "$1" in
*compute_cap*) if [ ! -s "$FAKE/cards" ]; then
        echo 'Field "compute_cap" is not a valid field to query.'; exit 2
    fi
    cat "$FAKE/cards" ;;
*) cat "$FAKE/cards.old" ;;
esac
"""
_UNAME = '#!/bin/sh\ncase "$1" in -m) cat "$FAKE/machine" ;; -r) echo 5.10.104-tegra ;; esac\n'
#: What the scripts may use; a board has no more.
TOOLS = """awk basename cat chmod cut date df dirname env find grep head id ls mkdir mktemp mv
    printf rm sed sh sha256sum sleep sort tail touch tr uniq xargs"""


@dataclass(frozen=True)
class Board:
    """Runs a script of a checkout in one shell, seeing only this board."""

    shell: tuple[str, ...]
    folder: Path
    checkout: Path

    @property
    def fake(self) -> Path:
        return self.folder / "fake"

    @property
    def system(self) -> Path:
        return self.folder / "system"

    @property
    def data(self) -> Path:
        return self.folder / "home/.local/share/narrowgauge/data"

    @property
    def results(self) -> Path:
        return self.checkout / "results"

    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:{self.folder / 'tools'}",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder),
            "FAKE": str(self.fake),
            "RESULTS": str(self.results),
            "NARROWGAUGE_ROOT": str(self.system),
        }

    def answer(self, name: str, text: str = "") -> None:
        (self.fake / name).write_text(text)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def place(self, name: str, text: str) -> None:
        path = self.system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, script: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.shell, str(self.checkout / "scripts" / script), *words],
            env=self.env(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *words)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def calls(self) -> list[list[str]]:
        """What docker was called with."""
        path = self.fake / "calls"
        text = path.read_text() if path.exists() else ""
        return [paragraph.splitlines() for paragraph in text.split("\n\n") if paragraph.strip()]

    def runs(self) -> list[list[str]]:
        return [call for call in self.calls() if call[0] == "run"]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 120
        while not (self.fake / name).exists():
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.02)


def info(board: Board, version: str, runtimes: str, *, cdi: bool = False) -> str:
    """What `docker info` says of an engine with `runtimes`, of which the last is the default."""
    default = runtimes.split()[-1]
    body = '{"CDISpecDirs":["/etc/cdi","/var/run/cdi"]}' if cdi else '{"CDISpecDirs":null}'
    return f"{version}|{runtimes} |{default}|{board.folder}|{body}\n"


def make_board(shell: str, folder: Path) -> Board:
    """A Jetson AGX Xavier on L4T 35.2.1, with an image and data, for `dash` or `busybox`."""
    checkout = folder / "check out"
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.whl")
    for name in ("docker", "experiments", "images", "scripts", "src"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    tools = folder / "tools"
    tools.mkdir()
    for name in TOOLS.split():
        target = shutil.which("busybox" if shell == "busybox" else name)
        assert target is not None, name
        (tools / name).symlink_to(target)
    for name in ("bin", "fake", "home", "system"):
        (folder / name).mkdir()
    words = (shutil.which("busybox") or "", "sh") if shell == "busybox" else ("/bin/dash",)
    board = Board(words, folder, checkout)
    board.program("docker", _DOCKER)
    board.program("uname", _UNAME)
    jetson(board)
    board.answer("there")
    for name in ("mnist", "cifar10"):
        (board.data / name).mkdir(parents=True)
        (board.data / name / "verified.json").touch()
    return board


def jetson(board: Board, release: str = R35, target: str = "jetson") -> None:
    board.answer("machine", "aarch64\n")
    board.answer("info", info(board, "20.10.21", "io.containerd.runc.v2 runc nvidia"))
    board.answer("kind", f"{target}|arm64\n")
    board.answer("described", "sha256:1|l4t|sha256:2|false|0123456789abcdef\n")
    board.place("etc/nv_tegra_release", release + "\n")
    board.place("etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 20.04.5 LTS"\n')
    board.place("proc/cpuinfo", "processor : 0\nprocessor : 1\nCPU part : 0x004\n")
    board.place("proc/meminfo", "MemTotal:       32000000 kB\n")
    board.place("proc/device-tree/model", 'Jetson "AGX" Xavier\\\0')
    board.place("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "schedutil\n")
    board.program("nvpmodel", "#!/bin/sh\nprintf 'NV Power Mode: MAXN\\n0\\n'\n")


def desktop(board: Board, driver: str = "580.65.06", cards: str = "8.6") -> None:
    """A PC. `cards` is empty for a driver that does not know the question."""
    (board.system / "etc/nv_tegra_release").unlink(missing_ok=True)
    board.answer("machine", "x86_64\n")
    board.answer("info", info(board, "28.1.0", "nvidia runc"))
    board.answer("kind", "desktop|amd64\n")
    each = f"{driver}, 49140, 1410, 1980, 9501, 9501, NVIDIA RTX A6000\n"
    board.answer("cards", "".join(f"{card}, {each}" for card in cards.split(",") if card))
    board.answer("cards.old", each)
    board.program("nvidia-smi", _SMI)


def terminate(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGTERM)
