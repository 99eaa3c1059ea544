"""A whole nvcc 11.8 with g++ 11, unpacked from Debian 12's packages into a folder of its own.

    python tests/kernels/cuda118.py DIR

Nothing is installed and no source list of the machine changes: apt works on private lists, packages
are unpacked, and only what compiles and links is kept (870 MB download, 350 MB kept). On a
Debian 12 machine of one's own, `apt-get install nvidia-cuda-toolkit g++-11` with `non-free` in the
sources gives the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

#: package -> what of it to keep; None is everything. The static libraries of cuBLAS and its like
#: are most of nvidia-cuda-dev, and nothing here links them.
PACKAGES = {
    "nvidia-cuda-toolkit": ("./usr/bin/*", "./usr/lib/nvidia-cuda-toolkit/*"),
    "nvidia-cuda-dev": ("./usr/include/*", "*/libcudart_static.a", "*/libcudadevrt.a"),
    "g++-11": None,
    "gcc-11": None,
    "cpp-11": None,
    "libgcc-11-dev": None,
    "libstdc++-11-dev": None,
}

#: Debian's own says /usr and /etc throughout.
PROFILE = """\
TOP = $(_HERE_)/../../..
NVVMIR_LIBRARY_DIR = $(TOP)/lib/nvidia-cuda-toolkit/libdevice
CICC_PATH = $(_HERE_)
PATH += $(TOP)/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib/x86_64-linux-gnu"
"""


class NotProvisioned(Exception):  # noqa: N818  (it says what is, not what went wrong)
    """This machine cannot get the packages; the message says why."""


def nvcc_path(root):
    """Where the compiler is below a provisioned folder."""
    return root / "usr" / "lib" / "nvidia-cuda-toolkit" / "bin" / "nvcc"


def cxx_path(root):
    """The host compiler that nvcc 11.8 accepts; g++ 12 is too new for it."""
    return root / "usr" / "bin" / "g++-11"


def provision(root):
    """Fill `root`, once; the folder. Raises NotProvisioned."""
    if not (root / "complete").exists():
        _check_machine()
        shutil.rmtree(str(root), ignore_errors=True)  # an attempt that was cut short
        work = root / "apt"
        _download(work, _mirror())
        for package, wanted in PACKAGES.items():
            (archive,) = work.glob(f"{package}_*.deb")
            _unpack(archive, wanted, root)
        shutil.rmtree(str(work))
        profile = nvcc_path(root).with_name("nvcc.profile")
        profile.unlink()  # a link to /etc
        profile.write_text(PROFILE)
        _adopt_runtime(root)
        (root / "complete").touch()
    return root


def _check_machine():
    if shutil.which("apt-get") is None or not KEYRING.is_file():
        raise NotProvisioned("Debian's apt-get and archive keyring are needed")
    if os.uname().machine != "x86_64":
        raise NotProvisioned("Debian's CUDA 11.8 is for x86-64")


def _mirror():
    """The Debian mirror that apt is set to already."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in listed.stdout.splitlines():
        site, _, codename = line.partition(" ")
        if codename == "bookworm" and "security" not in site:
            return site
    raise NotProvisioned("apt here is not set to a mirror of Debian 12")


def _download(work, mirror):
    (work / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (work / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    sources = work / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} bookworm main contrib non-free\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "",  # root's downloads too go to a folder that _apt cannot enter
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    for arguments in (["update"], ["download", *PACKAGES]):
        done = subprocess.run(
            [*apt, *arguments],
            cwd=str(work),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise NotProvisioned(f"apt-get {arguments[0]} failed:\n{done.stdout[-2000:]}")


def _unpack(archive, wanted, root):
    patterns = [] if wanted is None else ["--wildcards", *wanted]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as reader:
        subprocess.run(["tar", "-x", "-C", str(root), *patterns], stdin=reader.stdout, check=True)


def _adopt_runtime(root):
    """g++ 11 looks for the machine's C++ runtime below the root, through a relative link."""
    library = root / "usr" / "lib" / "x86_64-linux-gnu" / "libstdc++.so.6"
    library.symlink_to("/usr/lib/x86_64-linux-gnu/libstdc++.so.6")


if __name__ == "__main__":
    print(nvcc_path(provision(Path(sys.argv[1]).resolve())))
