"""What the tests of data share: a tiny set, its files in every layout, and a small web server."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import socket
import stat
import tarfile
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
from PIL import Image

from narrowgauge_contract.data_commands import LAUNCHER, DataCommands
from narrowgauge_contract.datasets import Artifact, DataSet, FlatFile, Source
from narrowgauge_data import fetch
from narrowgauge_data.caller import Caller

TRAIN, TEST = 20, 10
_random = np.random.default_rng(5)


def _images(count: int, channels: int, size: int) -> np.ndarray:
    return _random.integers(0, 256, (count, channels, size, size), dtype=np.uint8)


#: The decoded files of a grey set (28 x 28) and of a colour set (4 x 4).
GREY = {
    "train-images.u8": _images(TRAIN, 1, 28),
    "train-labels.u8": _random.integers(0, 10, TRAIN, dtype=np.uint8),
    "test-images.u8": _images(TEST, 1, 28),
    "test-labels.u8": _random.integers(0, 10, TEST, dtype=np.uint8),
}
COLOUR = {
    "train-images.u8": _images(TRAIN, 3, 4),
    "train-labels.u8": _random.integers(0, 10, TRAIN, dtype=np.uint8),
    "test-images.u8": _images(TEST, 3, 4),
    "test-labels.u8": _random.integers(0, 10, TEST, dtype=np.uint8),
}
IDX_NAMES = {
    "train-images.u8": "train-images-idx3-ubyte",
    "train-labels.u8": "train-labels-idx1-ubyte",
    "test-images.u8": "t10k-images-idx3-ubyte",
    "test-labels.u8": "t10k-labels-idx1-ubyte",
}


def dataset(content: Dict[str, np.ndarray], *sources: Source, name: str = "tiny") -> DataSet:
    """A declaration of `content` that comes from `sources`."""
    files = tuple(
        FlatFile(file, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for file, array in content.items()
    )
    return DataSet(
        name=name, title="A tiny set", classes=tuple("0123456789"), mean=(0.5,), std=(0.5,),
        files=files, sources=sources, licence="CC0", citation="nobody, 2026",
    )  # fmt: skip


def idx_files(packed: bool = True) -> Dict[str, bytes]:
    """GREY as idx files."""
    found = {}
    for file, name in IDX_NAMES.items():
        array = GREY[file].squeeze()
        head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        raw = head + array.tobytes()
        found[f"{name}.gz" if packed else name] = gzip.compress(raw) if packed else raw
    return found


def cifar_files() -> Dict[str, bytes]:
    """COLOUR as Krizhevsky's records, in two train batches and one test batch."""

    def batch(part: str, chosen: slice) -> bytes:
        images, labels = COLOUR[f"{part}-images.u8"][chosen], COLOUR[f"{part}-labels.u8"][chosen]
        return b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, images))

    return {
        "data_batch_1.bin": batch("train", slice(0, 10)),
        "data_batch_2.bin": batch("train", slice(10, 20)),
        "test_batch.bin": batch("test", slice(0, 10)),
    }


def png_files() -> Dict[str, bytes]:
    """COLOUR as the PNG layout: a row per image, its pixels in height, width, channel order."""

    def picture(images: np.ndarray) -> bytes:
        stream = io.BytesIO()
        rows = images.transpose(0, 2, 3, 1).reshape(len(images), -1, 3)
        Image.fromarray(np.ascontiguousarray(rows)).save(stream, "PNG")
        return stream.getvalue()

    train = COLOUR["train-images.u8"]
    return {
        "data_batch_1.png": picture(train[:10]),
        "data_batch_2.png": picture(train[10:]),
        "test_batch.png": picture(COLOUR["test-images.u8"]),
        "train_lables.json": json.dumps(COLOUR["train-labels.u8"].tolist()).encode(),
        "test_lables.json": json.dumps(COLOUR["test-labels.u8"].tolist()).encode(),
    }


def tarball(files: Dict[str, bytes], folder: str = "package") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def debian_package(files: Dict[str, bytes], data: str = "data.tar.xz") -> bytes:
    """`files` as a Debian package has them; `data` is what it calls the archive of its files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./usr/share/datasets/tiny/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", data: stream.getvalue()}
    package = b"!<arch>\n"
    for name, content in members.items():
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
        package += head.encode() + content + b"\n" * (len(content) % 2)
    return package


def write(folder: Path, files: Dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def assert_whole(root: Path, content: Dict[str, np.ndarray], name: str = "tiny") -> None:
    """The set is there, right, and nothing half lies beside it."""
    for file, array in content.items():
        assert (root / name / file).read_bytes() == array.tobytes()
    assert sorted(p.name for p in root.iterdir()) == sorted([f".{name}.lock", name])


def assert_nothing(root: Path, name: str = "tiny") -> None:
    """No set, and nothing half of one."""
    left = {path.name for path in root.iterdir()} if root.exists() else set()
    assert left <= {f".{name}.lock"}


#: What the server does with a path: a status, the bytes to send, and the length to claim.
Answer = Callable[[str, int], Tuple[int, bytes, int]]


@dataclasses.dataclass
class Server:
    """A web server on this machine. `requests` holds the paths asked, with their Range."""

    root: str
    requests: List[Tuple[str, str]]


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    """Serve `answer(path, offset)` over plain HTTP."""
    requests: List[Tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            requests.append((self.path, asked))
            offset = int(asked[len("bytes=") : -len("-")]) if asked else 0
            status, body, length = answer(self.path, offset)
            self.send_response(206 if asked and status == 200 else status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            with suppress(ConnectionError):  # a client whose connection is made to fail has left
                self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_answer(files: Dict[str, bytes]) -> Answer:
    """Serve these files whole, and their rests when asked for."""

    def answer(path: str, offset: int) -> Tuple[int, bytes, int]:
        content = files.get(path.rpartition("/")[2])
        if content is None:
            return 404, b"", 0
        return 200, content[offset:], len(content) - offset

    return answer


def mirror(root: str, names: List[str], layout: str) -> Source:
    """A source that fetches these files from a server."""
    return Source("https", tuple(Artifact(f"{root}/{name}") for name in names), layout, 1)


#: A process environment for fetching: only where programs are.
ENV = {"PATH": os.environ["PATH"]}
#: The names under which a mirror has GREY.
IDX = list(idx_files())


def asking(
    env: Optional[Dict[str, str]] = None,
    said: Optional[List[str]] = None,
    commands: DataCommands = LAUNCHER,
) -> Caller:
    """A caller with this environment (ENV where none is given); what it is told goes to `said`."""
    return Caller(([] if said is None else said).append, ENV if env is None else env, commands)


def fetch_set(declared: DataSet, root: Path, env: Optional[Dict[str, str]] = None) -> List[str]:
    """Fetch a set; what was said on the way."""
    said: List[str] = []
    fetch.fetch(declared, root, asking(env, said))
    return said


def refused() -> str:
    """A server that is not there: its port was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def program(folder: Path, name: str, script: str) -> Dict[str, str]:
    """An environment in which `name` is a shell script of ours."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
