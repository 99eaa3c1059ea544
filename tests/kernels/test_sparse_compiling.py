"""Generated sources become machine code of every capability; the cache; what does not compile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from narrowgauge_kernels.errors import DiskFullError, KernelBuildError, ToolchainMissingError
from narrowgauge_kernels.sparse import compiling
from narrowgauge_kernels.sparse.ahead import Ahead
from narrowgauge_kernels.sparse.compiling import (
    Compiler,
    cache_directory,
    compile_source,
    find_compiler,
)
from narrowgauge_kernels.sparse.generate import generate
from narrowgauge_kernels.sparse.geometry import derive
from narrowgauge_kernels.sparse.launching import launches
from narrowgauge_kernels.sparse.nvrtc import Nvrtc, find_nvrtcs
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

ELEMENT = (
    Shape(1, 128, 28, 28, 32),
    Tile(7, 7, 8, 0, 4, "launch"),
    Variant("fp16", bias=True, relu_output=True, path="switched"),
)
WINDOW = (Shape(1, 40, 14, 14, 32), Tile(3, 7, 8, 0, 2), Variant(path="window", bias=True))
DENSE = (Shape(1, 40, 9, 9, 32, 5, 2, 2), Tile(2, 3, 8), Variant("fp16", path="dense"))
WIDE = (Shape(1, 40, 14, 14, 128), Tile(2, 7, 8, 128, 2, wide=4), Variant(path="window"))
WIDE_LISTS = (Shape(1, 40, 14, 14, 66), Tile(2, 7, 8, 64, 2, wide=2), Variant("fp16"))
POINT = (Shape(2, 65, 14, 14, 40, 1, 2, 0), Tile(2, 4, 8), Variant(accumulation="atomic"))
TF32 = (
    Shape(8, 128, 28, 28, 128),
    Tile(8, 8, 64, 32, 2),
    Variant("tf32", "atomic", granularity="tensor-core"),
)
FP16 = (
    Shape(8, 64, 14, 14, 32, 5, 2, 2),
    Tile(4, 8, 64, 32),
    Variant("fp16", granularity="tensor-core", layout="nhwc", bias=True),
)
FP16_ODD = (
    Shape(8, 33, 14, 14, 21),
    Tile(4, 8, 32, 32),
    Variant("fp16", granularity="tensor-core"),
)
CORES = (
    Shape(1, 128, 28, 28, 128),
    Tile(7, 8, 32, 64, 4),
    Variant("fp16", granularity="tensor-core", layout="nhwc", path="dense", relu_output=True),
)
#: From 9.0 on.
CLUSTERS = (
    (Shape(1, 128, 28, 28, 32), Tile(4, 7, 16, 32, 4, "cluster"), Variant(path="window")),
    (Shape(1, 64, 9, 9, 64), Tile(3, 3, 32, 32, 1, "cluster"), Variant("fp16", path="switched")),
    (CORES[0], Tile(7, 8, 32, 32, 8, "cluster"), CORES[2]),
    (Shape(8, 256, 14, 14, 256), Tile(8, 8, 64, 64, 1, "cluster"), FP16[2]),
)
QUICK = ("7.0", "9.0")
#: NVRTC 11.8 knows these; the rest is nvcc 13's.
BY_NVRTC = ("7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0")
BY_NVCC = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0a", "10.0", "12.0")


def slow(names):
    return [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in names]


def cases(arch):
    """Tensor cores on 8.0 and later, clusters on 9.0 and later."""
    made, number = [ELEMENT, WINDOW, DENSE, WIDE, WIDE_LISTS, POINT], float(arch.rstrip("a"))
    made += [TF32, FP16, FP16_ODD, CORES] if number >= 8 else []
    return made + (list(CLUSTERS) if number >= 9 else [])


@pytest.fixture(scope="module")
def nvrtc():
    """The test dependency, beside which torch may have brought another."""
    found = [each for each in map(Nvrtc, find_nvrtcs()) if each.version() == (11, 8)]
    assert found, "pip install nvidia-cuda-nvrtc-cu11==11.8.89"
    return found[0]


@pytest.mark.parametrize("arch", slow(BY_NVRTC))
def test_nvrtc_makes_machine_code_with_every_kernel_of_the_plan(nvrtc, arch):
    assert nvrtc.knows(arch)
    for shape, tile, variant in cases(arch):
        code = nvrtc.compile(generate(shape, tile, variant, arch), "generated.cu", arch)
        assert code.startswith(b"\x7fELF")
        plan = launches(shape, tile, variant, derive(shape, tile, variant, arch))
        kernels = {name.decode() for name in re.findall(rb"\.text\.(\w+)", code)}
        assert kernels == {each.kernel for each in plan}


@pytest.mark.slow
@pytest.mark.parametrize("arch", BY_NVCC)
def test_nvcc_says_no_warning_and_no_register_is_spilt(arch, tmp_path):
    """Sums that left the registers would be the end of the design."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed (CUDA 13: apt-get install cuda-toolkit-13-0)")
    number = arch.replace(".", "")
    for shape, tile, variant in cases(arch):
        source = tmp_path / "generated.cu"
        source.write_text(generate(shape, tile, variant, arch))
        done = subprocess.run(
            [
                nvcc, "-std=c++14", f"-gencode=arch=compute_{number},code=sm_{number}", "-cubin",
                "-Werror=all-warnings", "-Xptxas=-v", "-o", str(tmp_path / "code"), str(source),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stdout)
        assert used
        assert set(used) == {("0", "0")}, done.stdout


@pytest.fixture
def env(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_a_source_is_compiled_once(env):
    """Again for another source, capability or compiler."""
    asked = []

    def compile_(source, name, arch):
        asked.append((source, arch))
        return b"code of " + source.encode()

    first = compile_source("a", "8.0", env, Compiler("one", compile_))
    assert first.read_bytes() == b"code of a"
    assert first.parent == cache_directory(env)
    assert compile_source("a", "8.0", env, Compiler("one", compile_)) == first
    assert len(asked) == 1
    others = [
        compile_source("b", "8.0", env, Compiler("one", compile_)),
        compile_source("a", "9.0", env, Compiler("one", compile_)),
        compile_source("a", "8.0", env, Compiler("two", compile_)),
    ]
    assert len({first, *others}) == 4
    assert len(asked) == 4


def test_a_source_that_does_not_compile_is_kept_and_its_path_said(env, nvrtc):
    source = "__global__ void kernel() { undeclared(); }\n"
    with pytest.raises(KernelBuildError, match=r"does not compile for 7\.0") as caught:
        compile_source(source, "7.0", env, Compiler("NVRTC 11.8", nvrtc.compile))
    assert 'identifier "undeclared" is undefined' in caught.value.why
    assert caught.value.exit_code == 13
    [kept] = (cache_directory(env) / "failed").iterdir()
    assert str(kept) in caught.value.next_step
    assert kept.read_text() == source
    assert not list(cache_directory(env).glob("*.cubin"))


def test_nvccs_message_is_kept_likewise(env, tmp_path):
    """By a compiler that says what nvcc says."""
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'error: no such thing'\nexit 1\n")
    fake.chmod(0o755)
    compiler = Compiler("nvcc", lambda *words: compiling._nvcc(str(fake), *words))
    with pytest.raises(KernelBuildError, match="no such thing"):
        compile_source("x", "8.0", env, compiler)


def test_nvcc_gives_what_it_writes(tmp_path):
    fake = tmp_path / "nvcc"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf made > "$2"\n')
    fake.chmod(0o755)
    assert compiling._nvcc(str(fake), "source", "name.cu", "9.0a") == b"made"


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "narrowgauge").write_text("a file where a folder should be")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(DiskFullError, match="cannot be written") as caught:
        compile_source("a", "8.0", env, Compiler("one", lambda *words: b""))
    assert "XDG_CACHE_HOME" in caught.value.next_step


def test_a_relative_cache_folder_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory({"XDG_CACHE_HOME": "here"}) == (
        tmp_path / ".cache" / "narrowgauge" / "sparse"
    )


def test_without_a_compiler_the_error_says_what_was_looked_for(monkeypatch):
    monkeypatch.setattr(compiling, "find_nvrtcs", lambda: ())
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path=None: None)
    find_compiler.cache_clear()
    with pytest.raises(ToolchainMissingError, match="no compiler of CUDA for") as caught:
        find_compiler("9.0")
    assert "libnvrtc" in caught.value.why
    find_compiler.cache_clear()


