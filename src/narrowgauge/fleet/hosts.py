"""hosts.toml: the boards of a lab. Parsed strictly; `hosts add` appends to it, nothing rewrites it.

[[host]]
name = "orin"
address = "orin.lab"
user = "lab"            # these and what follows may be left out
port = 22
target = "jetson"       # by default what fits the board
devices = ["all"]       # or gpu0, cpu0-3: each is leased alone, and runs one at a time
data = "~/.local/share/narrowgauge"
leases = "/run/lock"
labels = ["bench"]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.errors import NarrowgaugeError, TargetsFileError, UnknownNameError, UsageError
from narrowgauge.fleet.errors import HostsFileError
from narrowgauge.table_reader import TableReader, as_table
from narrowgauge_contract.spec import load_toml

__all__ = [
    "ALL",
    "HOSTS_VARIABLE",
    "Board",
    "append_board",
    "hosts_file",
    "load_boards",
    "parse_boards",
    "select",
]

#: Names another hosts.toml.
HOSTS_VARIABLE = "NARROWGAUGE_HOSTS"
#: The device that is the whole board.
ALL = "all"

_NAME = re.compile(r"^[a-z0-9][a-z0-9-]*$")
# A leading - would be an option to ssh.
_ADDRESS = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:%-]*$")
_USER = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
_DEVICE = re.compile(r"^(all|gpu[0-9]+|cpu[0-9]+(-[0-9]+)?)$")
_FOLDER = re.compile(r"^(/|~/)[^\n]*$")
_PATH = re.compile(r"^[^\n]+$")
_DATA = "~/.local/share/narrowgauge"
_LEASES = "/run/lock"
_LAST_PORT = 65535
_LAST_PROCESSOR = 4095


@dataclass(frozen=True)
class Board:
    """One `[[host]]`. `user` and `port` None leave that to ssh's own configuration.

    `ssh_config`: a file in place of ~/.ssh/config; a relative one lies beside hosts.toml. `data`:
    where runs and data sets lie there; `~/` is the home of `user`. `leases`: the folder of locks
    that all users of the board share.
    """

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    target: str | None = None
    devices: tuple[str, ...] = (ALL,)
    data: str = _DATA
    leases: str = _LEASES
    labels: tuple[str, ...] = ()
    ssh_config: str | None = None

    @property
    def login(self) -> str:
        """What `ssh` is given."""
        return f"{self.user}@{self.address}" if self.user else self.address


def hosts_file(env: Mapping[str, str], home: Path) -> Path:
    """`$NARROWGAUGE_HOSTS`, or narrowgauge/hosts.toml in the user's configuration (XDG)."""
    named = env.get(HOSTS_VARIABLE)
    if named:
        return Path(named)
    base = env.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".config") / "narrowgauge/hosts.toml"


def load_boards(path: Path) -> tuple[Board, ...]:
    """Every board of the file, in its order; none where there is no file. Raises HostsFileError."""
    if not path.exists():
        return ()
    try:
        document = load_toml(path)
    except NarrowgaugeError as error:
        raise HostsFileError(error.what, why=error.why, next_step=error.next_step) from error
    boards = parse_boards(document, str(path))
    return tuple(_beside(path, board) for board in boards)


def _beside(path: Path, board: Board) -> Board:
    """A relative `ssh_config` lies beside hosts.toml: ssh would look in the current folder."""
    if board.ssh_config is None:
        return board
    found = path.parent.absolute() / Path(board.ssh_config).expanduser()
    return replace(board, ssh_config=str(found))


def parse_boards(document: Mapping[str, object], where: str = "hosts.toml") -> tuple[Board, ...]:
    """Check a parsed hosts.toml. Raises HostsFileError."""
    for key in document:
        if key != "host":
            raise HostsFileError(
                f"{where} has the unknown table '{key}'", next_step="each board is a [[host]]"
            )
    tables = document.get("host", [])
    if not isinstance(tables, list):
        raise HostsFileError(f"{where}: [host] should be [[host]], once for each board")
    boards: dict[str, Board] = {}
    for number, table in enumerate(tables, 1):
        place = f"{where}, host {number}"
        try:
            board = _board(TableReader(as_table(table, place), place))
        except TargetsFileError as error:
            raise HostsFileError(error.what, why=error.why, next_step=error.next_step) from error
        if board.name in boards:
            first = list(boards).index(board.name) + 1
            raise HostsFileError(
                f"{where} names two boards '{board.name}'",
                why=f"hosts {first} and {number}; results would not say which of them made them",
                next_step="give one of them another name",
            )
        boards[board.name] = board
    return tuple(boards.values())


