"""Which torch build pip would take, from where, and how large: asked of pip before it downloads."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import BuildFailed

__all__ = ["CPU_INDEX", "Offer", "choose_offer", "read_report"]

#: The official index of builds without CUDA.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: What the default build with its CUDA libraries comes to, where no server tells: 2.13 on x86-64.
_DEFAULT_BUILD_BYTES = 3_000_000_000
_HEAD_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 180.0
#: The CPU index is only asked for; where it does not answer, nobody should wait for it.
_QUICKLY = ("--timeout", "8", "--retries", "0")
_CUDA_REQUIREMENT = re.compile(r"^(nvidia|cuda|triton|pytorch-triton)[-_a-z0-9]*", re.I)


@dataclass(frozen=True)
class Offer:
    """What one way of asking pip would install. `arguments` are pip's, before the requirements.

    `bytes` is what would be downloaded; None where a server did not say.
    """

    version: str
    cpu_only: bool
    arguments: tuple[str, ...]
    source: str
    bytes: int | None

    def describe(self) -> str:
        """`torch 2.13.0+cpu from the local file, 190 MB to download (about 40 s at 5 MB/s)`."""
        kind = "without CUDA" if self.cpu_only else "with its CUDA libraries"
        if self.bytes == 0:
            return f"torch {self.version} {kind} from {self.source}, nothing to download"
        size = _DEFAULT_BUILD_BYTES if self.bytes is None and not self.cpu_only else self.bytes
        if size is None:
            return f"torch {self.version} {kind} from {self.source}, some 250 MB to download"
        minutes = size / 5e6 / 60
        time = f"{minutes:.0f} min" if minutes >= 1.5 else f"{max(1, round(minutes * 60))} s"
        about = "about " if self.bytes is None else ""
        return (
            f"torch {self.version} {kind} from {self.source},"
            f" {about}{size / 1e6:.0f} MB to download ({time} at 5 MB/s)"
        )


def choose_offer(
    python: Path, requirements: Sequence[str], *, want_cpu: bool, env: Mapping[str, str]
) -> Offer:
    """The build to install: on a host without a GPU one without CUDA where any is offered.

    pip's own configuration is asked first (a local wheel, a mirror), then the official CPU index,
    then the default is taken. Raises BuildFailed where pip can find none.
    """
    first, problem = _ask(python, requirements, (), "pip's configured index", env)
    if first is not None and (first.cpu_only or not want_cpu):
        return first
    if want_cpu:
        arguments = ("--extra-index-url", CPU_INDEX)
        pinned = [_as_cpu(requirement) for requirement in requirements]
        offer, _ = _ask(python, pinned, (*arguments, *_QUICKLY), CPU_INDEX, env)
        if offer is not None and offer.cpu_only:
            return offer
    if first is not None:
        return first
    raise BuildFailed(
        "pip finds no torch to install",
        why=problem,
        next_step="is there a network, a proxy, a mirror?"
        " Or name a Python that has torch: --lab-python PYTHON",
    )


def read_report(report: Mapping[str, object], arguments: tuple[str, ...], asked: str) -> Offer:
    """An Offer from the JSON of `pip install --dry-run --report`; servers are asked for sizes."""
    items = report.get("install")
    urls: list[str] = []
    offer: Offer | None = None
    for item in items if isinstance(items, list) else []:
        url = str(item["download_info"]["url"])
        urls.append(url)
        metadata = item["metadata"]
        if str(metadata["name"]).lower() == "torch":
            version = str(metadata["version"])
            needs = [str(need) for need in metadata.get("requires_dist", ())]
            cpu = "+cpu" in version or not any(_CUDA_REQUIREMENT.match(need) for need in needs)
            source = "a local file" if url.startswith("file:") else asked
            offer = Offer(version, cpu, arguments, source, None)
    if offer is None:
        raise BuildFailed("pip's report names no torch")
    return Offer(offer.version, offer.cpu_only, arguments, offer.source, _total(urls))


def _ask(
    python: Path,
    requirements: Sequence[str],
    arguments: tuple[str, ...],
    source: str,
    env: Mapping[str, str],
) -> tuple[Offer | None, str]:
    """One dry run of pip: its offer, or why there is none."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
               "--report", "-", *arguments, *requirements]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {_ASK_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return None, "\n".join(done.stderr.strip().splitlines()[-3:])
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
        install = tuple(word for word in arguments if word not in _QUICKLY)
        return read_report(report, install, source), ""
    except (ValueError, KeyError, BuildFailed) as error:
        return None, f"pip's report is not understood: {error}"


def _as_cpu(requirement: str) -> str:
    """`torch==2.13.0` → `torch==2.13.0+cpu`: of two indexes, only one has that local version."""
    pinned = requirement.startswith("torch==") and "+" not in requirement
    return f"{requirement}+cpu" if pinned and os.uname().machine == "x86_64" else requirement


def _total(urls: Sequence[str]) -> int | None:
    """Bytes to download for `urls`; local files cost nothing; None where one is not known."""
    remote = [url for url in urls if not url.startswith("file:")]
    if not remote:
        return 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        sizes = list(pool.map(_size, remote))
    return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)


def _size(url: str) -> int | None:
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in ("http", "https"):
        return None
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_HEAD_TIMEOUT_S) as answer:
            length = answer.headers.get("Content-Length")
    except OSError:
        return None
    return int(length) if length and length.isdigit() else None
