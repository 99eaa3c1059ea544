"""One row of `probe`: report the surroundings, or misbehave in one well-defined way."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from narrowgauge_lab.context import RowContext

from . import compiled

#: The test that asked for the misbehaviour creates this file when it is ready.
_GO = "go"
_PATIENCE_S = 600.0
_STEP = 1 << 20


def run(ctx: RowContext) -> None:
    """Do what the parameter `act` says."""
    acts = {
        "report": _report, "wait": _wait, "fill": _fill, "hog": _hog, "fail": _fail,
        "functor": compiled.functor, "extension": compiled.extension,
    }  # fmt: skip
    ctx.metric("answer", 42.0, unit="1", source="probe")
    acts[ctx.parameters["act"]](ctx)


def _report(ctx: RowContext) -> None:
    status = _status()
    ctx.fact("uid", os.getuid())
    ctx.fact("gid", os.getgid())
    ctx.fact("home", os.environ.get("HOME", ""))
    ctx.fact("capabilities", int(status["CapEff"], 16))
    ctx.fact("no_new_privileges", status["NoNewPrivs"] == "1")
    ctx.fact("interfaces", sorted(name for _, name in socket.if_nameindex()))
    ctx.fact("docker_socket", os.path.exists("/var/run/docker.sock"))
    ctx.fact("first_process", Path("/proc/1/comm").read_text().strip())
    for name, folder in (("root", "/"), ("experiments", "/experiments"), ("opt", "/opt"),
                         ("cache", "/cache"), ("tmp", "/tmp"), ("out", str(ctx.out))):  # fmt: skip
        ctx.fact(f"writable_{name}", _writable(folder))
    for name in ("cache", "tmp"):
        ctx.fact(f"executable_{name}", _executes(f"/{name}"))
    ctx.fact("compiler", subprocess.call(["g++", "--version"], stdout=subprocess.DEVNULL) == 0)
    with open(ctx.side_file("answer.txt"), "w") as stream:
        stream.write("42\n")


def _wait(ctx: RowContext) -> None:
    ctx.progress(1, 2, unit="step")
    _until_go(ctx)
    ctx.metric("answer", 43.0, unit="1", source="probe")


def _fill(ctx: RowContext) -> None:
    with open(ctx.side_file("big.bin"), "wb") as stream:
        for _ in range(1 << 14):
            stream.write(b"\0" * _STEP)
            stream.flush()


def _hog(ctx: RowContext) -> None:
    ctx.progress(1, 2, unit="step")
    _until_go(ctx)
    kept = []
    for _ in range(1 << 14):
        kept.append(bytearray(os.urandom(1024) * 1024))


def _fail(ctx: RowContext) -> None:
    raise RuntimeError(f"row {ctx.repeat} was asked to fail")


def _until_go(ctx: RowContext) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not (ctx.out / _GO).exists():
        if time.monotonic() > deadline:
            raise RuntimeError("nobody came")
        time.sleep(0.05)


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _writable(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _executes(folder: str) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        script = Path(made) / "script"
        script.write_text("#!/bin/sh\nexit 0\n")
        script.chmod(0o700)
        try:
            return subprocess.call([str(script)]) == 0
        except OSError:
            return False
