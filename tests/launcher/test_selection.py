"""Which target a host gets, and why another is refused, before anything is built."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from launching import tiny_spec

from narrowgauge.machine import Gpu, Host
from narrowgauge.selection import (
    check_experiment,
    pick_target,
    torch_satisfies,
)
from narrowgauge.targets import load_targets
from narrowgauge_contract.errors import (
    ExitCode,
    ExperimentFileError,
    NotApplicableError,
    UnknownNameError,
)

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")
LAPTOP = Host("amd64")
PI = Host("arm64")


def pc(capability: str, driver: str = "580.65") -> Host:
    return Host("amd64", (Gpu("a card", capability, 1 << 34, {}),), driver)


def jetson(l4t: str) -> Host:
    return Host("arm64", l4t=l4t)


def test_a_host_with_a_gpu_never_gets_the_cpu_by_itself() -> None:
    old = pc("6.1")

    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, old, None)
    assert "compute capability 6.1, below 7.0" in refused.value.why
    assert pick_target(TARGETS, old, "cpu").name == "cpu"


def test_an_unknown_host_is_an_error_that_lists_the_targets() -> None:
    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, Host("riscv64"), None)

    assert all(name in refused.value.why for name in TARGETS)
    assert refused.value.exit_code == ExitCode.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("target", "host", "reason"),
    [
        ("desktop", LAPTOP, "shows none"),
        ("desktop", PI, "its image is for amd64"),
        ("desktop", pc("9.0"), "above 8.6"),
        ("desktop-next", pc("9.0", "550.54"), "it needs driver 580 or newer"),
        ("jetson", jetson("32.7.1"), "JetPack 4"),
        ("jetson", jetson("36.2"), "to below 36.0"),
        ("jetson-next", jetson("35.4"), "L4T 36.0 or newer"),
    ],
)
def test_a_named_target_that_cannot_work_is_refused_with_the_reason(
    target: str, host: Host, reason: str
) -> None:
    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, host, target)

    assert reason in refused.value.why


def test_the_way_out_names_what_works_here() -> None:
    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, LAPTOP, "desktop")

    assert refused.value.next_step == "--on cpu"


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as unknown:
        pick_target(TARGETS, LAPTOP, "desktp")

    assert unknown.value.nearest == "desktop"


@pytest.mark.parametrize(
    ("specifier", "version", "meets"),
    [
        (">=1.8", "1.8.0+cu111", True),
        (">=1.8", "1.7.1", False),
        (">=2.0,<3", "2.13.0", True),
        (">=2.0,<2.13", "2.13.0", False),
        ("==2.13", "2.13.0", True),
        ("!=2.13.0", "2.13", False),
        (">2.9", "2.13.0", True),
        ("", "1.0", True),
    ],
)
def test_versions_compare_as_numbers(specifier: str, version: str, meets: bool) -> None:
    assert torch_satisfies(specifier, version) is meets


def test_a_specifier_of_another_form_is_an_error() -> None:
    with pytest.raises(ExperimentFileError, match="not understood"):
        torch_satisfies("~=2.0", "2.13.0")


def test_an_experiment_that_needs_a_newer_torch_names_the_targets_that_have_it() -> None:
    spec = dataclasses.replace(tiny_spec(), requires_torch=">=2.0")

    with pytest.raises(NotApplicableError) as refused:
        check_experiment(spec, TARGETS["desktop"], TARGETS, pc("8.6"))
    assert "cpu" in refused.value.next_step
    assert "desktop-next" in refused.value.next_step
    check_experiment(spec, TARGETS["cpu"], TARGETS, LAPTOP)


def test_an_experiment_that_needs_an_accelerator_is_refused_without_one() -> None:
    spec = dataclasses.replace(tiny_spec(), requires_accelerator=True)

    with pytest.raises(NotApplicableError, match="target 'cpu' gives none"):
        check_experiment(spec, TARGETS["cpu"], TARGETS, LAPTOP)
    with pytest.raises(NotApplicableError, match="this host shows none"):
        check_experiment(spec, None, TARGETS, LAPTOP)
    check_experiment(spec, None, TARGETS, pc("9.0"))


def test_a_broken_driver_is_not_a_host_without_a_gpu() -> None:
    broken = dataclasses.replace(LAPTOP, driver_problem="Driver/library version mismatch")

    with pytest.raises(NotApplicableError, match="does not answer: Driver/library") as refused:
        pick_target(TARGETS, broken, None)
    assert "--on cpu" in refused.value.next_step
    assert pick_target(TARGETS, broken, "cpu").name == "cpu"


def test_a_named_accelerators_target_is_told_of_the_broken_driver() -> None:
    broken = dataclasses.replace(LAPTOP, driver_problem="Driver/library version mismatch")
    with pytest.raises(NotApplicableError) as desktop:
        pick_target(TARGETS, broken, "desktop")
    with pytest.raises(NotApplicableError) as jetson:
        pick_target(TARGETS, broken, "jetson")

    assert "does not answer: Driver/library version mismatch" in desktop.value.why
    assert "shows none" not in desktop.value.why
    assert "without an NVIDIA GPU" not in desktop.value.what
    assert (
        desktop.value.next_step == "mend the NVIDIA driver (after its update: reboot); or --on cpu"
    )
    assert "it is for a Jetson" in jetson.value.why
    assert jetson.value.next_step == "--on cpu"
