"""A container image with a shell, made from this host's own files: no registry is needed."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

__all__ = ["NAME", "archive"]

NAME = "narrowgauge-test/shell:local"
_TOOLS = ("sh", "sleep", "cat", "id", "touch")


def archive(more: tuple[str, ...] = ()) -> bytes:
    """A tar with a shell, a few tools (and `more` of them) and the libraries they need."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("tmp", "out", "cache", "experiments", "data", "proc", "dev", "sys", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(folder)
        for path, target in sorted(_files((*_TOOLS, *more)).items()):
            tar.add(os.path.realpath(path), arcname=target.lstrip("/"), recursive=False)
    return stream.getvalue()


def _files(tools: tuple[str, ...]) -> dict[str, str]:
    """Each host file and where it stands in the image."""
    files = {}
    for tool in tools:
        path = shutil.which(tool)
        assert path is not None, f"this host has no {tool}"
        files[path] = f"/bin/{tool}"
        listed = subprocess.run(["ldd", os.path.realpath(path)], capture_output=True, text=True)
        for library in re.findall(r"(/\S+) \(0x", listed.stdout):
            files[library] = str(Path(library))
    return files
