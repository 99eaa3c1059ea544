"""The table of hosts: which target each gets, or why none and what would help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from narrowgauge.checkout import Checkout
from narrowgauge.fitting import Bound, nearest_miss, refusal, refusals, remedies, runs_on
from narrowgauge.launch import World, choose
from narrowgauge.machine import Gpu, Host, probe_host
from narrowgauge.plan import JobRequest
from narrowgauge.selection import pick_target
from narrowgauge.targets import load_targets
from narrowgauge_contract.errors import NotApplicableError

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")


def cards(*capabilities: str, driver: str, architecture: str = "amd64") -> Host:
    found = tuple(Gpu(f"card {number}", number, 1 << 34, {}) for number in capabilities)
    return Host(architecture, found, driver)


def board(l4t: str, soc: str | None = None) -> Host:
    return Host("arm64", l4t=l4t, soc=soc)


#: host → the target it gets without `--on`.
GETS = [
    (Host("amd64"), "cpu"),
    (Host("arm64"), "cpu"),
    (cards("7.0", driver="470.82.01"), "desktop"),
    (cards("7.0", driver="580.65.06"), "desktop"),
    (cards("7.5", driver="470.42.01"), "desktop"),
    (cards("8.0", driver="535.104"), "desktop"),
    (cards("8.6", driver="580.65.06"), "desktop"),
    (cards("8.9", driver="580.65.06"), "desktop-next"),
    (cards("9.0", driver="580.0"), "desktop-next"),
    (cards("10.0", driver="580.65.06"), "desktop-next"),
    (cards("10.3", driver="580.65.06"), "desktop-next"),
    (cards("12.0", driver="581.15"), "desktop-next"),
    (cards("12.1", driver="580.65.06"), "desktop-next"),
    (cards("7.0", "8.6", driver="470.82"), "desktop"),
    (cards("8.6", "9.0", driver="580.65"), "desktop-next"),
    (board("35.1.0"), "jetson"),
    (board("35.2.1", "tegra194"), "jetson"),
    (board("35.4.1", "tegra234"), "jetson"),
    (board("36.2.0", "tegra234"), "jetson-next"),
    (board("36.4.3", "tegra234"), "jetson-next"),
    # An Orin on JetPack 6 has an NVML too, and a driver of its own numbering.
    (
        Host("arm64", (Gpu("Orin (nvgpu)", "8.7", None, {}),), "540.4.0", "36.4.3", soc="tegra234"),
        "jetson-next",
    ),
]

#: host → (what the reasons say, what the ways out say, what they must not say).
REFUSED = [
    # Pascal: nothing is compiled for it, and no driver helps.
    (
        cards("6.1", driver="580.65"),
        ["desktop: card 6.1 has compute capability 6.1, below 7.0"],
        ["--on cpu", "--executor native"],
        ["driver"],
    ),
    # Volta: only 21.07 knows it, and that asks for driver 470.
    (
        cards("7.0", driver="450.119"),
        ["desktop: it needs driver 470 or newer, this host has 450.119", "below 7.5"],
        ["update the NVIDIA driver to 470 or newer: target 'desktop' then works"],
        ["580"],
    ),
    (
        cards("8.6", driver="460.32"),
        ["needs driver 470 or newer", "needs driver 580 or newer"],
        ["to 470 or newer: target 'desktop'", "to 580 or newer: target 'desktop-next'"],
        [],
    ),
    (
        cards("8.9", driver="470.82"),
        [
            "desktop: card 8.9 has compute capability 8.9, above 8.6: its CUDA 11.4",
            "desktop-next: it needs driver 580 or newer, this host has 470.82",
        ],
        ["update the NVIDIA driver to 580 or newer: target 'desktop-next' then works"],
        ["'desktop'"],
    ),
    (
        cards("9.0", driver="550.54.15"),
        ["desktop-next: it needs driver 580 or newer"],
        ["to 580 or newer"],
        [],
    ),
    (cards("12.0", driver="570.86"), ["needs driver 580"], ["to 580 or newer"], []),
    # Newer than everything.
    (cards("13.0", driver="700.1"), ["above 12.1: its CUDA 13.0 does not know"], ["--on cpu"], []),
    # In range, and no machine code that is compiled runs on it.
    (
        cards("11.0", driver="580.65"),
        ["desktop-next: card 11.0 has compute capability 11.0, and its kernels are compiled for"],
        ['add "11.0" to the capabilities of [desktop-next]'],
        [],
    ),
    # Two generations that no one image serves.
    (
        cards("6.1", "8.6", driver="580.65"),
        ["card 6.1 has compute capability 6.1, below 7.0; a container gets all GPUs of a host"],
        ["--executor native"],
        [],
    ),
    (cards("7.0", "9.0", driver="580.65"), ["card 9.0", "card 7.0"], ["--on cpu"], ["driver"]),
    # Xavier and its elders on JetPack 4.
    (
        board("32.7.1", "tegra194"),
        ["jetson: it needs L4T 35.1 or newer, this board has 32.7.1 (JetPack 4, whose Python 3.6"],
        ["flash JetPack 5.1 (L4T 35): target 'jetson' then works", "--on cpu"],
        ["JetPack 6"],
    ),
    (board("32.6.1"), ["JetPack 4"], ["flash JetPack 5.1 (L4T 35)"], ["JetPack 6"]),
    (board("32.7.1", "tegra210"), ["the tegra210 has compute capability 5.3"], ["cpu"], ["flash"]),
    (board("32.7.1", "tegra186"), ["compute capability 6.2, below 7.2"], ["cpu"], ["flash"]),
    # Orin on releases to come; the ranges that exist are named.
    (
        board("38.2.0", "tegra234"),
        [
            "jetson: it is for L4T from 35.1 to below 36.0, this board has 38.2.0",
            "jetson-next: it is for L4T from 36.0 to below 37.0, this board has 38.2.0",
        ],
        ["flash JetPack 5.1 (L4T 35)", "flash JetPack 6 (L4T 36)"],
        [],
    ),
    (board("39.0", "tegra234"), ["to below 37.0"], ["flash JetPack 6 (L4T 36)"], []),
    # It may be a Thor, which takes none of the older releases.
    (board("38.2.0"), ["to below 37.0"], ["--on cpu"], ["flash"]),
    # Thor: too new a release and a GPU that neither knows.
    (
        board("38.2.0", "tegra264"),
        ["to below 37.0", "the tegra264 has compute capability 11.0, above 8.7"],
        ["--on cpu"],
        ["flash"],
    ),
    # Servers and desks with arm64: Grace Hopper, GB10.
    (
        cards("9.0", driver="580.65", architecture="arm64"),
        ["desktop-next: its image is for amd64, this host is arm64", "jetson: it is for a Jetson"],
        ["--on cpu", "--executor native --lab-python"],
        ["driver", "flash"],
    ),
    (
        cards("12.1", driver="580.95", architecture="arm64"),
        ["its image is for amd64"],
        ["--on cpu"],
        [],
    ),
    (Host("riscv64"), ["cpu: its image is for amd64, arm64"], ["--executor native"], ["--on"]),
]


@pytest.mark.parametrize(("host", "name"), GETS, ids=lambda value: str(value)[:60])
def test_a_host_gets_its_target(host: Host, name: str) -> None:
    assert pick_target(TARGETS, host, None).name == name
    assert pick_target(TARGETS, host, name).name == name


@pytest.mark.parametrize(
    ("host", "reasons", "ways", "never"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_a_host_that_none_fits_is_told_why_and_what_helps(
    host: Host, reasons: list[str], ways: list[str], never: list[str]
) -> None:
    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, host, None)

    for reason in reasons:
        assert reason in refused.value.why
    for way in ways:
        assert way in refused.value.next_step
    for word in never:
        assert word not in refused.value.next_step
    assert all(f"{name}: " in refused.value.why for name in TARGETS)


@pytest.mark.parametrize("host", [host for host, *_ in REFUSED], ids=lambda value: str(value)[:60])
def test_every_remedy_names_a_target_that_only_one_thing_keeps_away(host: Host) -> None:
    for remedy in remedies(TARGETS, host):
        name = remedy.split("'")[1]
        assert len(refusals(TARGETS[name], host)) == 1


def test_a_named_target_says_all_that_is_in_the_way_and_no_remedy_that_is_not_enough() -> None:
    with pytest.raises(NotApplicableError) as one:
        pick_target(TARGETS, cards("8.9", driver="470.82"), "desktop-next")
    with pytest.raises(NotApplicableError) as two:
        pick_target(TARGETS, cards("8.9", driver="450.1"), "desktop")

    assert one.value.next_step == "update the NVIDIA driver to 580 or newer; or --on cpu"
    assert "above 8.6" in two.value.why
    assert "needs driver 470" in two.value.why
    assert two.value.next_step == "--on cpu"


def test_another_accelerators_target_is_the_first_way_out() -> None:
    with pytest.raises(NotApplicableError) as refused:
        pick_target(TARGETS, cards("9.0", driver="580.159.04"), "desktop")

    assert refused.value.next_step == "--on desktop-next or cpu"


def test_each_refusal_says_which_bound_it_is() -> None:
    next_ = TARGETS["desktop-next"]

    assert [r.bound for r in refusals(next_, cards("7.0", driver="470.1"))] == [
        Bound.CAPABILITY,
        Bound.DRIVER,
    ]
    grace = cards("9.0", driver="550.1", architecture="arm64")
    assert [r.bound for r in refusals(next_, grace)] == [Bound.ARCHITECTURE, Bound.DRIVER]
    assert [r.bound for r in refusals(next_, Host("amd64"))] == [Bound.GPU]
    assert refusal(next_, cards("9.0", driver="580.1")) is None


def test_the_nearest_miss_is_the_one_that_can_be_mended() -> None:
    def nearest(host: Host) -> str | None:
        target = nearest_miss(TARGETS, host)
        return target and target.name

    assert nearest(cards("8.9", driver="470.82")) == "desktop-next"
    assert nearest(cards("7.0", driver="450.1")) == "desktop"
    assert nearest(board("32.7.1", "tegra194")) == "jetson"
    assert nearest(board("38.2.0", "tegra264")) in ("jetson", "jetson-next")
    assert nearest(Host("amd64")) is None
    # A GB10 and a Grace Hopper are no Jetson, and a Jetson is no PC.
    assert nearest(cards("12.1", driver="580.95", architecture="arm64")) == "desktop-next"
    assert nearest(cards("9.0", driver="580.95", architecture="arm64")) == "desktop-next"
    assert nearest(board("32.7.1", "tegra210")) == "jetson"


@pytest.mark.parametrize(
    ("compiled", "capability", "tegra", "runs"),
    [
        ("8.6", "8.6", False, True),
        ("8.6", "8.9", False, True),  # same major, higher minor
        ("8.6", "8.0", False, False),
        ("8.0", "9.0", False, False),
        ("7.0", "7.5", False, True),
        ("10.0", "10.3", False, True),
        ("12.0", "12.1", False, True),
        ("10.0", "12.0", False, False),
        ("9.0a", "9.0", False, True),  # an `a` runs on its own only
        ("10.0a", "10.3", False, False),
        ("7.2", "7.2", True, True),
        ("8.7", "8.7", True, True),
        ("8.6", "8.7", True, False),  # NVIDIA promises nothing between minors on a Jetson
        ("7.0", "7.2", True, False),
    ],
)
def test_machine_code_runs_on_its_own_major_and_later_minors(
    compiled: str, capability: str, tegra: bool, runs: bool
) -> None:
    assert runs_on(compiled, capability, tegra=tegra) is runs


def test_in_range_is_not_enough_where_nothing_compiled_runs() -> None:
    """Ada within `desktop`'s range would still run its 8.6 code; a list without 8.x would not."""
    wide = dataclasses.replace(TARGETS["desktop"].fits, capability_most="8.9")
    ada = cards("8.9", driver="580.1")
    runs = dataclasses.replace(TARGETS["desktop"], fits=wide)
    cannot = dataclasses.replace(runs, capabilities=("7.0", "7.5"))
    found = refusal(cannot, ada)

    assert refusal(runs, ada) is None
    assert found is not None
    assert found.bound is Bound.CAPABILITY
    assert "compiled for 7.0, 7.5, none of which runs there" in found.reason


