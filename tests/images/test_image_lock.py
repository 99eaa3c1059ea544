"""Pins are written by a program: digests into targets.toml, packages into locks."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest

from narrowgauge.errors import BaseUnreachable, BuildFailed, TargetsFileError
from narrowgauge.images import lock
from narrowgauge.images.client import BuildClient
from narrowgauge.images.lock import (
    lock_text,
    pin_base,
    pin_packages,
    pin_torch,
    resolve_digest,
    resolve_torch,
)
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
        assert "base" not in loaded[name].unresolved
        others = {each: pins for each, pins in unresolved(targets).items() if each != name}
        assert others.items() <= unresolved(loaded).items()
        assert pin_base(changed, name, DIGEST) == changed


def test_a_target_without_a_digest_line(targets: dict[str, Target]) -> None:
    with pytest.raises(TargetsFileError, match="no digest line"):
        pin_base('[cpu.base]\ntag = "x"\n[cpu.torch]\ndigest = "unresolved"\n', "cpu", DIGEST)
    assert "cpu" in targets


def test_a_lock_is_sorted_whatever_order_it_was_resolved_in(targets: dict[str, Target]) -> None:
    pins = {"zlib": ("1", {"b" * 64, "a" * 64}), "abc": ("2.0", {"c" * 64})}
    text = lock_text(targets["cpu"], ["abc"], pins)

    assert text == lock_text(targets["cpu"], ["abc"], dict(reversed(pins.items())))
    assert text.index("abc==2.0") < text.index("zlib==1")
    assert text.index("a" * 64) < text.index("b" * 64)
    assert "# For Python 3.11, amd64 and arm64: abc\n" in text


def test_pinning_torch_changes_its_line_and_no_other(
    targets: dict[str, Target], tmp_path: Path
) -> None:
    text = (ROOT / TARGETS_FILE).read_text(encoding="utf-8")
    hashes = {name: ["ab" * 32] * len(each.architectures) for name, each in targets.items()}
    for name, target in targets.items():
        if target.torch.version is None:
            with pytest.raises(TargetsFileError, match="no sha256 line"):
                pin_torch(text, name, hashes[name])
            continue
        changed = pin_torch(text, name, hashes[name])
        path = tmp_path / "targets.toml"
        path.write_text(changed, encoding="utf-8")
        assert load_targets(path)[name].torch.sha256 == tuple(hashes[name])
        assert len(set(changed.splitlines()) - set(text.splitlines())) == 1
        assert pin_torch(changed, name, hashes[name]) == changed


def fake_pip(monkeypatch: pytest.MonkeyPatch, sha256: str, version: str = "1") -> list[list[str]]:
    """pip answers with one wheel; the words it was called with."""
    calls: list[list[str]] = []
    item = {
        "metadata": {"name": "A_b", "version": version},
        "download_info": {"archive_info": {"hashes": {"sha256": sha256}}},
    }

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, json.dumps({"install": [item]}), "")

    monkeypatch.setattr(lock.subprocess, "run", run)
    return calls


def test_torch_is_asked_of_its_own_index_for_each_architecture(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, "ef" * 32)

    assert resolve_torch(targets["cpu"]) == ("ef" * 32, "ef" * 32)
    assert resolve_torch(targets["jetson"]) == ()
    assert len(calls) == 2
    assert "torch==2.13.0" in calls[0]
    assert "https://download.pytorch.org/whl/cpu" in calls[0]
    assert any(word.endswith("_aarch64") for word in calls[1])
    # torch_stable.html calls its wheels so.
    assert "--platform=linux_x86_64" in calls[0]


def test_the_old_python_is_given_only_the_platform_that_its_pip_knows(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, "ef" * 32)
    pin_packages(targets["desktop"], ["numpy"])
    pin_packages(targets["desktop-next"], ["numpy"])

    old, new = ([w for w in words if w.startswith("--platform")] for words in calls)
    assert old == ["--platform=manylinux2014_x86_64"]
    assert "--platform=manylinux_2_27_x86_64" in new


def test_pip_that_fails_is_an_error_with_its_words(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", "ERROR: no matching distribution")

    monkeypatch.setattr(lock.subprocess, "run", run)
    with pytest.raises(BuildFailed, match="cannot be resolved for amd64") as raised:
        pin_packages(targets["desktop"], ["numpy"])
    assert "no matching distribution" in raised.value.why
