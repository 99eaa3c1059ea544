"""A data set in parts that are each small enough to carry, and how a bare host joins them again.

    python3 -m narrowgauge_data join PART... --data DIR

Each part checks itself and may come alone, in any order; the set appears under DIR, whole and
verified, when the last part has come. Standard library only: a GPU host has nothing else of ours.

A part is a line that names the format, a line of JSON (`PartHeader`), and its blocks, each an xz
stream of its own with its delta filters named inside it. Colour images are packed with red and blue
as differences from green, one plane after the other, which saves a sixth of CIFAR-10.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional, Sequence, Tuple

from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.datasets import DATA_SETS, DataSet, FlatFile
from narrowgauge_contract.errors import DataCorruptError, DataUnavailableError, NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_data import local
from narrowgauge_data.caller import Caller

__all__ = [
    "MAGIC",
    "Block",
    "DamagedPartError",
    "Joined",
    "PackedFile",
    "PartHeader",
    "from_planes",
    "join",
    "read_header",
    "to_planes",
]

MAGIC = b"narrowgauge-datapack 1\n"
_LONGEST_HEADER = 16 << 20
_MOST_PARTS = 10_000
#: Raw bytes: it is unpacked in memory.
_LARGEST_BLOCK = 256 << 20
#: In the folder where a packing gathers: the parts that came, and the files that each is of.
_TAKEN = "taken.json"
_Taken = Dict[int, Tuple[str, ...]]
_PLAIN_NAME = re.compile(r"\w[\w.-]*")


class DamagedPartError(DataCorruptError):
    """A part is truncated or altered, or does not belong with the others."""


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A flat file of the set: its size and the sha256 of its content."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Block:
    """`bytes` of `file` from `offset`, stored as `packed` bytes with that sha256.

    `plane` is the pixels of one colour plane where the block went through `to_planes`, else 0.
    """

    file: str
    offset: int
    bytes: int
    packed: int
    sha256: str
    plane: int = 0


@dataclasses.dataclass(frozen=True)
class PartHeader:
    """What a part says of itself. `pack` is the same in all parts of one packing only."""

    name: str
    pack: str
    part: int
    parts: int
    files: Dict[str, PackedFile]
    blocks: Tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Joined:
    """How far a set has come: `folder` once it is whole, else the numbers of the missing parts.

    `before`: it was whole already, and nothing was taken.
    """

    name: str
    folder: Optional[Path]
    missing: Tuple[int, ...] = ()
    before: bool = False

    @property
    def sentence(self) -> str:
        if self.folder is None:
            return f"{self.name}: taken; still missing part {_numbers(self.missing)}"
        if self.before:
            return f"{self.name}: complete and verified in {self.folder} already; nothing to do"
        return f"{self.name}: complete and verified in {self.folder}"


def _numbers(parts: Sequence[int]) -> str:
    return ", ".join(map(str, parts))


def to_planes(raw: bytes, plane: int) -> bytes:
    """Images [n, 3, plane] to green, red - green, blue - green, each [n, plane], modulo 256."""
    red, green, blue = (_every_third(raw, channel, plane) for channel in range(3))
    return green + _subtract(red, green) + _subtract(blue, green)


def from_planes(packed: bytes, plane: int) -> bytes:
    """The inverse of `to_planes`."""
    third = len(packed) // 3
    green, red, blue = (packed[i * third : (i + 1) * third] for i in range(3))
    red, blue = _add(red, green), _add(blue, green)
    pieces: List[bytes] = []
    for start in range(0, third, plane):
        stop = start + plane
        pieces += (red[start:stop], green[start:stop], blue[start:stop])
    return b"".join(pieces)


def _every_third(raw: bytes, channel: int, plane: int) -> bytes:
    starts = range(channel * plane, len(raw), 3 * plane)
    return b"".join(raw[start : start + plane] for start in starts)


# Whole blocks are added as one long integer: the low seven bits of each byte cannot carry into the
# next byte, and the top bit is an exclusive or. That is a hundred times faster than a Python loop.


def _add(left: bytes, right: bytes) -> bytes:
    low, high, a, b = _long(left, right)
    return (((a & low) + (b & low)) ^ ((a ^ b) & high)).to_bytes(len(left), "little")


def _subtract(left: bytes, right: bytes) -> bytes:
    low, high, a, b = _long(left, right)
    difference = ((a | high) - (b & low)) ^ ((a ^ ~b) & high)
    return difference.to_bytes(len(left), "little")


def _long(left: bytes, right: bytes) -> Tuple[int, int, int, int]:
    size = len(left)
    low = int.from_bytes(b"\x7f" * size, "little")
    high = int.from_bytes(b"\x80" * size, "little")
    return low, high, int.from_bytes(left, "little"), int.from_bytes(right, "little")


def read_header(stream: BinaryIO, where: str) -> PartHeader:
    """Read the two first lines of a part; the stream is then at its first block."""
    if stream.read(len(MAGIC)) != MAGIC:
        raise DamagedPartError(f"{where} is not a part of a packed data set")
    line = stream.readline(_LONGEST_HEADER)
    try:
        return decode(PartHeader, json.loads(line), where)
    except (ValueError, RecursionError, NarrowgaugeError) as error:
        raise DamagedPartError(f"the header of {where} is damaged", why=str(error)) from error


def join(parts: Sequence[Path], data: Path, caller: Caller) -> Tuple[Joined, ...]:
    """Take parts of one or several sets, in any order; finish every set that is then whole.

    Parts given in earlier calls are remembered below `data`. A damaged part changes nothing, and
    neither does any part of a set that is whole. A folder that is no set of ours stays as it is.
    Raises DamagedPartError, DataUnavailableError, DiskFullError.
    """
    packings: Dict[Tuple[str, str], List[Tuple[PartHeader, Path]]] = {}
    for path in parts:
        header = _header_of(path)
        packings.setdefault((header.name, header.pack), []).append((header, path))
    return tuple(_join(given, data, caller) for given in packings.values())


def _header_of(path: Path) -> PartHeader:
    try:
        with open(path, "rb") as stream:
            header = read_header(stream, str(path))
    except OSError as error:
        raise DataUnavailableError(
            f"cannot read {path}",
            why=error.strerror or str(error),
            next_step="give files of the form SET.I-of-N.ngpack",
        ) from error
    _check_declared(header, path)
    return header


def _join(given: Sequence[Tuple[PartHeader, Path]], data: Path, caller: Caller) -> Joined:
    """Parts of one packing."""
    header = given[0][0]
    dataset = _declaration(header)
    with local.changing(header.name, data, caller):
        if local.check(dataset, data).complete:
            for begun in data.glob(f".{header.name}.*.unpacking"):
                shutil.rmtree(begun)
            return Joined(header.name, data / header.name, before=True)
        _require_ours(header.name, data, caller)
        for each, path in given:
            _take(each, path, data)
        return _finish(header, dataset, data)


def _require_ours(name: str, data: Path, caller: Caller) -> None:
    """A part may give its set any name, and so that of a folder of the user's."""
    folder = data / name
    if name in DATA_SETS or not os.path.lexists(folder) or local.is_ours(folder):
        return
    raise DataUnavailableError(
        f"{folder} is there already, and is no data set of ours",
        why=f"'{name}' is the name that the parts give; nothing was taken",
        next_step=f"move it away, or choose another place: {caller.commands.elsewhere}",
    )


