"""One ssh connection to a board, kept between commands, and the script that each command sends.

OpenSSH does the work: its configuration, agent, jump hosts and known hosts hold here too. A kept
connection (ControlMaster) makes a command two round trips; without one it takes about nine more.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from narrowgauge.errors import NarrowgaugeError, ToolchainMissing
from narrowgauge.fleet.clock import Clock
from narrowgauge.fleet.errors import (
    SSH_FAILED,
    BoardUnreachable,
    LinkCut,
    board_said,
    never_connected,
    ssh_error,
    tail,
)
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.protocol import Answer, Answers

__all__ = ["Channel", "Link", "Patience", "control_folder"]

_SCRIPT = Path(__file__).with_name("board.sh")
_BUFFER = 1 << 20
_PRIVATE = 0o700
#: What a command has for its end once it was told that there is nothing more to come: a removal.
_LAST_WORDS_S = 10
#: How long a connection that has answered `facts` is good for the next command.
_FRESH_S = 60.0


@dataclass(frozen=True)
class Patience:
    """Seconds. `alive` is how often ssh asks a silent board; three silences end the connection.

    `kept`: how long an idle connection stays. `away`: how long a cut one is tried again.
    """

    connect: int = 10
    alive: int = 5
    kept: int = 120
    away: float = 90.0
    pulse: float = 10.0


def control_folder(env: Mapping[str, str]) -> Path:
    """Where the sockets of kept connections lie: a folder that is this user's alone."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path("/tmp")
    folder = base / f"narrowgauge-ssh-{os.getuid()}"
    folder.mkdir(mode=_PRIVATE, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BoardUnreachable(
            f"{folder} is not a folder of yours alone",
            why="whoever can write there could use your connections",
            next_step=f"remove it, or: chmod 700 {folder}",
        )
    return folder


class Channel:
    """One running command on a board: words go in, answers come out. Use it as a context."""

    def __init__(self, link: Link, process: subprocess.Popen[bytes], said: BinaryIO) -> None:
        self._link = link
        self._process = process
        self._said = said
        assert process.stdin is not None
        assert process.stdout is not None
        self.input = process.stdin
        self.answers = Answers(cast(BinaryIO, process.stdout))
        #: Whether it has done another command before: it may have been cut since.
        self.followed = False
        self._asked = now()

    def follow(self, verb: str, words: Sequence[str]) -> bool:
        """Send one command more, where the board waits for one; whether that could be."""
        if self._process.poll() is not None or not 0 <= now() - self._asked < _FRESH_S:
            return False
        line = os.fsencode(shlex.join([verb, *words]))
        self.followed = True
        self._asked = now()
        try:
            self.send(b"%d\n%s" % (len(line), line))
        except LinkCut:
            return False
        return True

    def read(self) -> Iterator[Answer]:
        """The answers, until `done`. Raises LinkCut, and the error of a `fail`."""
        for answer in self.answers:
            if answer.word == "clock":
                self._link.compare_clock(self._asked, answer.text)
                continue
            self._link.raise_if_failed(answer)
            yield answer

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, payload: bytes) -> None:
        """Raises LinkCut."""
        try:
            self.input.write(payload)
            self.input.flush()
        except (OSError, ValueError) as error:
            raise LinkCut(f"the connection to {self._link.board.name} is cut") from error

    def finish(self) -> None:
        """No more words: the command may end."""
        try:
            self.input.close()
        except OSError:
            pass  # it has ended already

    def failure(self, cut: LinkCut) -> NarrowgaugeError:
        """Why the answers ended too early: what ssh said, where it said something."""
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return cut
        try:
            self._said.seek(0)
            said = self._said.read().decode("utf-8", errors="replace")
        except ValueError:
            return cut  # closed from here meanwhile
        board = self._link.board
        if status == SSH_FAILED:
            if self.answers.heard:  # whatever else was said since the connection was made
                what = f"the connection to the board {board.name} is cut"
                return LinkCut(what, why=tail(said) or cut.what)
            # Only what says that no connection was made proves that nothing runs there.
            error = ssh_error(board.name, board.login, said or cut.what)
            return error if never_connected(said) else LinkCut(error.what, why=error.why)
        return LinkCut(
            f"the board {board.name} ended a command early",
            why=f"exit status {status}; {said.strip()[-300:]}",
            next_step=f"narrowgauge hosts doctor {board.name}",
        )

    def close(self) -> None:
        """End it; a command that still runs is cut off from us, not killed."""
        self.finish()
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()