def select(
    boards: Sequence[Board], names: Sequence[str], *, every: bool, label: str | None
) -> tuple[Board, ...]:
    """The boards that a command line asks for. Raises UnknownNameError, UsageError for none."""
    known = {board.name: board for board in boards}
    for name in names:
        if name not in known:
            raise UnknownNameError("host", name, known)
    labels = {each for board in boards for each in board.labels}
    if label is not None and label not in labels:
        raise UnknownNameError("label", label, labels)
    chosen = tuple(
        board
        for board in boards
        if every or board.name in names or (label is not None and label in board.labels)
    )
    if not chosen:
        raise UsageError(
            "there is no board to run on", next_step="narrowgauge hosts add NAME ADDRESS"
        )
    return chosen


def append_board(path: Path, board: Board) -> None:
    """Add a board at the file's end; what is in it stays as it is. Raises HostsFileError."""
    if board.name in {each.name for each in load_boards(path)}:
        raise HostsFileError(
            f"{path} names a board '{board.name}' already",
            next_step="choose another name, or change it in the file",
        )
    text = _toml(board)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        gap = "\n" if before and not before.endswith("\n\n") else ""
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(("" if before.endswith("\n") or not before else "\n") + gap + text)
    except OSError as error:
        raise HostsFileError(f"cannot write {path}", why=error.strerror or str(error)) from error


def _board(reader: TableReader) -> Board:
    def maybe(key: str, pattern: re.Pattern[str]) -> str | None:
        return reader.matching(key, pattern) if reader.has(key) else None

    plain = Board("", "")
    board = Board(
        name=reader.matching("name", _NAME),
        address=reader.matching("address", _ADDRESS),
        user=maybe("user", _USER),
        port=reader.optional_count("port"),
        target=maybe("target", _NAME),
        devices=reader.texts("devices", _DEVICE) if reader.has("devices") else plain.devices,
        data=maybe("data", _FOLDER) or plain.data,
        leases=maybe("leases", _FOLDER) or plain.leases,
        labels=reader.texts("labels", _NAME) if reader.has("labels") else (),
        ssh_config=maybe("ssh_config", _PATH),
    )
    reader.finish()
    if board.port is not None and board.port > _LAST_PORT:
        raise HostsFileError(f"{reader.where}: port {board.port} is above {_LAST_PORT}")
    if not board.devices or len(set(board.devices)) != len(board.devices):
        raise HostsFileError(f"{reader.where}: 'devices' should name each device once")
    if ALL in board.devices and len(board.devices) > 1:
        raise HostsFileError(
            f"{reader.where}: device '{ALL}' is the whole board, and leaves nothing for others",
            next_step=f'devices = ["{ALL}"], or name the others alone',
        )
    _check_processors(reader.where, board.devices)
    return board


def _check_processors(where: str, devices: Sequence[str]) -> None:
    """Two devices of one processor would measure each other. Raises HostsFileError."""
    owners: dict[int, str] = {}
    for device in devices:
        if not device.startswith("cpu"):
            continue
        first, _, last = device[3:].partition("-")
        if last and int(last) < int(first):
            raise HostsFileError(
                f"{where}: device '{device}' ends before it begins",
                next_step=f"cpu{last}-{first}",
            )
        if int(last or first) > _LAST_PROCESSOR:
            raise HostsFileError(
                f"{where}: device '{device}' has a processor above {_LAST_PROCESSOR}"
            )
        for number in range(int(first), int(last or first) + 1):
            if number in owners:
                raise HostsFileError(
                    f"{where}: devices '{owners[number]}' and '{device}' share processor {number}",
                    why="each device is leased alone, and they would measure each other",
                    next_step="give each its own processors",
                )
            owners[number] = device


def _toml(board: Board) -> str:
    """Only what is not the default. A JSON text or list of texts is TOML too."""
    plain = Board("", "")
    lines = ["[[host]]"]
    for key in (
        "name",
        "address",
        "user",
        "port",
        "target",
        "devices",
        "data",
        "leases",
        "labels",
        "ssh_config",
    ):
        value = getattr(board, key)
        if value != getattr(plain, key):
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(f"{key} = {json.dumps(shown, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
