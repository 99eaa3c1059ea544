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
import re
import shutil
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional, Sequence, Set, Tuple

from narrowgauge_contract.codec import decode, write_json_atomic
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
#: In the folder where a packing gathers: the numbers of the parts that came.
_TAKEN = "taken.json"
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
            waiting = ", ".join(map(str, self.missing))
            return f"{self.name}: taken; still missing part {waiting}"
        if self.before:
            return f"{self.name}: complete and verified in {self.folder} already; nothing to do"
        return f"{self.name}: complete and verified in {self.folder}"


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
    except (ValueError, NarrowgaugeError) as error:
        raise DamagedPartError(f"the header of {where} is damaged", why=str(error)) from error


def join(parts: Sequence[Path], data: Path, caller: Caller) -> Tuple[Joined, ...]:
    """Take parts of one or several sets, in any order; finish every set that is then whole.

    Parts given in earlier calls are remembered below `data`. A damaged part changes nothing, and
    neither does any part of a set that is whole.
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
        for each, path in given:
            _take(each, path, data)
        return _finish(header, dataset, data)


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
    """The names become paths, so they are checked before anything is written."""
    names = [header.name, header.pack, *header.files, *(block.file for block in header.blocks)]
    if not all(_PLAIN_NAME.fullmatch(name) for name in names):
        raise DamagedPartError(f"{path} names a file outside its folder")
    if any(block.file not in header.files for block in header.blocks):
        raise DamagedPartError(f"{path} holds a block of a file that it does not declare")
    known = DATA_SETS.get(header.name)
    if known is not None:
        declared = {flat.name: flat.sha256 for flat in known.files}
        if {name: packed.sha256 for name, packed in header.files.items()} != declared:
            raise DamagedPartError(
                f"{path} packs another {header.name} than this program declares",
                why="the sha256 of its files differ",
            )


def _take(header: PartHeader, path: Path, data: Path) -> None:
    folder = _staging(header, data)
    folder.mkdir(exist_ok=True)
    if header.part in _taken(folder):
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
    write_json_atomic(folder / _TAKEN, sorted({*_taken(folder), header.part}))


def _open_block(block: Block, stream: BinaryIO, path: Path) -> bytes:
    packed = stream.read(block.packed)
    found = hashlib.sha256(packed).hexdigest()
    if len(packed) != block.packed or found != block.sha256:
        raise DamagedPartError(
            f"{path} is damaged or truncated",
            why=f"a block of {block.packed} bytes should have sha256 {block.sha256}; "
            f"{len(packed)} bytes with {found} are there",
            next_step="carry this part over again; the parts that were taken stay",
        )
    try:
        content = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise DamagedPartError(f"{path} does not unpack", why=str(error)) from error
    if block.plane:
        content = from_planes(content, block.plane)
    if len(content) != block.bytes:
        raise DamagedPartError(f"{path} does not unpack to the size that it declares")
    return content


def _finish(header: PartHeader, dataset: DataSet, data: Path) -> Joined:
    staging = _staging(header, data)
    missing = tuple(sorted(set(range(1, header.parts + 1)) - _taken(staging)))
    if missing:
        return Joined(header.name, None, missing)
    for flat in dataset.files:
        found = sha256_file(staging / flat.name)
        if found != flat.sha256:
            shutil.rmtree(staging)
            raise DamagedPartError(
                f"{header.name}: the joined {flat.name} is not what was packed",
                why=f"sha256 {found}, expected {flat.sha256}",
            )
    (staging / _TAKEN).unlink()
    return Joined(header.name, local.replace_set(dataset, staging, data))


def _staging(header: PartHeader, data: Path) -> Path:
    """Per packing, so that parts of two packings never mix."""
    return data / f".{header.name}.{header.pack[:12]}.unpacking"


def _taken(folder: Path) -> Set[int]:
    path = folder / _TAKEN
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()