def test_an_nvrtc_too_old_for_the_card_leaves_it_to_nvcc(monkeypatch, nvrtc):
    """Its version is named where there is no nvcc either."""
    monkeypatch.setattr(compiling, "find_nvrtcs", lambda: (nvrtc.path,))
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path=None: None)
    find_compiler.cache_clear()
    with pytest.raises(ToolchainMissingError) as caught:
        find_compiler("12.0")
    assert "NVRTC 11.8" in caught.value.why
    assert "makes no machine code for 12.0" in caught.value.why
    find_compiler.cache_clear()


def test_nvrtc_is_found_in_packages_of_either_layout(tmp_path):
    assert find_nvrtcs([str(tmp_path)]) == ()
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc.so.13"):
        (folder / name).touch()
    assert find_nvrtcs([str(tmp_path)]) == (folder / "libnvrtc.so.13",)


def test_an_nvrtc_that_knows_no_architectures_is_not_asked(nvrtc, monkeypatch):
    """As the one of CUDA 10.2 that torch 1.8 brings, which makes no machine code."""

    class Old:
        pass

    old = object.__new__(Nvrtc)
    old._library = Old()
    assert not old.knows("7.0")
    monkeypatch.setattr(compiling, "find_nvrtcs", lambda: (Path("old"), nvrtc.path))
    monkeypatch.setattr(compiling, "Nvrtc", lambda path: nvrtc if path == nvrtc.path else old)
    monkeypatch.setattr(Nvrtc, "version", lambda self: (10, 2) if self is old else (11, 8))
    find_compiler.cache_clear()
    assert find_compiler("7.0").identity == "NVRTC 11.8"
    find_compiler.cache_clear()


