"""docker/targets.toml and its parser: closed, kind, and honest about what is not pinned."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import ExitCode, TargetsFileError, UnknownNameError
from narrowgauge.targets import (
    TARGETS_FILE,
    Accelerator,
    Builder,
    Target,
    Torch,
    load_targets,
    parse_targets,
    target_named,
    unresolved,
    version_tuple,
)

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4
GOOD: dict[str, Any] = {
    "title": "a test",
    "architectures": ["amd64"],
    "python": "3.11",
    "cuda": "13.0",
    "tensorrt": "10.13",
    "capabilities": ["8.6", "9.0a"],
    "accelerators": ["device-request", "cdi"],
    "builder": "buildkit",
    "read_only_root": True,
    "site_packages": False,
    "setup": [],
    "packages": ["numpy"],
    "notebook": ["jupyterlab"],
    "base": {"repository": "nvcr.io/nvidia/tensorrt", "tag": "25.08-py3", "digest": DIGEST},
    "torch": {"version": "2.11.0", "source": [], "sha256": ["ab" * 32]},
    "fits": {"needs_gpu": True, "capability_least": "7.5", "driver_least": "580.0"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good table with one key replaced; None takes it away."""
    body = copy.deepcopy(GOOD)
    table = body
    *folders, key = path.split(".")
    for folder in folders:
        table = table[folder]
    if value is None:
        del table[key]
    else:
        table[key] = value
    return {"test": body}


def test_the_five_targets_of_the_design(targets: dict[str, Target]) -> None:
    assert list(targets) == ["cpu", "desktop", "jetson", "desktop-next", "jetson-next"]
    assert targets["desktop"].base.reference.startswith("nvcr.io/nvidia/tensorrt:21.07-py3")
    assert targets["desktop"].capabilities == ("7.0", "7.5", "8.0", "8.6")
    assert targets["jetson"].accelerators == (Accelerator.NVIDIA_RUNTIME,)
    assert "9.0a" in targets["desktop-next"].capabilities


def test_every_target_has_an_image_and_a_lock(targets: dict[str, Target]) -> None:
    for target in targets.values():
        folder = ROOT / "images" / target.name
        assert (folder / "Dockerfile").is_file()
        assert os.access(folder / "verify", os.X_OK)
        assert (ROOT / f"docker/locks/{target.name}.txt").is_file()
        notebook = ROOT / f"docker/locks/{target.name}-notebook.txt"
        assert notebook.is_file() == bool(target.notebook)


def test_a_notebook_changes_no_package_that_runs_use(targets: dict[str, Target]) -> None:
    """Its lock is installed over the other: another numpy would measure something else."""
    pin = re.compile(r"^([a-z0-9.-]+)==(\S+)", re.MULTILINE)
    for target in targets.values():
        if target.notebook:
            locks = (ROOT / f"docker/locks/{target.name}{part}.txt" for part in ("", "-notebook"))
            runs, notebook = (dict(pin.findall(lock.read_text())) for lock in locks)
            assert {n: v for n, v in notebook.items() if runs.get(n, v) != v} == {}, target.name


