"""Pins are written by a program: digests into targets.toml, packages into locks."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from narrowgauge.errors import BaseUnreachable, TargetsFileError
from narrowgauge.images.client import BuildClient
from narrowgauge.images.lock import lock_text, pin_base, resolve_digest
from narrowgauge.targets import TARGETS_FILE, Target, load_targets, unresolved

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "c0" * 32


def client(folder: Path, script: str) -> BuildClient:
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return BuildClient(str(path), buildx=True, env={"PATH": "/bin"})


def test_a_digest_is_what_the_registry_says(tmp_path: Path, targets: dict[str, Target]) -> None:
    answer = f'echo \'{{"digest": "{DIGEST}"}}\''

    assert resolve_digest(client(tmp_path, answer), targets["desktop"]) == DIGEST


@pytest.mark.parametrize(
    "script", ["echo '{}'", "echo 'dial tcp: lookup nvcr.io: no such host' >&2; exit 1"]
)
def test_no_answer_gives_no_digest(script: str, tmp_path: Path, targets: dict[str, Target]) -> None:
    with pytest.raises(BaseUnreachable, match=r"21\.07-py3"):
        resolve_digest(client(tmp_path, script), targets["desktop"])


def test_pinning_changes_one_line_and_keeps_the_comments(
    targets: dict[str, Target], tmp_path: Path
) -> None:
    text = (ROOT / TARGETS_FILE).read_text(encoding="utf-8")
    for name in targets:
        changed = pin_base(text, name, DIGEST)
        different = [
            (old, new)
            for old, new in zip(text.splitlines(), changed.splitlines(), strict=True)
            if old != new
        ]
        path = tmp_path / "targets.toml"
        path.write_text(changed, encoding="utf-8")
        loaded = load_targets(path)

        assert [new for _, new in different] == [f'digest = "{DIGEST}"']
        assert loaded[name].base.digest == DIGEST
        assert set(unresolved(targets)) - set(unresolved(loaded)) <= {name}
        assert pin_base(changed, name, DIGEST) == changed


def test_a_target_without_a_digest_line(targets: dict[str, Target]) -> None:
    with pytest.raises(TargetsFileError, match="no digest line"):
        pin_base('[cpu.base]\ntag = "x"\n[cpu.torch]\ndigest = "unresolved"\n', "cpu", DIGEST)
    assert "cpu" in targets


def test_a_lock_is_sorted_whatever_order_it_was_resolved_in(targets: dict[str, Target]) -> None:
    pins = {"zlib": ("1", {"b" * 64, "a" * 64}), "abc": ("2.0", {"c" * 64})}
    text = lock_text(targets["cpu"], pins, "a note")

    assert text == lock_text(targets["cpu"], dict(reversed(pins.items())), "a note")
    assert text.index("abc==2.0") < text.index("zlib==1")
    assert text.index("a" * 64) < text.index("b" * 64)
    assert "# a note\n" in text
    assert "unresolved" in text
