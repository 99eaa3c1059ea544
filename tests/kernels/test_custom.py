"""A user's functor: compiled, kept, computed with, and refused with the compiler's own words."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import torch
from kernel_cases import same_bits

from narrowgauge_kernels import custom
from narrowgauge_kernels.custom import cache_directory, compile_functor
from narrowgauge_kernels.errors import BuildArgumentError, KernelBuildError
from narrowgauge_kernels.manual import conv2d, linear

pytestmark = pytest.mark.usefixtures("kernels")

#: Not commutative, not zero for a zero, and one that contraction to fma would change.
FUNCTOR = """#include <cmath>

struct Multiply {
  MAC_INLINE float operator()(float a, float b) const {
    return a * b + 0.25f * a + (b > 0.0f ? 1.0f : sqrtf(fabsf(b)));
  }
};
"""


def product(a, b):
    """FUNCTOR in numpy, each operation rounded by itself; torch rounds square roots otherwise."""
    a, b = a.numpy(), b.numpy()
    offset = np.where(b > 0, np.float32(1), np.sqrt(np.abs(b)))
    return torch.from_numpy(a * b + np.float32(0.25) * a + offset)


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def mac(env, kernels, tmp_path_factory):
    path = tmp_path_factory.mktemp("functor") / 'my, "own" functor.h'
    path.write_text(FUNCTOR)
    return compile_functor(path, env=env)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_products(mac):
    """Sums of one term are the function's values, the activation first."""
    a, b = normal(37, 1), normal(19, 1, seed=1)
    assert same_bits(linear(a, b, None, mac), product(a, b.t()))


def test_sums_are_in_order(mac):
    """One addition per term, each rounded; the bias last."""
    x, weight, bias = normal(5, 301), normal(7, 301, seed=1), normal(7, seed=2)
    total = torch.zeros(5, 7)
    for k in range(301):
        total = total + product(x[:, k : k + 1], weight[:, k])
    assert same_bits(linear(x, weight, bias, mac), total + bias)


def test_padding_takes_part(mac):
    """A pixel of the padding is a zero that the function is asked about, too."""
    x, weight = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 3, 3)
    assert conv2d(x, weight, None, mac, 1, 1).item() == 9.0


def test_threads_and_blocks(mac):
    """The bits of one image alone, and of several with more threads than there are blocks."""
    x, weight = normal(4, 6, 15, 17), normal(8, 3, 3, 3, seed=1)
    together = conv2d(x, weight, None, mac, 2, 1, groups=2)
    for index in range(4):
        alone = conv2d(x[index : index + 1], weight, None, mac, 2, 1, groups=2)
        assert same_bits(together[index : index + 1], alone)


def test_a_second_use_compiles_nothing(mac, env, tmp_path, monkeypatch):
    """By content: the name of the file does not matter, a changed line does."""
    path = tmp_path / "same.h"
    path.write_text(FUNCTOR)

    def refuse(*arguments):
        raise AssertionError(f"compiles again: {arguments}")

    monkeypatch.setattr(custom, "_run", refuse)
    assert compile_functor(path, env=env) == mac
    path.write_text(FUNCTOR.replace("0.25f", "0.5f"))
    with pytest.raises(AssertionError, match="compiles again"):
        compile_functor(path, env=env)


def test_the_compilers_words_are_the_users_lines(env, tmp_path):
    """With the file's own name and line; nothing of our templates; nothing is kept."""
    path = tmp_path / "wrong.h"
    path.write_text(FUNCTOR.replace("return a", "return undeclared + a"))
    before = sorted(cache_directory(env).iterdir())
    with pytest.raises(KernelBuildError, match="does not compile") as caught:
        compile_functor(path, env=env)
    lines = caught.value.why.splitlines()
    assert f"{path}:5:" in caught.value.why
    assert "'undeclared' was not declared" in caught.value.why
    assert all(line.startswith(str(path)) or line[:1].isspace() for line in lines)
    assert "manual_float" not in caught.value.why
    assert caught.value.exit_code == 13
    assert sorted(cache_directory(env).iterdir()) == before


def test_a_file_without_the_struct(env, tmp_path):
    """The error is in our line then, and says what is missing."""
    path = tmp_path / "empty.h"
    path.write_text("\n")
    with pytest.raises(KernelBuildError) as caught:
        compile_functor(path, env=env)
    assert "Multiply" in caught.value.why
    assert "struct Multiply" in caught.value.next_step


def test_no_file(env, tmp_path):
    """A wrong name is the caller's mistake, not the build's."""
    with pytest.raises(BuildArgumentError, match="cannot be read"):
        compile_functor(tmp_path / "none.h", env=env)


def test_the_cache_is_where_xdg_says(tmp_path):
    """An absolute XDG_CACHE_HOME, else the home's."""
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "narrowgauge" / "macs"
    assert cache_directory({"XDG_CACHE_HOME": "here"}).is_absolute()
    assert cache_directory({}).parts[-3:] == (".cache", "narrowgauge", "macs")


@pytest.mark.slow
def test_one_library_for_both_devices(mac, env, tmp_path):
    """Compiled for a GPU, without one: the CPU's half computes, the launcher is there."""
    if shutil.which("nvcc") is None and shutil.which("nvcc", path="/usr/local/cuda/bin") is None:
        pytest.skip("nvcc is not installed (CUDA 13: apt-get install cuda-toolkit-13-0)")
    path = tmp_path / "both.h"
    path.write_text(FUNCTOR)
    both = compile_functor(path, cuda=True, architectures=("9.0",), env=env)
    assert both != mac
    x, weight = normal(3, 20), normal(4, 20, seed=1)
    assert same_bits(linear(x, weight, None, both), linear(x, weight, None, mac))
    names = subprocess.run(["nm", "-D", both.library], stdout=subprocess.PIPE, text=True).stdout
    assert " T narrowgauge_manual_launch_cuda" in names
    path.write_text(FUNCTOR.replace("return a", "return undeclared + a"))
    with pytest.raises(KernelBuildError, match="undeclared"):
        compile_functor(path, cuda=True, architectures=("9.0",), env=env)
