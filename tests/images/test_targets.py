"""docker/targets.toml and its parser: closed, kind, and honest about what is not pinned."""

from __future__ import annotations

import copy
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
    "available": True,
    "architectures": ["amd64"],
    "python": "3.11",
    "cuda": "13.0",
    "tensorrt": "10.13",
    "capabilities": ["8.6", "9.0a"],
    "accelerators": ["device-request", "cdi"],
    "builder": "buildkit",
    "read_only_root": True,
    "packages": ["numpy"],
    "base": {"repository": "nvcr.io/nvidia/tensorrt", "tag": "25.08-py3", "digest": DIGEST},
    "torch": {"version": "2.11.0", "install": ["torch==2.11.0"]},
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


def test_only_what_has_an_image_is_available(targets: dict[str, Target]) -> None:
    for target in targets.values():
        folder = ROOT / "images" / target.name
        assert target.available == (folder / "Dockerfile").is_file()
        assert target.available == (folder / "verify").is_file()
        assert target.available == (ROOT / f"docker/locks/{target.name}.txt").is_file()


def test_unresolved_digests_are_listed_never_invented(targets: dict[str, Target]) -> None:
    text = (ROOT / TARGETS_FILE).read_text(encoding="utf-8")
    digests = re.findall(r'^digest = "(.*)"', text, re.MULTILINE)

    assert len(digests) == len(targets)
    assert digests.count("unresolved") == len(unresolved(targets))
    assert all(re.fullmatch(r"unresolved|sha256:[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests) - {"unresolved"}) == len(targets) - len(unresolved(targets))


def test_no_jetson_is_given_its_gpu_by_device_request(targets: dict[str, Target]) -> None:
    for target in targets.values():
        if target.fits.l4t_least:
            assert target.accelerators == (Accelerator.NVIDIA_RUNTIME,)


def test_a_good_table_parses() -> None:
    target = parse_targets({"test": GOOD})["test"]

    assert target.base.reference == f"nvcr.io/nvidia/tensorrt:25.08-py3@{DIGEST}"
    assert target.accelerators == (Accelerator.DEVICE_REQUEST, Accelerator.CDI)
    assert target.alias == "narrowgauge/test:local"
    assert unresolved({"test": target}) == ()


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
        ("torch.instal", [], "did you mean 'install'"),
        ("accelerators", ["device-requst"], "did you mean 'device-request'"),
        ("builder", "buildkid", "did you mean 'buildkit'"),
        ("architectures", ["x86_64"], "Known: amd64, arm64"),
        ("architectures", [], "should be some of"),
        ("title", None, "lacks 'title'"),
        ("base", None, "lacks 'base'"),
        ("base", "python:3", "should be a table"),
        ("available", "yes", "true or false"),
        ("python", 3.11, "should be a text"),
        ("python", "three", "should be like"),
        ("capabilities", ["86"], "list of texts like"),
        ("capabilities", "8.6", "a list of texts"),
        ("capabilities", [], "'cuda' and 'capabilities'"),
        ("base.digest", "sha256:123", "narrowgauge images lock"),
        ("base.digest", "", "should be a text"),
        ("base.repository", "Python", "should be like"),
        ("base.tag", "a b", "should be like"),
        ("torch.version", "2.12.0", "lacks torch==2.12.0"),
        ("torch.install", [], "belong together"),
        ("fits.needs_gpu", False, "contradict"),
        ("available", False, "'planned' must say"),
        ("planned", "later", "nothing to say"),
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
