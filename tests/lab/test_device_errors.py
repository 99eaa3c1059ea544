"""What a device that is gone, and memory that was not there, say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab import errors
from narrowgauge_lab.errors import (
    DeviceLostError,
    OutOfMemoryError,
    bytes_asked,
    describe,
    known_error,
)
from narrowgauge_lab.measure.nvml import NvmlError

OUT = Path("out")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA error: unknown error",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "CUDA error: device 0 was lost",
    ],
)
def test_a_device_that_is_gone_is_told_from_a_fault_of_the_program(text: str) -> None:
    found = known_error(RuntimeError(text), OUT)

    assert isinstance(found, DeviceLostError)
    assert found.exit_code is ExitCode.RUN_FAILED
    assert found.why == text.splitlines()[0]
    assert "nvidia-smi" in found.next_step


def test_every_error_of_the_lab_is_public() -> None:
    classes = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and thing.__module__ == errors.__name__
    }
    assert "CalibrationError" in classes
    assert classes <= set(errors.__all__)


def test_nvml_says_it_by_a_class_of_its_own() -> None:
    gone = type("NVMLError_GpuIsLost", (Exception,), {})("GPU is lost")

    assert isinstance(known_error(gone, OUT), DeviceLostError)
    ours = NvmlError("nvmlDeviceGetClockInfo: GPU is lost", 15)
    assert isinstance(known_error(ours, OUT), DeviceLostError)
    assert known_error(NvmlError("nvmlDeviceGetClockInfo: Not Supported", 3), OUT) is None
    assert known_error(ValueError("the GPU is lost in this text"), OUT) is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: unspecified launch failure",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: the launch timed out and was terminated",
        "Expected all tensors to be on the same device, but found at least two devices",
    ],
)
def test_a_fault_of_the_program_stays_one(text: str) -> None:
    assert known_error(RuntimeError(text), OUT) is None


def test_the_loss_is_found_behind_other_errors() -> None:
    try:
        try:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        except RuntimeError as error:
            raise ValueError("while closing") from error
    except ValueError as error:
        info, code = describe(error, OUT)

    assert (info.kind, code) == ("DeviceLostError", ExitCode.RUN_FAILED)
    assert info.why == "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        # torch 2 and torch 1 on CUDA, then both on the CPU.
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 "
            "GiB of which 1.06 GiB is free.",
            2 << 30,
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 47.54 GiB total capacity; "
            "46.32 GiB already allocated)",
            20 << 20,
        ),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity", 512),
        ("CUDA out of memory. Tried to allocate 1.50 KiB (GPU 0; 1.00 GiB total)", 1536),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)",
            123,
        ),
        (
            "[enforce fail at CPUAllocator.cpp:67] . DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
            4000000000000000,
        ),
        ("CUDA error: out of memory", None),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    ],
)
def test_the_bytes_asked_for_are_told(text: str, asked: Optional[int]) -> None:
    found = known_error(RuntimeError(text), OUT)

    assert isinstance(found, OutOfMemoryError)
    assert found.exit_code is ExitCode.OUT_OF_MEMORY
    assert bytes_asked(text) == asked
    if asked is None:
        assert "asked for" not in found.what
    else:
        assert f"asked for {asked} bytes" in found.what


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(10**15, dtype=torch.float32),
        lambda: np.empty(10**15, dtype=np.float32),
    ],
    ids=["torch", "numpy"],
)
def test_a_true_allocation_that_fails_tells_its_bytes(allocate: Callable[[], Any]) -> None:
    """By this very torch and numpy."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()

    found = known_error(caught.value, OUT)
    assert isinstance(found, OutOfMemoryError)
    # numpy tells it to three digits.
    words = found.what.split()
    assert int(words[words.index("bytes") - 1]) == pytest.approx(4e15, rel=0.01)
