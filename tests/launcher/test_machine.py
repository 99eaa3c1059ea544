"""Host facts come from files and NVML; what is not there is None."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from narrowgauge.machine import Gpu, Host, machine_facts, probe_host


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_empty_root_gives_nothing_and_fails_nowhere(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)

    assert facts.kernel == platform.release()
    assert (facts.driver, facts.l4t, facts.power_mode, facts.docker) == (None, None, None, None)
    assert (facts.gpus, facts.clocks, facts.memory_bytes) == ((), {}, 0)
    assert not probe_host(tmp_path, "x86_64").has_gpu


def test_a_pc_is_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n',
            "proc/cpuinfo": "processor : 0\nmodel name\t: A CPU @ 2 GHz\n",
            "proc/meminfo": "MemTotal:       2048 kB\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "3000000\n",
        },
    )
    facts = machine_facts(root, docker="20.10.24")

    assert facts.system == "Debian GNU/Linux 12"
    assert facts.cpu == "A CPU @ 2 GHz"
    assert facts.memory_bytes == 2048 * 1024
    assert facts.docker == "20.10.24"
    assert facts.clocks == {
        "cpu_scaling_governor": "powersave",
        "cpu_scaling_max_freq": 3_000_000_000,
    }


def test_a_jetson_is_known_by_its_release_file(tmp_path: Path) -> None:
    line = "# R35 (release), REVISION: 2.1, GCID: 32413640, BOARD: t186ref, EABI: aarch64"
    root = tree(
        tmp_path,
        {
            "etc/nv_tegra_release": f"{line}\nmore\n",
            "proc/cpuinfo": "processor : 0\nCPU part\t: 0x004\n",
            "proc/device-tree/model": "Jetson-AGX\0",
        },
    )
    host = probe_host(root, "aarch64")

    assert (host.architecture, host.l4t, host.has_gpu) == ("arm64", "35.2.1", True)
    assert machine_facts(root, power_mode="MAXN 0").power_mode == "MAXN 0"
    assert machine_facts(root, power_mode="").l4t == line
    assert machine_facts(root, power_mode="").cpu == "Jetson-AGX CPU part 0x004"


def test_hosts_describe_themselves() -> None:
    gpu = Gpu("NVIDIA H200", "9.0", 1, {})

    assert Host("amd64").describe() == "amd64 without an NVIDIA GPU"
    assert Host("amd64", (gpu,), "580.1").describe() == "amd64 with NVIDIA H200 (9.0), driver 580.1"
    assert "L4T 35.2.1" in Host("arm64", l4t="35.2.1").describe()


def test_without_a_driver_nvml_is_not_even_loaded(tmp_path: Path) -> None:
    import sys

    loaded = "pynvml" in sys.modules
    probe_host(tmp_path, "x86_64")

    assert ("pynvml" in sys.modules) is loaded


def test_a_gpu_without_memory_of_its_own_is_still_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML of an Orin and of a GB10 does not support the question; the host must not break."""
    import pynvml

    def unsupported(*words: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetName": lambda handle: "Orin",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 7),
        "nvmlDeviceGetMemoryInfo": unsupported,
        "nvmlDeviceGetMaxClockInfo": unsupported,
        "nvmlDeviceGetClockInfo": unsupported,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    host = probe_host(tree(tmp_path, {"dev/nvidiactl": ""}), "aarch64")

    assert host.gpus == (Gpu("Orin", "8.7", None, {}),)


def test_a_driver_that_does_not_answer_is_said_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()

    def mismatched() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatched)
    host = probe_host(tmp_path, "x86_64")
    assert not host.has_gpu
    assert "mismatch" in (host.driver_problem or "")

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert "libnvidia-ml.so.1 is not here" in (probe_host(tmp_path, "x86_64").driver_problem or "")


JETSON_RELEASE = "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n"


@pytest.mark.parametrize("library", [False, True], ids=["no library", "no GPU"])
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"dev/nvidiactl": ""}, True),
        ({"proc/driver/nvidia/version": "NVRM version\n"}, True),
        ({"dev/nvidiactl": "", "dev/dxg": ""}, True),
        ({"dev/dxg": ""}, False),  # WSL, with a GPU of any maker
        ({"dev/nvidiactl": "", "etc/nv_tegra_release": JETSON_RELEASE}, False),
    ],
)
def test_a_loaded_driver_that_shows_nothing_is_a_problem(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    problem: bool,
    library: bool,
) -> None:
    """Else a host with a card would be given the CPU's target without a word."""
    import pynvml

    def start() -> None:
        if not library:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    host = probe_host(tree(tmp_path, files), "x86_64")

    assert (host.driver_problem is not None) is problem
    assert host.broken_driver is problem
    if problem:
        told = "shows no GPU" if library else "libnvidia-ml.so.1"
        assert told in (host.driver_problem or "")
        assert "driver that answers" in host.describe()
