"""What makes numbers waver, or an energy measurement impossible: power, clocks, memory, sensors."""

from __future__ import annotations

import shlex

from narrowgauge.doctor.findings import Check, Finding, note, ok, skipped, warning
from narrowgauge.doctor.situation import Sensor, Situation

__all__ = ["CHECKS"]

_GIB = 1 << 30
#: To compile the kernels on a Jetson: each nvcc process takes some 1.5 GB, and there are several.
_BUILD_BYTES = 8 * _GIB
#: What a board of "8 GB" shows as total is less: the firmware keeps some.
_BUILD_SLACK = _GIB
_LEAST_AVAILABLE = 2 * _GIB
_MAXN = "MAXN"
#: Root's group, also where no file gives it its name.
_ROOT = ("root", "0")


def _memory(at: Situation) -> Finding:
    has = at.memory
    if has.total == 0:
        return skipped("the kernel does not say how much there is")
    on_disk = sum(swap.bytes for swap in has.swaps if not swap.zram)
    in_memory = sum(swap.bytes for swap in has.swaps if swap.zram)
    told = f"{has.total / _GIB:.1f} GiB memory, {on_disk / _GIB:.1f} GiB swap on disk"
    told += f", {in_memory / _GIB:.1f} GiB swap in memory (zram)" if in_memory else ""
    if at.host.l4t is not None and has.total + on_disk < _BUILD_BYTES - _BUILD_SLACK:
        return warning(
            f"{told}: not enough to build the image here, which takes 8 GiB",
            "sudo fallocate -l 8G /swap && sudo chmod 600 /swap && sudo mkswap /swap"
            " && sudo swapon /swap; or build on a PC and load the image here",
        )
    if has.available < _LEAST_AVAILABLE:
        return warning(
            f"{told}, of which {has.available / _GIB:.1f} GiB are free",
            "end what else runs: swapping during a run would be measured with it",
        )
    if in_memory:
        stop = "sudo systemctl stop nvzramconfig" if at.host.l4t else "sudo swapoff /dev/zram*"
        return note(told, f"before measuring, for zram takes processor time: {stop}")
    return ok(told)


def _devices(at: Situation) -> Finding:
    if not at.devices:
        return skipped("no device file of an NVIDIA GPU")
    shut = [device for device in at.devices if not device.usable]
    if not shut:
        return ok(", ".join(device.path for device in at.devices))
    groups = dict.fromkeys(device.group for device in shut if device.group not in _ROOT)
    roots = [device.path for device in shut if device.group in _ROOT]
    mend = [f"sudo usermod -aG {','.join(groups)} $USER, then log in again"] if groups else []
    mend += [_out_of_root(roots, jetson=at.host.l4t is not None)] if roots else []
    return warning(
        f"you may not use {', '.join(device.path for device in shut)}: native runs see no GPU"
        " (containers are given the groups)",
        "\n".join(mend),
    )


def _out_of_root(paths: list[str], *, jetson: bool) -> str:
    """How root's device files get a group that one may join: root's own is as good as root."""
    if jetson:
        how = (
            'KERNEL=="NAME", GROUP="video", MODE="0660" in /etc/udev/rules.d/99-gpu.rules'
            " (udevadm info -a -n FILE shows NAME)"
        )
    else:  # the driver's own tool makes these files, and no udev rule sees them
        how = (
            "options nvidia NVreg_DeviceFileMode=0660 NVreg_DeviceFileGID=GID in"
            " /etc/modprobe.d/nvidia.conf (getent group video shows GID)"
        )
    return f"{' '.join(paths)}: {how}; sudo usermod -aG video $USER; then reboot"


def _power_mode(at: Situation) -> Finding:
    if at.board is None:
        return skipped("not a Jetson")
    mode = at.board.power_mode
    if mode is None:
        return warning("nvpmodel does not say the power mode", "sudo nvpmodel -q should print it")
    if _MAXN in mode:
        return ok(mode)
    # No number is advised: what mode 0 is differs, and on some boards it is one of the lowest.
    return note(
        f"{mode}: it bounds clocks and cores, and is not MAXN",
        "sudo nvpmodel -p --verbose lists the modes; sudo nvpmodel -m ID takes the one to report",
    )


def _gpu_clocks(at: Situation) -> Finding:
    if at.board is not None:
        if at.board.gpu_clock is None:
            return skipped("the kernel does not show the GPU's clock")
        least, most = (hertz / 1e6 for hertz in at.board.gpu_clock)
        if least == most:
            return ok(f"the GPU is held at {most:.0f} MHz")
        return warning(
            f"the GPU moves between {least:.0f} and {most:.0f} MHz", "sudo jetson_clocks"
        )
    if not at.gpus:
        return skipped("no NVIDIA GPU that NVML answers for")
    lapsing = [gpu.name for gpu in at.gpus if gpu.persistence is False]
    remedy = "before measuring: sudo nvidia-smi -pm 1 && sudo nvidia-smi -lgc MHZ (-rgc undoes it)"
    if lapsing:
        return note(
            f"persistence mode is off for {', '.join(lapsing)}: locked clocks do not last", remedy
        )
    return note("NVML does not say whether the clocks are locked", remedy)


def _governor(at: Situation) -> Finding:
    found = at.processor.governors
    if not found:
        return skipped("the kernel shows no frequency governor (a virtual machine?)")
    if found == ("performance",):
        return ok("performance")
    return warning(
        f"the processor's clock follows its load: {', '.join(found)}",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    )


def _smt(at: Situation) -> Finding:
    if at.processor.smt is None:
        return skipped("the kernel does not say")
    if not at.processor.smt:
        return ok("one thread a core")
    return note(
        "two threads share a core, and may slow each other",
        "for the steadiest numbers: echo off | sudo tee /sys/devices/system/cpu/smt/control",
    )


