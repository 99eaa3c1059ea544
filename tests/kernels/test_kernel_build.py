"""Build and load: incremental, honest about what is missing, the same result every time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import narrowgauge_kernels
from narrowgauge_contract.errors import ExitCode
from narrowgauge_kernels import build as build_module
from narrowgauge_kernels import errors, library, toolchain
from narrowgauge_kernels.build import Request, build, main
from narrowgauge_kernels.errors import (
    BuildArgumentError,
    DiskFullError,
    KernelBuildError,
    KernelsNotBuiltError,
    ToolchainMissingError,
)
from narrowgauge_kernels.sources import CSRC, Library, Tool, source_hash, units
from narrowgauge_kernels.toolchain import TorchFacts

SOURCE = CSRC.parent.parent

FACTS = TorchFacts(
    version="2.11.0+cu130",
    cuda="13.0",
    cxx11_abi=True,
    include="/torch/include",
    library="/torch/lib",
    standard="c++17",
    openmp=None,
    machine="x86_64",
)


def in_new_process(code, **env):
    """Run Python code with the package on the path; (exit code, output)."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def facts():
    """This interpreter's torch, asked once: importing it anew takes a second or more."""
    return toolchain.query_torch(sys.executable)


@pytest.fixture
def _torch_is_known(monkeypatch, facts):
    monkeypatch.setattr(toolchain, "query_torch", lambda _: facts)


@pytest.fixture
def copy(kernels, tmp_path):
    """A copy of the built directory that a test may damage."""
    target = tmp_path / "built"
    shutil.copytree(str(kernels), str(target))
    return target


@pytest.fixture
def edit(copy):
    """Change fields of the copy's build.json."""

    def change(**fields):
        path = copy / "build.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return copy

    return change


class TestUnits:
    def test_instruction_sets_follow_the_machine(self):
        """By file name; the flags are on that file alone."""
        names = {unit.source.name: unit for unit in units(CSRC, FACTS, ())}
        assert "-mavx512f" in names["linear_avx512.cpp"].flags
        assert "linear_neon.cpp" not in names
        plain = names["linear.cpp"].flags + names["linear_generic.cpp"].flags
        assert not [flag for flag in plain if flag.startswith("-m")]

        arm = TorchFacts(**{**vars(FACTS), "machine": "aarch64"})
        names = {unit.source.name for unit in units(CSRC, arm, ())}
        assert "linear_neon.cpp" in names
        assert not names & {"linear_avx2.cpp", "linear_avx512.cpp"}

    def test_nothing_depends_on_the_build_machine_or_loosens_arithmetic(self):
        """-march=native would crash elsewhere; -ffast-math would drop NaN and the order of sums."""
        flags = {flag for unit in units(CSRC, FACTS, ("7.5",)) for flag in unit.flags}
        assert not flags & {"-march=native", "-mtune=native", "-ffast-math", "--use_fast_math"}
        assert "-ffp-contract=off" in flags

    def test_torchs_standard_and_abi_are_followed(self):
        """Except by device code, which has no torch header and stays in NVRTC 11.8's C++14."""
        old = TorchFacts(**{**vars(FACTS), "standard": "c++14", "cxx11_abi": False})
        for facts, standard, abi in ((FACTS, "c++17", 1), (old, "c++14", 0)):
            for unit in units(CSRC, facts, ("8.6",)):
                if unit.uses_torch:
                    assert f"-std={standard}" in unit.flags
                    assert f"-D_GLIBCXX_USE_CXX11_ABI={abi}" in unit.flags
                else:
                    assert "-std=c++14" in unit.flags

    def test_every_capability_gets_its_own_machine_code(self):
        """9.0a and 9.0 are different targets."""
        made = units(CSRC, FACTS, ("7.5", "9.0a"))
        device = [unit for unit in made if unit.source.suffix == ".cu"]
        assert device
        for unit in device:
            assert unit.library is Library.CUDA
            assert unit.tool is Tool.NVCC
            assert "-gencode=arch=compute_75,code=sm_75" in unit.flags
            assert "-gencode=arch=compute_90a,code=sm_90a" in unit.flags