def test_auto_tells_the_refusal_where_no_native_environment_is_possible_either(
    tiny_checkout: Path,
) -> None:
    world = World(Checkout(tiny_checkout), {"PATH": ""}, cards("8.9", driver="470.82"), print)
    request = JobRequest("tiny", "smoke", (), 0)
    with pytest.raises(NotApplicableError, match="no target fits") as refused:
        choose(world, request, on=None, executor="auto", lab_python=None)

    assert "update the NVIDIA driver to 580" in refused.value.next_step


def test_every_target_can_be_reached_by_some_host_of_the_table() -> None:
    assert {name for _, name in GETS} == set(TARGETS)


@pytest.mark.parametrize(
    ("folder", "files", "problem"),
    [
        ("nouveau", {"vendor": "0x10de\n", "class": "0x030000\n"}, "no driver is loaded"),
        ("compute card", {"vendor": "0x10de\n", "class": "0x030200\n"}, "no driver is loaded"),
        ("its sound", {"vendor": "0x10de\n", "class": "0x040300\n"}, None),
        ("a switch", {"vendor": "0x10de\n", "class": "0x068000\n"}, None),
        ("another's", {"vendor": "0x8086\n", "class": "0x030000\n"}, None),
    ],
)
def test_a_card_without_a_driver_is_not_a_host_without_a_gpu(
    tmp_path: Path, folder: str, files: dict[str, str], problem: str | None
) -> None:
    place = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    host = probe_host(tmp_path, "x86_64")

    if problem is None:
        assert pick_target(TARGETS, host, None).name == "cpu"
        return
    assert problem in (host.driver_problem or "")
    with pytest.raises(NotApplicableError, match="does not answer") as refused:
        pick_target(TARGETS, host, None)
    assert "--on cpu" in refused.value.next_step
    assert pick_target(TARGETS, host, "cpu").name == "cpu"


