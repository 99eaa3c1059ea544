"""What ssh and a board say, as errors of ours with a next step. Pure."""

# ruff: noqa: N818 - these are named for what happened; all are a NarrowgaugeError

from __future__ import annotations

import re

from narrowgauge.errors import (
    BuildFailed,
    Busy,
    DataCorrupt,
    DiskFull,
    DockerUnavailable,
    NarrowgaugeError,
    UsageError,
)
from narrowgauge.executors.docker_errors import refusal_error
from narrowgauge_contract.errors import ExitCode

__all__ = [
    "SSH_FAILED",
    "BoardUnfit",
    "BoardUnreachable",
    "HostKeyRefused",
    "HostsFileError",
    "LinkCut",
    "WrongImage",
    "board_said",
    "never_connected",
    "ssh_error",
    "tail",
]


class HostsFileError(UsageError):
    """hosts.toml does not say what it must, or says something twice or unknown."""


class BoardUnreachable(NarrowgaugeError):
    """No ssh connection to a board can be made, or it does not let us in."""

    exit_code = ExitCode.BOARD_UNREACHABLE


class LinkCut(BoardUnreachable):
    """The connection ended in the middle of an answer."""


class HostKeyRefused(NarrowgaugeError):
    """The board's host key is not the known one, or none is known."""

    exit_code = ExitCode.HOST_KEY_REFUSED


class BoardUnfit(NarrowgaugeError):
    """The board answers, and no run on it could be trusted: its clock, or a tool it lacks."""

    exit_code = ExitCode.HOST_UNFIT


class WrongImage(NarrowgaugeError):
    """The board's image is not the one that this run is of."""

    exit_code = ExitCode.CONTAINER_REFUSED


#: ssh's exit status for errors of its own; what a remote command exits with is passed on.
SSH_FAILED = 255

_ADVICE = (
    (
        "could not resolve",
        "is its address right, here (narrowgauge hosts list) or in your ssh configuration?",
    ),
    (
        "permission denied",
        "put your key on it: ssh-copy-id {login}; it must work without a password",
    ),
    ("connection refused", "is sshd running there, on that port? sudo systemctl start ssh"),
    ("timed out", "is it switched on, and in this network?"),
    ("no route to host", "is it switched on, and in this network?"),
)


#: Lines of ssh's own where no command can have been started. A board's banner is said there too,
#: and so is a warning of a host key that was added: those say nothing of the kind.
_NEVER = re.compile(
    r"^(?:host key verification failed"
    r"|no \S+ host key is known for "
    r"|@? *warning: remote host identification has changed"
    r"|ssh: could not resolve hostname "
    r"|(?:ssh: )?connect to host "
    r"|unable to negotiate with "
    r"|(?:kex|ssh)_exchange_identification: "
    r"|banner exchange: "
    r"|connection timed out during banner exchange"
    r"|(?:\S+: )?permission denied \()",
    re.IGNORECASE | re.MULTILINE,
)


def never_connected(said: str) -> bool:
    """Whether ssh said that it made no connection; one that was cut may have begun a run."""
    return _NEVER.search(said) is not None


def ssh_error(name: str, login: str, said: str) -> NarrowgaugeError:
    """Why ssh gave no connection to the board `name`, by what it `said`. `login`: user@address."""
    lowered = said.lower()
    address = login.rpartition("@")[2]
    if "host identification has changed" in lowered:
        finger = re.search(r"SHA256:\S+", said)
        return HostKeyRefused(
            f"the board {name} shows another host key than it used to",
            why=f"{address} now has {finger[0] if finger else 'another key'}: it was set up anew,"
            " or something else answers in its place",
            next_step="compare the fingerprint on the board itself:"
            " ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
            f"if it was set up anew: ssh-keygen -R {address}, then ssh {login} once",
        )
    if "host key verification failed" in lowered or "host key is known" in lowered:
        return HostKeyRefused(
            f"the host key of the board {name} is not known here",
            why=tail(said),
            next_step=f"ssh {login} once, and compare the fingerprint it shows with the board's"
            " own: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        )
    advice = next(
        (text for part, text in _ADVICE if part in lowered), "try it by hand: ssh {login}"
    )
    return BoardUnreachable(
        f"the board {name} does not answer by ssh",
        why=tail(said),
        next_step=advice.format(login=login),
    )


def board_said(name: str, kind: str, text: str) -> NarrowgaugeError:
    """The error for a board's `@ng fail KIND TEXT`."""
    if kind == "disk-full":
        return DiskFull(
            f"the board {name} has no room left",
            why=text,
            next_step=f"free some there (narrowgauge hosts doctor {name} says how much it has),"
            " or name another folder: data in hosts.toml",
        )
    if kind == "image":
        return WrongImage(
            f"the board {name} has another image than this run is of",
            why=text,
            next_step="start it again: the image is then sent once more",
        )
    if kind == "input":
        return DataCorrupt(f"what was sent to the board {name} arrived changed", why=text)
    if kind == "container":
        return refusal_error(f"on the board {name}: {text}", None)
    if kind == "engine":
        return DockerUnavailable(
            f"no Docker engine answers on the board {name}",
            why=text,
            next_step="there: sudo systemctl start docker; or sudo usermod -aG docker USER, and"
            f" log in again; narrowgauge hosts doctor {name} looks",
        )
    if kind == "load":
        return BuildFailed(f"the board {name} did not take the image", why=text)
    if kind == "lease":
        return Busy(
            f"no lease can be had on the board {name}",
            why=text,
            next_step="name a folder that its users can write: leases in hosts.toml",
        )
    return BoardUnfit(f"the board {name} could not do its part ({kind})", why=text)


def tail(said: str) -> str:
    """The last lines of what was said: the cause is among them."""
    return "\n".join(said.strip().splitlines()[-3:])