class TestArchitectures:
    def test_sorted_by_number_each_once(self):
        assert toolchain.parse_architectures("12.0 7.5 10.0 9.0a 7.5") == (
            "7.5",
            "9.0a",
            "10.0",
            "12.0",
        )

    @pytest.mark.parametrize("text", ["sm_80", "8.6,9.0", "8.6+PTX", "native", ""])
    def test_anything_else_is_refused(self, text):
        with pytest.raises(BuildArgumentError, match="--cuda"):
            toolchain.parse_architectures(text)

    def test_auto_without_a_gpu_is_an_error(self, tmp_path, monkeypatch):
        """Never a silent build for the CPU, or for a guess."""
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ToolchainMissingError, match="found no GPU") as caught:
            toolchain.visible_architectures()
        assert '--cuda "8.6"' in caught.value.next_step

    def test_auto_reads_nvidia_smi(self, tmp_path, monkeypatch):
        """Two cards of one kind and one of another."""
        fake = tmp_path / "nvidia-smi"
        fake.write_text("#!/bin/sh\nprintf '9.0\\n8.6\\n9.0\\n'\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert toolchain.visible_architectures() == ("8.6", "9.0")


class TestQuery:
    def test_a_python_that_is_not_there(self, capsys):
        assert main(["--torch", "/no/such/python"]) == ExitCode.TOOLCHAIN_MISSING
        assert "--torch PYTHON" in capsys.readouterr().err

    def test_a_python_without_torch(self, tmp_path, capsys):
        """Whatever the interpreter printed last is in the message."""
        fake = tmp_path / "python"
        fake.write_text(
            "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n"
        )
        fake.chmod(0o755)
        assert main(["--torch", str(fake)]) == ExitCode.TOOLCHAIN_MISSING
        assert "No module named 'torch'" in capsys.readouterr().err

    def test_the_standard_is_read_from_torch(self, facts):
        """Not from a table of versions."""
        assert facts.version == torch.__version__
        assert facts.standard in ("c++14", "c++17", "c++20")
        assert Path(facts.include, "torch", "library.h").is_file()
        assert facts.cxx11_abi == torch.compiled_with_cxx11_abi()


@pytest.mark.usefixtures("_torch_is_known")
class TestBuild:
    def test_unchanged_sources_are_not_compiled_again(self, kernels):
        """And it says so."""
        built = {path: path.stat().st_mtime_ns for path in kernels.rglob("*.o")}
        described = json.loads((kernels / "build.json").read_text())
        said = []
        cuda = " ".join(described["cuda_architectures"]) or "none"
        build(Request(cuda=cuda, out=kernels), said.append)
        assert len(said) == 1
        assert "up to date" in said[0]
        assert built == {path: path.stat().st_mtime_ns for path in kernels.rglob("*.o")}

    def test_a_missing_library_is_linked_again_from_its_objects(self, copy):
        (copy / "narrowgauge_cpu.so").unlink()
        said = []
        build(Request(out=copy), said.append)
        assert (copy / "narrowgauge_cpu.so").is_file()
        assert not [line for line in said if line.startswith("compile")]

    def test_dlopen_is_linked_where_it_is_a_library_of_its_own(self, copy, monkeypatch):
        """Before glibc 2.34, as in Ubuntu 20.04 of JetPack 5 and of TensorRT 21.07; behind the
        objects that ask for it."""
        (copy / "narrowgauge_cpu.so").unlink()
        commands, run = [], toolchain.run

        def kept(command, what):
            commands.append(command)
            return run(command, what)

        monkeypatch.setattr(toolchain, "run", kept)
        build(Request(out=copy), print)
        (link,) = [each for each in commands if "-shared" in each]
        objects = [at for at, word in enumerate(link) if word.endswith(".o")]
        assert link.index("-ldl") > max(objects)

    def test_files_kept_for_all_builds_are_not_compiled_again_nor_removed(self, copy, tmp_path):
        """As images keep them from one build to the next."""
        kept = copy / "objects"
        (kept / "of-another-torch.0123456789abcdef.o").write_bytes(b"")
        before = sorted(kept.iterdir())
        said = []
        build(Request(out=tmp_path / "another", objects=kept), said.append)
        assert (tmp_path / "another" / "narrowgauge_cpu.so").is_file()
        assert not [line for line in said if line.startswith("compile")]
        assert sorted(kept.iterdir()) == before
        assert not (tmp_path / "another" / "objects").exists()

    def test_a_library_no_longer_asked_for_is_removed(self, edit):
        """Its description must not contradict the directory."""
        directory = edit(cuda_architectures=["8.6"])
        (directory / "narrowgauge_cuda.so").write_bytes(b"old")
        build(Request(out=directory), lambda _: None)
        assert not (directory / "narrowgauge_cuda.so").exists()

    def test_the_library_knows_no_python(self, kernels):
        """One build serves every Python with that torch."""
        symbols = toolchain.run(["nm", "-D", str(kernels / "narrowgauge_cpu.so")], "nm")
        assert " T " in symbols or " U " in symbols
        assert not [line for line in symbols.splitlines() if " U Py" in line or " U _Py" in line]

    def test_a_missing_compiler_names_the_line_that_installs_it(self, capsys):
        assert main(["--compiler", "no-such-compiler"]) == ExitCode.TOOLCHAIN_MISSING
        assert "apt-get install g++" in capsys.readouterr().err

    def test_cuda_for_a_torch_without_cuda(self, monkeypatch, tmp_path, capsys):
        facts = TorchFacts(**{**vars(FACTS), "library": str(tmp_path), "cuda": None})
        monkeypatch.setattr(toolchain, "query_torch", lambda _: facts)
        assert main(["--cuda", "8.6", "--out", str(tmp_path / "out")]) == ExitCode.BUILD_FAILED
        assert "--cuda none" in capsys.readouterr().err

    def test_a_compiler_that_fails_shows_its_last_words(self, tmp_path, capsys):
        """Exit code 13, the end of the output, the command; and no build.json."""
        fake = tmp_path / "g++"
        fake.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit\n'
            "seq 100\necho 'linear.cpp:1: error: no luck'\nexit 1\n"
        )
        fake.chmod(0o755)
        out = tmp_path / "out"
        assert main(["--compiler", str(fake), "--out", str(out)]) == ExitCode.BUILD_FAILED
        said = capsys.readouterr().err
        assert "error: no luck" in said
        assert "\nwhy:  72\n" in said
        assert f"command: {fake}" in said
        assert not (out / "build.json").exists()

    @pytest.mark.parametrize(
        ("code", "error"), [(errno.ENOSPC, DiskFullError), (errno.EROFS, KernelBuildError)]
    )
    def test_a_disk_that_does_not_take_it(self, code, error, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(build_module, "_write_atomic", fail)
        monkeypatch.setattr(build_module, "_compile", lambda *_: ({}, False))
        monkeypatch.setattr(build_module, "units", lambda *_: ())
        with pytest.raises(error, match=str(tmp_path)) as caught:
            build(Request(out=tmp_path))
        assert "--out DIR" in caught.value.next_step

    def test_a_compiler_that_finds_the_disk_full(self):
        """The compiler writes the files, so it is the compiler that is told."""
        say = "echo 'fatal error: error writing to /tmp/a.s: No space left on device'; exit 1"
        with pytest.raises(DiskFullError, match="no room on the disk") as caught:
            toolchain.run(["sh", "-c", say], "compiling linear.cpp")
        assert "No space left" in caught.value.why


class TestLoad:
    def test_importing_does_nothing(self):
        """No torch, no subprocess: the launcher of a build has no torch."""
        code = (
            "import sys, narrowgauge_kernels, narrowgauge_kernels.build;"
            "sys.exit('torch' in sys.modules)"
        )
        assert in_new_process(code) == (0, "")

    def test_loading_twice_is_free(self, kernels):
        assert narrowgauge_kernels.load() == narrowgauge_kernels.load(kernels)

    def test_not_built_gives_the_command_that_builds_here(self, tmp_path):
        with pytest.raises(KernelsNotBuiltError) as caught:
            narrowgauge_kernels.build_hash(tmp_path / "none")
        assert caught.value.next_step == (
            f"PYTHONPATH={SOURCE} {sys.executable} -m narrowgauge_kernels.build"
            f" --out {tmp_path / 'none'}"
        )
        assert not narrowgauge_kernels.is_built(tmp_path / "none")

    def test_what_does_not_fit_is_refused(self, copy, edit):
        """Never loaded to crash later, or to give yesterday's arithmetic."""
        cases = {
            "built for torch 1.7.1": {"torch": {"version": "1.7.1"}},
            "older than their sources": {"source_hash": "0" * 64},
            "has format 99": {"format": 99},
            "lacks narrowgauge_cuda.so": {"libraries": {"cpu": [], "cuda": []}},
        }
        described = (copy / "build.json").read_text()
        for message, fields in cases.items():
            (copy / "build.json").write_text(described)
            directory = edit(**fields)
            assert not narrowgauge_kernels.is_built(directory)
            with pytest.raises(KernelsNotBuiltError, match=message) as caught:
                library.check(directory)
            assert "-m narrowgauge_kernels.build" in caught.value.next_step

    def test_loading_checks_first(self, edit):
        """And `NARROWGAUGE_KERNELS` says where from."""
        status, said = in_new_process(
            "import narrowgauge_kernels; narrowgauge_kernels.load()",
            NARROWGAUGE_KERNELS=str(edit(source_hash="0" * 64)),
        )
        assert status == 1
        assert "older than their sources" in said

    def test_a_damaged_description_is_not_a_build(self, copy):
        (copy / "build.json").write_text('{"format": 1')
        assert not narrowgauge_kernels.is_built(copy)

    def test_a_second_directory_is_refused(self, copy):
        """torch keeps registrations; a second library would abort the process."""
        with pytest.raises(KernelsNotBuiltError, match="in this process already"):
            narrowgauge_kernels.load(copy)

    def test_a_copy_elsewhere_loads_and_is_the_same_build(self, copy, kernels):
        """The libraries hold no path, so an image may move them."""
        code = (
            "import narrowgauge_kernels as k, torch, narrowgauge_kernels.linear as linear;"
            "y = linear.linear_mac(torch.ones(2, 3), torch.ones(4, 3));"
            "print(y.sum().item(), k.build_hash())"
        )
        expected = f"24.0 {narrowgauge_kernels.build_hash(kernels)}\n"
        assert in_new_process(code, NARROWGAUGE_KERNELS=str(copy)) == (0, expected)

    def test_a_hash_of_what_was_built(self, edit, kernels):
        """Other flags, other hash; the same sources, the same source hash."""
        before = narrowgauge_kernels.build_hash(kernels)
        assert narrowgauge_kernels.build_hash(edit()) == before
        assert narrowgauge_kernels.build_hash(edit(flags={})) != before
        assert json.loads((kernels / "build.json").read_text())["source_hash"] == source_hash()

    def test_cuda_tensors_need_a_cuda_build(self, kernels):
        """The command is in the error; torch's own would list dispatch keys."""
        if (kernels / "narrowgauge_cuda.so").exists():
            pytest.skip("this build has CUDA kernels")
        with pytest.raises(KernelsNotBuiltError, match="built for the CPU only") as caught:
            library.require("cuda")
        assert "--cuda auto" in caught.value.next_step


def test_exit_codes_are_the_contracts():
    """The kernels may not import it, so equality is held here."""
    pairs = {
        BuildArgumentError: ExitCode.USAGE,
        ToolchainMissingError: ExitCode.TOOLCHAIN_MISSING,
        KernelBuildError: ExitCode.BUILD_FAILED,
        DiskFullError: ExitCode.DISK_FULL,
        KernelsNotBuiltError: ExitCode.BUILD_FAILED,
        errors.GraphRefusedError: ExitCode.NOT_APPLICABLE,
        errors.KernelsError: ExitCode.INTERNAL,
    }
    assert {getattr(errors, name) for name in errors.__all__} == set(pairs)
    for error, code in pairs.items():
        assert error.exit_code == code


def test_whether_there_are_kernels_is_what_require_finds(monkeypatch):
    def absent(device_type):
        raise KernelsNotBuiltError(f"none for {device_type}")

    assert library.has_kernels("cpu")
    monkeypatch.setattr(library, "require", absent)
    assert not library.has_kernels("cpu")