def _declaration(header: PartHeader) -> DataSet:
    """The set that a packing makes: the declared one, or what the header says of another."""
    known = DATA_SETS.get(header.name)
    if known is not None:
        return known
    files = (FlatFile(name, (f.bytes,), f.sha256) for name, f in header.files.items())
    return DataSet(
        name=header.name, title=header.name, classes=(), mean=(), std=(), files=tuple(files),
        sources=(), licence="", citation="",
    )  # fmt: skip


def _check_declared(header: PartHeader, path: Path) -> None:
    """The names become paths, and the numbers sizes, so all are checked before anything is done."""
    blocks = header.blocks
    names = [header.name, header.pack, *header.files, *(block.file for block in blocks)]
    if not all(_PLAIN_NAME.fullmatch(name) for name in names):
        raise DamagedPartError(f"{path} names a file outside its folder")
    if not header.files or not {_TAKEN, local.MARKER}.isdisjoint(header.files):
        raise DamagedPartError(f"{path} declares no file, or one with a name of our own")
    if any(block.file not in header.files for block in blocks):
        raise DamagedPartError(f"{path} holds a block of a file that it does not declare")
    if not 1 <= header.part <= header.parts <= _MOST_PARTS:
        raise DamagedPartError(f"{path} says that it is part {header.part} of {header.parts}")
    if not all(_fits(block, header.files[block.file]) for block in blocks):
        raise DamagedPartError(f"{path} holds a block that does not fit into its file")
    if header.parts == 1 and {block.file for block in blocks} != set(header.files):
        raise DamagedPartError(f"{path} declares a file, and holds nothing of it")
    known = DATA_SETS.get(header.name)
    if known is not None:
        declared = {flat.name: PackedFile(flat.bytes, flat.sha256) for flat in known.files}
        if header.files != declared:
            raise DamagedPartError(
                f"{path} packs another {header.name} than this program declares",
                why="the sizes or the sha256 of its files differ",
            )


