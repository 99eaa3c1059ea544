"""How a container is given its accelerator: the choice, and the golden arguments of each way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from launching import tiny_job

from narrowgauge.container import ContainerPlan, create_body, docker_run_words
from narrowgauge.plan import Places, User, plan_container
from narrowgauge.selection import choose_accelerator
from narrowgauge.targets import Accelerator, load_targets

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")

NVIDIA = ("io.containerd.runc.v2", "nvidia", "runc")
PLAIN = ("io.containerd.runc.v2", "runc")

#: (target, the engine's runtimes, whether it offers CDI) → how the GPU is given.
CHOICES = [
    ("cpu", PLAIN, False, Accelerator.NONE),
    ("cpu", NVIDIA, True, Accelerator.NONE),
    ("desktop", NVIDIA, False, Accelerator.DEVICE_REQUEST),
    ("desktop", NVIDIA, True, Accelerator.DEVICE_REQUEST),
    # Nothing offered: the first way is tried, and the engine's refusal is translated. The hook
    # that --gpus needs shows in no answer of the engine, so it may be there all the same.
    ("desktop", PLAIN, False, Accelerator.DEVICE_REQUEST),
    ("desktop", PLAIN, True, Accelerator.DEVICE_REQUEST),
    ("desktop-next", NVIDIA, True, Accelerator.DEVICE_REQUEST),
    ("desktop-next", PLAIN, True, Accelerator.CDI),
    ("desktop-next", PLAIN, False, Accelerator.DEVICE_REQUEST),
    ("jetson", NVIDIA, False, Accelerator.NVIDIA_RUNTIME),
    ("jetson", PLAIN, True, Accelerator.NVIDIA_RUNTIME),
    ("jetson-next", NVIDIA, True, Accelerator.NVIDIA_RUNTIME),
]

#: What each way adds to the words of `docker run`, in their order.
WORDS = {
    Accelerator.NONE: [],
    Accelerator.DEVICE_REQUEST: ["--group-add", "44", "--gpus", "all"],
    Accelerator.CDI: ["--group-add", "44", "--device", "nvidia.com/gpu=all"],
    Accelerator.NVIDIA_RUNTIME: [
        *["--group-add", "44", "--runtime", "nvidia"],
        *["--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
        *["--env", "NVIDIA_VISIBLE_DEVICES=all"],
    ],
}

#: What each way changes in the body of the create call: HostConfig, and what is added to Env.
BODIES: dict[Accelerator, tuple[dict[str, Any], list[str]]] = {
    Accelerator.NONE: ({}, []),
    Accelerator.DEVICE_REQUEST: (
        {
            "GroupAdd": ["44"],
            "DeviceRequests": [
                {"Driver": "", "Count": -1, "Capabilities": [["gpu"]], "Options": {}}
            ],
        },
        [],
    ),
    Accelerator.CDI: (
        {
            "GroupAdd": ["44"],
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}],
        },
        [],
    ),
    Accelerator.NVIDIA_RUNTIME: (
        {"GroupAdd": ["44"], "Runtime": "nvidia"},
        ["NVIDIA_DRIVER_CAPABILITIES=compute,utility", "NVIDIA_VISIBLE_DEVICES=all"],
    ),
}


def planned(accelerator: Accelerator) -> ContainerPlan:
    return plan_container(
        tiny_job(),
        TARGETS["desktop-next"],
        image="narrowgauge/desktop-next:01234567",
        cache="narrowgauge-cache",
        places=Places(Path("/results/r1"), Path("/checkout/experiments"), None),
        user=User(1000, 1001, ("44",)),
        accelerator=accelerator,
    )


@pytest.mark.parametrize(("target", "runtimes", "cdi", "way"), CHOICES)
def test_the_accelerator_is_given_in_the_first_way_the_engine_offers(
    target: str, runtimes: tuple[str, ...], cdi: bool, way: Accelerator
) -> None:
    assert choose_accelerator(TARGETS[target], runtimes, cdi) is way


def test_every_way_is_chosen_somewhere_and_has_its_golden_arguments() -> None:
    assert {way for *_, way in CHOICES} == set(Accelerator) == set(WORDS) == set(BODIES)


@pytest.mark.parametrize("way", Accelerator)
def test_the_words_of_docker_run_are_the_golden_ones(way: Accelerator) -> None:
    none = list(docker_run_words(planned(Accelerator.NONE)))
    words = list(docker_run_words(planned(way)))

    assert _added(none, words) == WORDS[way]


@pytest.mark.parametrize("way", Accelerator)
def test_the_create_call_is_the_golden_one(way: Accelerator) -> None:
    none, body = create_body(planned(Accelerator.NONE)), create_body(planned(way))
    host, added = BODIES[way]

    assert body["HostConfig"] == {**none["HostConfig"], **host}
    assert body["Env"] == [*none["Env"], *added]
    without = {key: value for key, value in body.items() if key not in ("HostConfig", "Env")}
    assert without == {key: none[key] for key in without}


@pytest.mark.parametrize("way", Accelerator)
def test_no_way_opens_the_cage(way: Accelerator) -> None:
    words = docker_run_words(planned(way))

    assert {"--read-only", "--cap-drop", "no-new-privileges"} <= set(words)
    assert "--privileged" not in words
    assert words[words.index("--network") + 1] == "none"
    assert create_body(planned(way))["HostConfig"]["ReadonlyRootfs"] is True


def test_a_target_with_one_way_never_gets_another() -> None:
    only = dataclasses.replace(TARGETS["desktop-next"], accelerators=(Accelerator.CDI,))

    assert choose_accelerator(only, NVIDIA, cdi=False) is Accelerator.CDI


def _added(before: list[str], after: list[str]) -> list[str]:
    """The words of `after` that `before` has not; fails where one of `before` is missing."""
    left = list(before)
    added = []
    for word in after:
        if left and word == left[0]:
            left.pop(0)
        else:
            added.append(word)
    assert not left, f"missing: {left}"
    return added
