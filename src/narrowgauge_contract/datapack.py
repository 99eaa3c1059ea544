"""A data set in parts that are each small enough to carry, and how a bare host joins them again.

    python3 -m narrowgauge_contract.datapack PART... --data DIR

Each part checks itself and may come alone, in any order; the set appears under DIR, whole and
verified, when the last part has come. Standard library only: a GPU host has nothing else of ours.

A part is a line that names the format, a line of JSON (`PartHeader`), and its blocks, each an xz
stream of its own with its delta filters named inside it. Colour images are packed with red and blue
as differences from green, one plane after the other, which saves a sixth of CIFAR-10.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import json
import lzma
import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional, Sequence, Set, Tuple

from narrowgauge_contract.codec import decode, write_json_atomic
from narrowgauge_contract.datasets import DATA_SETS
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file

__all__ = [
    "MAGIC",
    "Block",
    "DamagedPartError",
    "PackedFile",
    "PartHeader",
    "Unpacked",
    "from_planes",
    "read_header",
    "to_planes",
    "unpack",
]

MAGIC = b"narrowgauge-datapack 1\n"
_LONGEST_HEADER = 16 << 20


class DamagedPartError(NarrowgaugeError):
    """A part is truncated or altered, or does not belong with the others."""

    exit_code = ExitCode.DATA_CORRUPT


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
class Unpacked:
    """How far a set has come: `folder` once it is whole, else the numbers of the missing parts."""

    name: str
    folder: Optional[Path]
    missing: Tuple[int, ...]


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


def unpack(parts: Sequence[Path], data: Path) -> Tuple[Unpacked, ...]:
    """Take parts of one or several sets, in any order; finish every set that is then whole.

    Parts given in earlier calls are remembered below `data`. A damaged part changes nothing.
    Raises DamagedPartError; OSError as the file system gives it.
    """
    headers: Dict[str, PartHeader] = {}
    for path in parts:
        with open(path, "rb") as stream:
            header = read_header(stream, str(path))
            _check_declared(header, path)
            headers[header.name] = header
            _take(header, stream, path, data)
    return tuple(_finish(header, data) for header in headers.values())


def _check_declared(header: PartHeader, path: Path) -> None:
    """The names become paths, so they are checked before anything is written."""
    names = [header.name, *header.files, *(block.file for block in header.blocks)]
    if any(name != Path(name).name or name.startswith(".") for name in names):
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


def _take(header: PartHeader, stream: BinaryIO, path: Path, data: Path) -> None:
    folder = _staging(header, data)
    folder.mkdir(parents=True, exist_ok=True)
    if header.part in _taken(folder):
        return
    for block in header.blocks:
        content = _open_block(block, stream, path)
        target = folder / block.file
        mode = "r+b" if target.exists() else "w+b"
        with open(target, mode) as output:
            output.seek(block.offset)
            output.write(content)
    write_json_atomic(folder / "taken.json", sorted({*_taken(folder), header.part}))


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


def _finish(header: PartHeader, data: Path) -> Unpacked:
    staging, folder = _staging(header, data), data / header.name
    missing = tuple(sorted(set(range(1, header.parts + 1)) - _taken(staging)))
    if missing:
        return Unpacked(header.name, None, missing)
    for name, packed in header.files.items():
        found = sha256_file(staging / name)
        if found != packed.sha256:
            shutil.rmtree(str(staging))
            raise DamagedPartError(
                f"{header.name}: the joined {name} is not what was packed",
                why=f"sha256 {found}, expected {packed.sha256}",
            )
    (staging / "taken.json").unlink()
    aside = data / f".{header.name}.{os.getpid()}.old"
    if folder.exists():
        os.replace(str(folder), str(aside))
    os.replace(str(staging), str(folder))
    shutil.rmtree(str(aside), ignore_errors=True)
    return Unpacked(header.name, folder, ())


def _staging(header: PartHeader, data: Path) -> Path:
    """Per packing, so that parts of two packings never mix."""
    return data / f".{header.name}.{header.pack[:12]}.unpacking"


def _taken(folder: Path) -> Set[int]:
    path = folder / "taken.json"
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()


def main(words: Optional[Sequence[str]] = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m narrowgauge_contract.datapack",
        description="join the parts that `narrowgauge data pack` made, all at once or a few",
    )
    parser.add_argument("parts", nargs="+", type=Path, help="files of the form SET.I-of-N.ngpack")
    parser.add_argument("--data", required=True, type=Path, help="where the set's folder appears")
    given = parser.parse_args(words)
    try:
        for result in unpack(given.parts, given.data):
            if result.folder is None:
                waiting = ", ".join(map(str, result.missing))
                print(f"{result.name}: taken; still missing part {waiting}")
            else:
                print(f"{result.name}: complete and verified in {result.folder}")
    except NarrowgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return int(ExitCode.DISK_FULL if full else ExitCode.DATA_UNAVAILABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