def _turbo(at: Situation) -> Finding:
    if at.processor.turbo is None:
        return skipped("the kernel does not say")
    if not at.processor.turbo:
        return ok("off")
    return note(
        "on: the first seconds of a run may be faster than the rest",
        "for the steadiest numbers: echo 1 | sudo tee"
        " /sys/devices/system/cpu/intel_pstate/no_turbo"
        " (or echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost)",
    )


def _energy_gpu(at: Situation) -> Finding:
    if not at.gpus or at.host.l4t is not None:
        return skipped("no NVIDIA card that NVML answers for")
    without = [gpu.name for gpu in at.gpus if not gpu.energy]
    if not without:
        return ok(f"NVML counts the energy of {', '.join(gpu.name for gpu in at.gpus)}")
    return warning(
        f"NVML counts no energy for {', '.join(without)}",
        "the counter is there from Volta on, and not in some virtual GPUs; without it energy is its"
        " power, read and integrated, which is coarser; a MIG slice has neither",
    )


def _energy_board(at: Situation) -> Finding:
    if at.board is None:
        return skipped("not a Jetson")
    if not at.board.rails:
        return warning(
            "no power monitor (INA3221) shows a rail",
            "ls /sys/bus/i2c/drivers/ina3221*: some carrier boards have none; then energy has to"
            " be left out here",
        )
    return _sensors(at.board.rails, "sudo chmod a+r {} after each start, or a udev rule")


def _energy_cpu(at: Situation) -> Finding:
    if not at.counters:
        return skipped("no energy counter (RAPL) of this processor is shown")
    return _sensors(at.counters, "sudo chmod a+r {} after each start (root only since 2020)")


def _sensors(sensors: tuple[Sensor, ...], mend: str) -> Finding:
    shut = [sensor for sensor in sensors if not sensor.readable]
    if not shut:
        return ok(f"readable: {', '.join(sensor.name for sensor in sensors)}")
    return warning(
        f"you may not read {', '.join(sensor.name for sensor in shut)}",
        mend.format(" ".join(dict.fromkeys(shlex.quote(sensor.path) for sensor in shut))),
    )


CHECKS = (
    Check(
        "memory",
        "there is memory enough, and on a Jetson enough to build the image",
        "Compiling the kernels on a Jetson takes about 8 GiB of memory and swap. Swapping during a "
        "run is measured with it; swap in memory (zram) takes processor time for it.",
        "Add a swap file for building, or build the image on a PC, which is the documented way. "
        "For measuring, have nothing else run.",
        _memory,
    ),
    Check(
        "device-access",
        "you may use the GPU's device files",
        "Runs in containers are given the files' groups. Native runs have yours: without video "
        "(and render) on a Jetson, torch finds no GPU.",
        "sudo usermod -aG video,render $USER, then log in again. Never join root's group: files of "
        "root's get another by a udev rule, a card's by the driver's NVreg_DeviceFileGID.",
        _devices,
    ),
    Check(
        "power-mode",
        "which power mode the Jetson is in",
        "A power mode bounds clocks and the number of cores. A record keeps it, and rows of "
        "different modes are never put into one statistic.",
        "sudo nvpmodel -p --verbose lists the modes; sudo nvpmodel -m ID takes the one to report. "
        "Numbers differ between boards, and not every board has a mode called MAXN.",
        _power_mode,
    ),
    Check(
        "gpu-clocks",
        "the GPU's clock is held",
        "A clock that follows load and temperature is the largest single cause of wavering times, "
        "and it couples the rows of a run to each other.",
        "Jetson: sudo jetson_clocks. A card: sudo nvidia-smi -lgc MHZ with a clock that it can "
        "hold when warm; sudo nvidia-smi -rgc undoes it.",
        _gpu_clocks,
    ),
    Check(
        "governor",
        "the processor's frequency governor is performance",
        "Other governors lower the clock between bursts of work, so what is measured depends on "
        "what ran before.",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        _governor,
    ),
    Check(
        "smt",
        "whether two threads share a core",
        "A CPU row with as many threads as the host shows then has two to a core, and times depend "
        "on which share one.",
        "echo off | sudo tee /sys/devices/system/cpu/smt/control; on undoes it.",
        _smt,
    ),
    Check(
        "turbo",
        "whether the processor may exceed its base clock",
        "Turbo lasts as long as temperature and power allow, so short rows look faster than long "
        "ones.",
        "Switch it off for CPU rows that must be steady, and say so in the report.",
        _turbo,
    ),
    Check(
        "energy-gpu",
        "NVML counts the energy of each card",
        "The card counts its own energy; sampling its power instead misses what is shorter than a "
        "sample. A run that asks for energy and cannot have it is INVALID, never blank.",
        "There is no remedy for a card without a counter: leave energy out, or use another card.",
        _energy_gpu,
    ),
    Check(
        "energy-board",
        "the Jetson's power rails can be read",
        "NVML gives no energy on a Jetson; the INA3221 monitors on the board do, rail by rail. "
        "They are read below /sys/bus/i2c/drivers/ina3221*: inN_label is the rail, inN_input mV "
        "and currN_input mA. Xavier and Orin AGX have no rail for the whole board.",
        "sudo chmod a+r on the files that the remedy names, after each start, or a udev rule.",
        _energy_board,
    ),
    Check(
        "energy-cpu",
        "the processor's energy counters can be read",
        "RAPL counts what the processor and its memory take. Since 2020 only root may read it, "
        "because its steps betray what other programs do.",
        "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj after each start, on a host "
        "where that is no concern.",
        _energy_cpu,
    ),
)
