"""Images as files: written whole or not at all, and loaded only where they are what was saved."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from narrowgauge.errors import BuildFailed, DataCorrupt, DiskFull, UsageError
from narrowgauge.images.archive import Archive, load_archive, manifest_path, save_archive
from narrowgauge.images.client import BuildClient

NAME = "narrowgauge/jetson:0123456789abcdef"
#: Saves and loads a text; what `image inspect` says lies in $FAKE/image.
_DOCKER = """#!/bin/sh
echo "$*" >>"$FAKE/log"
case "$1 $2" in
"image inspect") if [ -f "$FAKE/image" ]; then cat "$FAKE/image"; else
    echo "Error: No such image: $3" >&2; exit 1; fi ;;
"save --output") [ ! -f "$FAKE/fail" ] || { cat "$FAKE/fail" >&2; exit 1; }
    echo "the layers" >"$3" ;;
"load --input") [ ! -f "$FAKE/fail" ] || { cat "$FAKE/fail" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def client(tmp_path: Path) -> BuildClient:
    folder = tmp_path / "fake"
    folder.mkdir()
    path = folder / "docker"
    path.write_text(_DOCKER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    present(folder)
    return BuildClient(str(path), buildx=False, env={"PATH": "/bin", "FAKE": str(folder)})


def present(
    folder: Path,
    identity: str = "sha256:1",
    size: int = 11,
    content: str = "0123456789abcdef",
) -> None:
    labels = {
        "io.narrowgauge.target": "jetson",
        "io.narrowgauge.content": content,
        "io.narrowgauge.standin": "false",
        "io.narrowgauge.unresolved": "base",
    }
    image = {"Id": identity, "Size": size, "Architecture": "arm64", "Config": {"Labels": labels}}
    (folder / "image").write_text(json.dumps([image]))


def fake(client: BuildClient) -> Path:
    return Path(client.env["FAKE"])


def quiet(line: str) -> None:
    """Says nothing."""


def test_what_was_saved_is_loaded_again(client: BuildClient, tmp_path: Path) -> None:
    file = tmp_path / "sub/jetson.tar"
    said: list[str] = []

    saved = save_archive(client, NAME, file, said.append)
    loaded = load_archive(client, file, said.append)

    assert saved == loaded
    assert saved.image == NAME
    assert (saved.target, saved.architecture, saved.unresolved) == ("jetson", "arm64", "base")
    assert not saved.stand_in
    assert json.loads(manifest_path(file).read_text())["sha256"] == saved.sha256
    assert "GB free there" in said[0]
    assert f"load --input {file}" in (fake(client) / "log").read_text()


def test_an_image_that_is_not_there(client: BuildClient, tmp_path: Path) -> None:
    (fake(client) / "image").unlink()

    with pytest.raises(UsageError, match="there is no image"):
        save_archive(client, NAME, tmp_path / "a.tar", quiet)


def test_a_file_that_is_there_is_not_overwritten(client: BuildClient, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_text("mine")

    with pytest.raises(UsageError, match="exists"):
        save_archive(client, NAME, tmp_path / "a.tar", quiet)
    assert (tmp_path / "a.tar").read_text() == "mine"


def test_an_image_that_does_not_fit_is_not_begun(client: BuildClient, tmp_path: Path) -> None:
    present(fake(client), size=10**16)

    with pytest.raises(DiskFull, match="no room"):
        save_archive(client, NAME, tmp_path / "a.tar", quiet)
    assert "save" not in (fake(client) / "log").read_text()


def test_a_save_that_fails_leaves_nothing(client: BuildClient, tmp_path: Path) -> None:
    (fake(client) / "fail").write_text("write: no space left on device")

    with pytest.raises(DiskFull):
        save_archive(client, NAME, tmp_path / "out/a.tar", quiet)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def archive(client: BuildClient, tmp_path: Path) -> Path:
    save_archive(client, NAME, tmp_path / "a.tar", quiet)
    return tmp_path / "a.tar"


@pytest.mark.parametrize("damage", [b"the layerz\n", b"the layers", b""])
def test_a_file_that_changed_on_its_way_is_not_loaded(
    damage: bytes, client: BuildClient, archive: Path
) -> None:
    archive.write_bytes(damage)

    with pytest.raises(DataCorrupt, match="not what was saved") as raised:
        load_archive(client, archive, quiet)
    assert "copy it again" in raised.value.next_step
    assert "load" not in (fake(client) / "log").read_text()


@pytest.mark.parametrize("missing", ["a.tar", "a.tar.json"])
def test_both_files_are_needed(missing: str, client: BuildClient, archive: Path) -> None:
    (archive.parent / missing).unlink()

    with pytest.raises(UsageError, match=rf"there is no .*{re.escape(missing)}\n"):
        load_archive(client, archive, quiet)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', "\x00"])
def test_a_manifest_that_is_none(text: str, client: BuildClient, archive: Path) -> None:
    manifest_path(archive).write_text(text)

    with pytest.raises(DataCorrupt, match="does not describe an image"):
        load_archive(client, archive, quiet)


def test_a_manifest_of_a_later_format(client: BuildClient, archive: Path) -> None:
    body = json.loads(manifest_path(archive).read_text())
    manifest_path(archive).write_text(json.dumps({**body, "format": 2}))

    with pytest.raises(DataCorrupt, match="format 2"):
        load_archive(client, archive, quiet)


def test_an_engine_that_has_another_image_of_that_name(client: BuildClient, archive: Path) -> None:
    present(fake(client), identity="sha256:other", content="fedcba9876543210")

    with pytest.raises(BuildFailed, match="another image") as raised:
        load_archive(client, archive, quiet)
    assert "sha256:other" in raised.value.why


def test_another_kind_of_engine_gives_the_same_image_another_id(
    client: BuildClient, archive: Path
) -> None:
    present(fake(client), identity="sha256:manifest")

    assert load_archive(client, archive, quiet).digest == "sha256:1"


def test_a_load_that_fails_is_translated(client: BuildClient, archive: Path) -> None:
    (fake(client) / "fail").write_text("no space left on device")

    with pytest.raises(DiskFull):
        load_archive(client, archive, quiet)


def test_the_manifest_holds_the_archive(archive: Path) -> None:
    assert set(json.loads(manifest_path(archive).read_text())) == set(Archive.__dataclass_fields__)
