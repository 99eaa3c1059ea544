"""Boards of a test's own: a Docker engine each, in a network namespace where that can be had, with
an sshd on loopback in front of it. Real ones, on one machine; they need root, or sudo without a
password.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["IMAGE", "TOOLS", "LabBoard", "boards", "make_image"]

IMAGE = "narrowgauge-test/board:1"
#: What a board's lab needs besides what every image of the tests has.
TOOLS = ("sed", "dd", "head", "mkdir", "chmod")
_WITHIN_S = 60.0


@dataclass(frozen=True)
class LabBoard:
    """One board. `port` is its sshd's; `folder` holds all that is its own, and is short, since the
    path of a socket may not exceed 107 characters."""

    name: str
    folder: Path
    port: int
    namespace: str | None

    @property
    def docker_host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def data(self) -> Path:
        return self.folder / "ng"

    def toml(self, *, port: int | None = None, more: str = "") -> str:
        """Its table of hosts.toml, reached over another `port` (a line's) where one is given."""
        return (
            f'[[host]]\nname = "{self.name}"\naddress = "127.0.0.1"\nport = {port or self.port}\n'
            f'user = "{getpass.getuser()}"\nssh_config = "{self.ssh_config}"\n'
            f'data = "{self.data}"\nleases = "{self.folder}"\n{more}\n'
        )

    def docker(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "--host", self.docker_host, *words],
            capture_output=True,
            text=True,
            check=check,
        )
        return done.stdout.strip()

    def know(self, port: int) -> None:
        """Let ssh know the board's host key on this port too."""
        key = (self.folder / "host_key.pub").read_text(encoding="utf-8").split()
        with open(self.known_hosts, "a", encoding="utf-8") as stream:
            stream.write(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")

    def start_engine(self, *, cpus: str | None = None) -> None:
        """Start the engine, and wait until it answers. `cpus` pins it, and so its containers."""
        words = [] if cpus is None else ["taskset", "--cpu-list", cpus]
        if self.namespace is not None:
            # `ip netns exec` would mount another /sys, without the control groups.
            words += ["nsenter", f"--net=/run/netns/{self.namespace}"]
        words += ["dockerd", "--data-root", f"{self.folder}/data", "--exec-root"]
        words += [f"{self.folder}/exec", "--host", self.docker_host]
        words += ["--pidfile", f"{self.folder}/docker.pid", "--bridge", "none", "--iptables=false"]
        words += ["--group", str(os.getgid())]
        with open(self.folder / "dockerd.log", "ab") as log:
            # Nobody's child: it outlives whoever restarts it.
            subprocess.run(
                _as_root(["setsid", "--fork", *words]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        _until(lambda: "Server" in self.docker("version", check=False), f"engine of {self.name}")

    def stop_engine(self) -> None:
        """Stop the engine, and with it its containers, as a restart of it does."""
        pid_file = self.folder / "docker.pid"
        if pid_file.exists():
            pid = pid_file.read_text(encoding="utf-8").strip()
            subprocess.run(_as_root(["kill", pid]), check=False)
            _until(lambda: _ended(pid), f"end of the engine of {self.name}")

    def start_sshd(self, *, path: str | None = None, cpus: str | None = None) -> None:
        """Start sshd; `path` comes first on the PATH of what it runs; `cpus` pins it, and that."""
        search = f"{path}:{os.defpath}:/usr/sbin:/sbin" if path else os.environ["PATH"]
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nPidFile {self.folder}/sshd.pid\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nMaxSessions 50\n"
            "Subsystem sftp internal-sftp\n"
            f"SetEnv DOCKER_HOST={self.docker_host} PATH={search}\n",
            encoding="utf-8",
        )
        subprocess.run(_as_root(["mkdir", "-p", "/run/sshd"]), check=True)
        # sshd wants its own absolute path, and so do its children a configuration's.
        words = [] if cpus is None else ["taskset", "--cpu-list", cpus]
        words += [shutil.which("sshd") or "/usr/sbin/sshd", "-f", str(config)]
        subprocess.run(_as_root([*words, "-E", f"{self.folder}/sshd.log"]), check=True)
        _until(self._listens, f"sshd of {self.name}")

    def stop_sshd(self) -> None:
        pid_file = self.folder / "sshd.pid"
        if pid_file.exists():
            pid = pid_file.read_text(encoding="utf-8").strip()
            subprocess.run(_as_root(["kill", pid]), check=False)
            _until(lambda: not self._listens(), f"end of the sshd of {self.name}")

    def new_host_key(self, name: str = "host_key") -> None:
        for old in (self.folder / name, self.folder / f"{name}.pub"):
            old.unlink(missing_ok=True)
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
        subprocess.run(words, check=True)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def boards(root: Path, names: Sequence[str], cpus: Sequence[str] = ()) -> Iterator[list[LabBoard]]:
    """Boards below `root`, which must be short; everything of them is gone at the end."""
    made = []
    try:
        for number, name in enumerate(names):
            board = _made(root, name)
            made.append(board)
            board.new_host_key()
            board.new_host_key("key")
            board.ssh_config.write_text(
                f"Host *\n  IdentityFile {board.folder}/key\n  IdentitiesOnly yes\n"
                f"  UserKnownHostsFile {board.known_hosts}\n",
                encoding="utf-8",
            )
            board.know(board.port)
            own = cpus[number] if cpus else None
            board.start_engine(cpus=own)
            board.start_sshd(cpus=own)
        yield made
    finally:
        for board in made:
            board.stop_sshd()
            board.stop_engine()
            if board.namespace is not None:
                subprocess.run(_as_root(["ip", "netns", "del", board.namespace]), check=False)
            subprocess.run(_as_root(["rm", "-rf", str(board.folder)]), check=False)


def make_image(board: LabBoard, archive: bytes, labels: Sequence[str] = ()) -> str:
    """Import an image whose program is `lab.sh` of the experiment `tiny`; its id."""
    words = ["docker", "--host", board.docker_host, "import"]
    words += ["--change", 'ENTRYPOINT ["/bin/sh","/experiments/tiny/lab.sh"]']
    for label in labels:
        words += ["--change", f"LABEL {label}"]
    subprocess.run([*words, "-", IMAGE], input=archive, capture_output=True, check=True)
    return board.docker("image", "inspect", "--format", "{{.Id}}", IMAGE)


def _made(root: Path, name: str) -> LabBoard:
    folder = root / name
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    namespace = f"ng-{os.getpid()}-{name}"
    words = _as_root(["ip", "netns", "add", namespace])
    has = subprocess.run(words, capture_output=True, check=False).returncode == 0
    return LabBoard(name, folder, port, namespace if has else None)


def _as_root(words: Sequence[str]) -> list[str]:
    return list(words) if os.getuid() == 0 else ["sudo", "-n", *words]


def _ended(pid: str) -> bool:
    """Whether a process is gone, or only waits for whoever started it to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split(") ")[1][0] == "Z"
    except OSError:
        return True


def _until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_WITHIN_S:g} s")
        time.sleep(0.02)