def test_an_nvrtc_that_does_not_load_leaves_it_to_the_next(monkeypatch, nvrtc, tmp_path):
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("no library")
    monkeypatch.setattr(compiling, "find_nvrtcs", lambda: (broken, nvrtc.path))
    find_compiler.cache_clear()
    assert find_compiler("7.0").identity == "NVRTC 11.8"
    monkeypatch.setattr(compiling, "find_nvrtcs", lambda: (broken,))
    monkeypatch.setattr(compiling.shutil, "which", lambda name, path=None: None)
    find_compiler.cache_clear()
    with pytest.raises(ToolchainMissingError, match=r"libnvrtc\.so\.12 does not load"):
        find_compiler("7.0")
    find_compiler.cache_clear()


def test_what_is_no_library_is_an_error_with_its_path(tmp_path):
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("no library")
    with pytest.raises(KernelBuildError, match=r"libnvrtc\.so\.12 does not load"):
        Nvrtc(broken)


def test_machine_code_is_made_in_another_process(nvrtc, tmp_path, monkeypatch):
    """And what does not compile is left to the one who needs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" __global__ void kernel(float* x) { *x = 1.0f; }'
    assert nvrtc.knows("7.0")
    with Ahead([lambda: source, lambda: "no CUDA"], "7.0", 2) as ahead:
        ahead.wait(0)
        ahead.wait(1)
    assert len(list(cache_directory().glob("*.cubin"))) == 1
    assert len(list(cache_directory().glob("failed/*.cu"))) == 1