@pytest.mark.parametrize(
    ("line", "compatible", "l4t", "soc", "target"),
    [
        (
            "# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t186ref, EABI: aarch64,"
            " DATE: Sat Feb 19 17:07:00 UTC 2022",
            "nvidia,p2972-0000\0nvidia,tegra194\0",
            "32.7.1",
            "tegra194",
            None,
        ),
        (
            "# R35 (release), REVISION: 2.1, GCID: 32413640, BOARD: t186ref, EABI: aarch64,"
            " DATE: Tue Jan 24 23:38:33 UTC 2023",
            "nvidia,galen\0nvidia,jetson-xavier\0nvidia,p2822-0000+p2888-0004\0nvidia,tegra194\0",
            "35.2.1",
            "tegra194",
            "jetson",
        ),
        (
            "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64,"
            " DATE: Wed Jan  8 01:49:37 UTC 2025",
            "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
            "36.4.3",
            "tegra234",
            "jetson-next",
        ),
        (
            "# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic, EABI: aarch64,"
            " DATE: Fri Aug 22 00:55:42 UTC 2025",
            "nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0",
            "38.2.0",
            "tegra264",
            None,
        ),
    ],
)
def test_a_board_is_known_by_its_release_and_its_device_tree(
    tmp_path: Path, line: str, compatible: str, l4t: str, soc: str, target: str | None
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(f"{line}\n# KERNEL_VARIANT: oot\n")
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/compatible").write_text(compatible)
    host = probe_host(tmp_path, "aarch64")

    assert (host.l4t, host.soc) == (l4t, soc)
    assert soc in host.describe()
    if target is not None:
        assert pick_target(TARGETS, host, None).name == target
        return
    with pytest.raises(NotApplicableError):
        pick_target(TARGETS, host, None)