def test_unresolved_digests_are_listed_never_invented(targets: dict[str, Target]) -> None:
    text = (ROOT / TARGETS_FILE).read_text(encoding="utf-8")
    digests = re.findall(r'^digest = "(.*)"', text, re.MULTILINE)
    unpinned = [name for name, pins in unresolved(targets).items() if "base" in pins]

    assert len(digests) == len(targets)
    assert digests.count("unresolved") == len(unpinned)
    assert all(re.fullmatch(r"unresolved|sha256:[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests) - {"unresolved"}) == len(targets) - len(unpinned)


def test_each_pin_that_nobody_resolved_is_named() -> None:
    def pins(path: str, value: Any) -> tuple[str, ...]:
        return parse_targets(changed(path, value))["test"].unresolved

    index = "nvidia-pyindex==1.0.9 --hash=sha256:" + "cd" * 32
    optional = {"index": index, "packages": ["x==1"], "imports": "x"}
    assert pins("title", "all pinned") == ()
    assert pins("base.digest", "unresolved") == ("base",)
    assert pins("torch.sha256", ["unresolved"]) == ("torch",)
    assert pins("optional", optional) == ()  # no lock could resolve it


def test_a_torch_of_the_base_has_no_hash_to_resolve() -> None:
    document = changed("torch", {})
    document["test"]["site_packages"] = True
    target = parse_targets(document)["test"]

    assert target.torch == Torch()
    assert target.unresolved == ()


def test_another_build_of_the_same_version_has_the_same_public_version() -> None:
    assert Torch("1.8.0+cu111").public_version == "1.8.0"
    assert Torch("2.13.0").public_version == "2.13.0"
    assert Torch().public_version is None


def test_no_jetson_is_given_its_gpu_by_device_request(targets: dict[str, Target]) -> None:
    for target in targets.values():
        if target.fits.l4t_least:
            assert target.accelerators == (Accelerator.NVIDIA_RUNTIME,)


def test_a_good_table_parses() -> None:
    target = parse_targets({"test": GOOD})["test"]

    assert target.base.reference == f"nvcr.io/nvidia/tensorrt:25.08-py3@{DIGEST}"
    assert target.accelerators == (Accelerator.DEVICE_REQUEST, Accelerator.CDI)
    assert target.alias == "narrowgauge/test:local"
    assert unresolved({"test": target}) == {}


@pytest.mark.parametrize("accelerator", list(Accelerator))
def test_every_way_to_give_an_accelerator(accelerator: Accelerator) -> None:
    document = changed("accelerators", [accelerator.value])
    document["test"]["fits"]["needs_gpu"] = accelerator is not Accelerator.NONE

    assert parse_targets(document)["test"].accelerators == (accelerator,)


@pytest.mark.parametrize("builder", list(Builder))
def test_every_builder(builder: Builder) -> None:
    assert parse_targets(changed("builder", builder.value))["test"].builder is builder


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("titel", "x", "did you mean 'title'"),
        ("base.digset", "x", "did you mean 'digest'"),
        ("fits.driver_lest", "1", "did you mean 'driver_least'"),
        ("torch.sourc", [], "did you mean 'source'"),
        ("accelerators", ["device-requst"], "did you mean 'device-request'"),
        ("builder", "buildkid", "did you mean 'buildkit'"),
        ("architectures", ["x86_64"], "Known: amd64, arm64"),
        ("architectures", [], "should be some of"),
        ("title", None, "lacks 'title'"),
        ("base", None, "lacks 'base'"),
        ("base", "python:3", "should be a table"),
        ("site_packages", "yes", "true or false"),
        ("python", 3.11, "should be a text"),
        ("python", "three", "should be like"),
        ("capabilities", ["86"], "list of texts like"),
        ("capabilities", "8.6", "a list of texts"),
        ("capabilities", [], "'cuda' and 'capabilities'"),
        ("base.digest", "sha256:123", "narrowgauge images lock"),
        ("base.digest", "", "should be a text"),
        ("base.repository", "Python", "should be like"),
        ("base.tag", "a b", "should be like"),
        ("torch.source", None, "lacks 'source'"),
        ("torch.sha256", ["abc"], "narrowgauge images lock"),
        ("torch.sha256", ["ab" * 32, "cd" * 32], "one sha256 for each architecture"),
        ("torch", {}, "seen only with site_packages"),
        ("optional", {"index": "nvidia-pyindex", "packages": []}, "should be like"),
        ("setup", "run.sh", "a list of texts"),
        ("fits.needs_gpu", False, "contradict"),
        ("download_mb", 0, "a whole number above 0"),
    ],
)
def test_what_is_wrong_is_said(path: str, value: Any, message: str) -> None:
    with pytest.raises(TargetsFileError) as raised:
        parse_targets(changed(path, value))

    assert message in str(raised.value)
    assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("document", [{}, {"Big": GOOD}, {"test": 3}])
def test_what_is_no_table_of_targets(document: dict[str, Any]) -> None:
    with pytest.raises(TargetsFileError):
        parse_targets(document)


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "targets.toml"
    path.write_text("[cpu\n", encoding="utf-8")

    with pytest.raises(TargetsFileError, match="not valid TOML"):
        load_targets(path)


def test_an_unknown_target_names_the_nearest(targets: dict[str, Target]) -> None:
    with pytest.raises(UnknownNameError, match="unknown target 'desktp'") as raised:
        target_named(targets, "desktp")

    assert "did you mean 'desktop'" in str(raised.value)
    assert "jetson-next" in str(raised.value)


@pytest.mark.parametrize(
    ("low", "high"), [("8.6", "8.9"), ("9.0a", "10.0"), ("35.2.1", "36.0"), ("470.0", "580.65.06")]
)
def test_versions_compare_as_numbers(low: str, high: str) -> None:
    assert version_tuple(low) < version_tuple(high)