def _fits(block: Block, file: PackedFile) -> bool:
    return (
        min(block.offset, block.packed, block.plane) >= 0
        and 1 <= block.bytes <= _LARGEST_BLOCK
        and block.offset + block.bytes <= file.bytes
    )


def _take(header: PartHeader, path: Path, data: Path) -> None:
    folder = _staging(header, data)
    folder.mkdir(exist_ok=True)
    taken = _taken(folder)
    if header.part in taken:
        return
    with open(path, "rb") as stream:
        read_header(stream, str(path))
        for block in header.blocks:
            content = _open_block(block, stream, path)
            target = folder / block.file
            mode = "r+b" if target.exists() else "w+b"
            with open(target, mode) as output:
                output.seek(block.offset)
                output.write(content)
    files = tuple(dict.fromkeys(block.file for block in header.blocks))
    _remember(folder, {**taken, header.part: files})


def _open_block(block: Block, stream: BinaryIO, path: Path) -> bytes:
    # Never more than is there: so much memory is taken before anything is read.
    packed = stream.read(min(block.packed, os.fstat(stream.fileno()).st_size))
    found = hashlib.sha256(packed).hexdigest()
    if len(packed) != block.packed or found != block.sha256:
        raise DamagedPartError(
            f"{path} is damaged or truncated",
            why=f"a block of {block.packed} bytes should have sha256 {block.sha256}; "
            f"{len(packed)} bytes with {found} are there",
            next_step="carry this part over again; the parts that were taken stay",
        )
    unpacker = lzma.LZMADecompressor()
    try:
        content = unpacker.decompress(packed, max_length=block.bytes + 1)
    except lzma.LZMAError as error:
        raise DamagedPartError(f"{path} does not unpack", why=str(error)) from error
    if block.plane:
        content = from_planes(content, block.plane)
    if len(content) != block.bytes or not unpacker.eof:
        raise DamagedPartError(f"{path} does not unpack to the size that it declares")
    return content


def _finish(header: PartHeader, dataset: DataSet, data: Path) -> Joined:
    staging = _staging(header, data)
    taken = _taken(staging)
    missing = _missing(header, taken)
    if missing:
        return Joined(header.name, None, missing)
    for flat in dataset.files:
        path = staging / flat.name
        found = sha256_file(path) if path.exists() else "none: no part holds any of it"
        if found != flat.sha256:
            again = _missing(header, _forget(flat.name, taken, staging))
            raise DamagedPartError(
                f"{header.name}: the joined {flat.name} is not what was packed",
                why=f"sha256 {found}, expected {flat.sha256}",
                next_step=f"join these parts again, the others stay: {_numbers(again)}",
            )
    (staging / _TAKEN).unlink()
    return Joined(header.name, local.replace_set(dataset, staging, data))


def _missing(header: PartHeader, taken: _Taken) -> Tuple[int, ...]:
    return tuple(number for number in range(1, header.parts + 1) if number not in taken)


def _forget(name: str, taken: _Taken, staging: Path) -> _Taken:
    """Take the parts of the wrong file `name` as not come; those of other files stay."""
    kept = {number: files for number, files in taken.items() if name not in files}
    if len(kept) == len(taken):
        kept = {}  # no part is of that file, so which of them is wrong cannot be told
    _remember(staging, kept)
    (staging / name).unlink(missing_ok=True)
    return kept


def _staging(header: PartHeader, data: Path) -> Path:
    """Per packing, so that parts of two packings never mix."""
    return data / f".{header.name}.{header.pack[:12]}.unpacking"


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """By the number of a part, as text: the files that it holds blocks of."""

    parts: Dict[str, Tuple[str, ...]]


def _taken(folder: Path) -> _Taken:
    """The parts that came. Where that cannot be read, none has: they only have to come again."""
    path = folder / _TAKEN
    if not path.exists():
        return {}
    try:
        gathered = decode(_Gathered, read_json(path), str(path))
        return {int(number): files for number, files in gathered.parts.items()}
    except (ValueError, NarrowgaugeError):
        return {}


def _remember(folder: Path, taken: _Taken) -> None:
    write_json_atomic(folder / _TAKEN, _Gathered({str(n): taken[n] for n in sorted(taken)}))