@dataclass
class Link:
    """How one board is reached. `calls` counts the commands that were sent; `clock` is the last
    command's reading of the board's clock."""

    board: Board
    env: Mapping[str, str]
    patience: Patience = Patience()
    ssh: str = "ssh"
    calls: int = field(default=0, compare=False)
    clock: Clock | None = field(default=None, compare=False)
    _waiting: Channel | None = field(default=None, compare=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def words(self) -> list[str]:
        """The ssh command line up to the remote command. Host keys are checked whatever any
        configuration says, and nothing is asked for: there may be nobody to answer."""
        board, patience = self.board, self.patience
        # A connection of another configuration must not be taken: it may have checked less.
        kind = hashlib.sha256(str(board.ssh_config).encode()).hexdigest()[:8]
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "NoHostAuthenticationForLocalhost": "no",
            "VerifyHostKeyDNS": "no",
            "RemoteCommand": "none",
            "ConnectTimeout": str(patience.connect),
            "ServerAliveInterval": str(patience.alive),
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPersist": str(patience.kept),
            "ControlPath": str(control_folder(self.env) / f"{kind}-%C"),
            "ForwardAgent": "no",
            "ForwardX11": "no",
        }
        found = [self.ssh, "-T"]
        if board.ssh_config is not None:
            found += ["-F", board.ssh_config]
        for name, value in options.items():
            found += ["-o", f"{name}={value}"]
        found += ["-p", str(board.port)] if board.port is not None else []
        found += ["-l", board.user] if board.user is not None else []
        return [*found, "--", board.address]

    def open(self, verb: str, words: Sequence[str]) -> Channel:
        """Start a command of board.sh; on the connection that `ask` left open, where there is one.
        Raises ToolchainMissing, BoardUnreachable."""
        waiting = self._take_waiting()
        if waiting is not None:
            if waiting.follow(verb, words):
                return waiting
            waiting.close()
        return self._start(verb, words)

    def ask(self, words: Sequence[str]) -> list[tuple[Answer, bytes]]:
        """The answers to `facts`. Its connection is kept for the next command, which so begins
        after one round trip and not after three; `close` ends it where there is none.

        Raises the error that the board or ssh gave.
        """
        channel = self._start("facts", words)
        found = []
        try:
            for answer in channel.read():
                if answer.word == "ready":
                    break
                found.append((answer, channel.answers.body(answer)))
        except LinkCut as error:
            with channel:
                raise channel.failure(error) from error
        except BaseException:
            channel.close()
            raise
        self.close()
        self._waiting = channel
        return found

    def close(self) -> None:
        """End the connection that `ask` left open."""
        waiting = self._take_waiting()
        if waiting is not None:
            waiting.close()

    def _take_waiting(self) -> Channel | None:
        with self._guard:
            waiting, self._waiting = self._waiting, None
        return waiting

    def _start(self, verb: str, words: Sequence[str]) -> Channel:
        remote = shlex.join(["sh", "-c", script(), "narrowgauge", verb, *words])
        said = tempfile.TemporaryFile()
        self.calls += 1
        try:
            process = subprocess.Popen(
                [*self.words(), remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=_BUFFER,
                # Ctrl-C is the launcher's to handle: it must not end the connection.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            said.close()
            raise ToolchainMissing(
                "there is no ssh here", why=str(error), next_step="apt-get install openssh-client"
            ) from error
        except OSError:
            said.close()
            raise
        return Channel(self, process, said)

    def call(
        self, verb: str, words: Sequence[str] = (), payload: Iterable[bytes] = ()
    ) -> list[tuple[Answer, bytes]]:
        """One command to its end; its answers with their bytes.

        Raises the error that the board or ssh gave.
        """
        found = []
        with self._start(verb, words) as channel:
            try:
                _send_all(channel, payload)
                channel.finish()
                for answer in channel.read():
                    found.append((answer, channel.answers.body(answer)))
            except LinkCut as error:
                raise channel.failure(error) from error
        return found

    def compare_clock(self, asked: float, there: str) -> None:
        """Take note of what the board's clock showed, between the moment `asked` and this one. A
        surer reading of an earlier command is not kept: a sweep lasts hours, and clocks drift.
        Raises BoardUnfit where that is no number."""
        try:
            self.clock = Clock.between(asked, float(there), now())
        except ValueError as error:
            raise board_said(self.board.name, "date", f"its clock reads {there!r}") from error

    def raise_if_failed(self, answer: Answer) -> None:
        """Raise the error of a `fail`."""
        if answer.word == "fail":
            kind, text = answer.fields(2)
            raise board_said(self.board.name, kind, text)

    def drop(self) -> None:
        """End the kept connection, where there is one."""
        self.close()
        words = self.words()
        words[1:1] = ["-O", "exit"]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _send_all(channel: Channel, payload: Iterable[bytes]) -> None:
    try:
        for chunk in payload:
            channel.send(chunk)
    except LinkCut:
        pass  # it ended early: what the board or ssh said of it is still to be read


def script() -> str:
    """board.sh without its comments: fewer bytes on the line."""
    text = _SCRIPT.read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def now() -> float:
    """This host's clock, where a board's is compared with it: seconds since the epoch."""
    return time.time()
