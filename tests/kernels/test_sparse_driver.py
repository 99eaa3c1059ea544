"""The CUDA driver's calls, on a stand-in that writes them down."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from narrowgauge_kernels.sparse.driver import CudaDriver, Pointer
from narrowgauge_kernels.sparse.errors import DeviceError

SOURCE = Path(__file__).with_name("sparse_driver_stand_in.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(SOURCE)], check=True)
    return str(target)


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("NARROWGAUGE_STAND_IN_LOG", str(path))
    return path


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "code.cubin"
    path.write_bytes(b"machine code\0")
    return path


def test_a_module_is_loaded_once_and_a_kernel_found_once(library, log, code):
    driver = CudaDriver(library)
    first = driver.function(code, "sparse_convolve", 1000, 0)
    assert driver.function(code, "sparse_convolve", 1000, 0) is first
    driver.function(code, "sparse_reduce", 0, 0)
    assert log.read_text().splitlines() == [
        "cuModuleLoadData machine code",
        "cuModuleGetFunction sparse_convolve",
        "cuModuleGetFunction sparse_reduce",
    ]
    driver.function(code, "sparse_reduce", 0, 1)
    assert log.read_text().count("cuModuleLoadData") == 2


def test_each_thread_is_given_a_context_and_a_device_is_retained_once(library, log):
    driver = CudaDriver(library)

    def fresh_thread():
        driver.make_current(1)
        driver.make_current(1)

    for _ in range(2):
        thread = threading.Thread(target=fresh_thread)
        thread.start()
        thread.join()
    assert log.read_text().splitlines() == [
        "cuDevicePrimaryCtxRetain 1", "cuCtxSetCurrent 0x21", "cuCtxSetCurrent 0x21",
    ]  # fmt: skip


def test_a_device_that_is_not_there_has_no_context(library, log):
    found = []

    def fresh_thread():
        with pytest.raises(DeviceError, match="cuDeviceGet failed with 209") as caught:
            CudaDriver(library).make_current(7)
        found.append(caught.value.why)

    thread = threading.Thread(target=fresh_thread)
    thread.start()
    thread.join()
    assert found == ["no kernel image"]


def test_much_shared_memory_is_opted_in(library, log, code):
    driver = CudaDriver(library)
    driver.function(code, "sparse_convolve", 48128, 0)
    assert "cuFuncSetAttribute" not in log.read_text()
    # With the 1 KiB that the system takes it is more than 48 KiB.
    driver.function(code, "sparse_convolve", 49152, 0)
    assert "cuFuncSetAttribute sparse_convolve 8 49152" in log.read_text()
    driver.function(code, "sparse_convolve", 60000, 0)
    assert "cuFuncSetAttribute sparse_convolve 8 60000" in log.read_text()


def test_a_launch_has_its_grid_stream_and_arguments(library, log, code):
    driver = CudaDriver(library)
    function = driver.function(code, "sparse_convolve", 512, 0)
    address = 0x7FFF12345678
    driver.launch(function, (6, 5), 128, 512, 0x55, [Pointer(address), 4000000000])
    assert log.read_text().splitlines()[-1] == (
        f"cuLaunchKernel sparse_convolve 6,5,1 128,1,1 512 0x55 {address:#x} 4000000000 0"
    )


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_refusal_names_the_call_and_the_reason(library, log, code, monkeypatch, call):
    monkeypatch.setenv("NARROWGAUGE_STAND_IN_FAILS", call)
    with pytest.raises(DeviceError, match=f"{call} failed with 209") as caught:
        CudaDriver(library).function(code, "sparse_convolve", 0, 0)
    assert caught.value.why == "no kernel image"
    assert caught.value.exit_code == 4


def test_a_host_without_a_driver_is_told(tmp_path):
    with pytest.raises(DeviceError, match="the CUDA driver is not here"):
        CudaDriver(str(tmp_path / "libcuda.so.1"))
