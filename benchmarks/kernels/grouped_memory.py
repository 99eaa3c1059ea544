"""Which kernels of cuDNN go beyond a grouped convolution's tensors, by compute-sanitizer.

    PYTHONPATH=src python benchmarks/kernels/grouped_memory.py [--dtypes float32 bfloat16]
                   [--layouts nhwc nchw] [--branches 4 8 16] [--groups 1 3 7] [--ours]
                   [--search on|off] [--jobs 8] [--json FILE]

Each case is a process of its own under `compute-sanitizer` (of the CUDA toolkit): a convolution of
`groups` branches with its gradients, every tensor in an allocation of its own, as a training gives
them to cuDNN. The first access that is nobody's ends the process, so a row tells the first kernel
of its case that is at fault, and no others. `--search off` leaves out cuDNN's search for the
fastest kernel, which runs all that it has. `--ours` is one product of all channels, as IResNeXt has
it (`grouped_conv` of `narrowgauge_lab.anytime.systems.iresnext_parts`): where a row tells a fault
even then the exit code is 1. It is 2 where a case could not be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files
from grouped_conv import EXTENTS

_IMAGES = 64
_FIELDS = ("dtype", "layout", "branch", "groups")
_DONE = "done"
_PATIENCE_S = 300.0
_ACCESS = re.compile(
    r"Invalid \S+ (?P<access>read|write) of size (?P<size>[\d,]+) bytes?\s*"
    r"={9}\s+at (?P<kernel>.+?)(?:\+0x[0-9a-f]+)?(?: in \S+)?$",
    re.MULTILINE,
)
_BEYOND = re.compile(r"is (?P<beyond>[\d,]+) bytes? after .* of size (?P<held>[\d,]+) bytes?")


def accessed(log: str) -> dict[str, Any] | None:
    """The first invalid access that a log of compute-sanitizer tells of: its kernel, whether it
    reads or writes, its bytes, and how many bytes behind an allocation of how many it begins, where
    it says so. None where there is none."""
    found = _ACCESS.search(log)
    if found is None:
        return None
    row = {"kernel": found["kernel"], "access": found["access"], "bytes": _number(found["size"])}
    told, _, _ = log[found.end() :].partition("Invalid ")
    place = _BEYOND.search(told)
    if place is not None:
        # The tool counts the first byte behind an allocation as 1 after it.
        row["beyond"] = _number(place["beyond"]) - 1
        row["allocation"] = _number(place["held"])
    return row


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def run_case(dtype: str, layout: str, branch: int, groups: int, ours: bool, search: bool) -> None:
    """What a process under the tool does; prints each pass before it begins, and `done`."""
    import torch

    from narrowgauge_lab.anytime.systems.iresnext_parts import grouped_conv

    torch.backends.cudnn.benchmark = search
    given = getattr(torch, dtype)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    channels, extent = branch * groups, EXTENTS.get(branch, 8)
    x = torch.randn(_IMAGES, channels, extent, extent, device="cuda", dtype=given)
    x = x.contiguous(memory_format=form).requires_grad_()
    weight = torch.randn(channels, branch, 3, 3, device="cuda", dtype=given)
    weight = weight.contiguous(memory_format=form).requires_grad_()
    print("forward", flush=True)
    if ours:
        y = grouped_conv(x, weight, groups)
    else:
        y = torch.nn.functional.conv2d(x, weight, padding=1, groups=groups)
    torch.cuda.synchronize()
    print("backward", flush=True)
    torch.autograd.grad(y.float().sum(), (x, weight))
    torch.cuda.synchronize()
    print(_DONE, flush=True)


def measured(case: tuple[str, str, int, int], options: argparse.Namespace) -> dict[str, Any]:
    """The row of a case: `fault` is what `accessed` found, `error` why it was not run."""
    words = [options.sanitizer, "--show-backtrace", "no", "--print-limit", "1", sys.executable]
    words += [__file__, "--case", *map(str, case), "--search", options.search]
    words += ["--ours"] if options.ours else []
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    row: dict[str, Any] = dict(zip(_FIELDS, case, strict=True))
    try:
        ran = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**row, "fault": None, "error": str(error)}
    said = ran.stdout.split()
    fault = accessed(ran.stdout + ran.stderr)
    if fault is not None:
        fault["pass"] = "backward" if "backward" in said else "forward"
        return {**row, "fault": fault, "error": ""}
    return {**row, "fault": None, "error": "" if _DONE in said else ran.stderr[-400:] or "no end"}


def _told(row: dict[str, Any]) -> str:
    case = f"{row['dtype']:9} {row['layout']:5} {row['groups']:2} of {row['branch']:2}"
    if row["error"]:
        return f"{case}  NOT RUN: {row['error'].strip()}"
    fault = row["fault"]
    if fault is None:
        return f"{case}  -"
    where = f", {fault['beyond']} bytes behind {fault['allocation']}" if "beyond" in fault else ""
    return f"{case}  {fault['pass']}: {fault['access']}s {fault['bytes']}{where}: {fault['kernel']}"


def main(arguments: Sequence[str]) -> int:
    """Run all cases; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--layouts", nargs="+", choices=("nhwc", "nchw"), default=["nhwc", "nchw"])
    parser.add_argument("--branches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 3, 7])
    parser.add_argument("--ours", action="store_true", help="one product of all channels")
    parser.add_argument("--search", choices=("on", "off"), default="on")
    parser.add_argument("--jobs", type=int, default=8, help="cases at once (default: 8)")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        dtype, layout, branch, groups = options.case
        run_case(dtype, layout, int(branch), int(groups), options.ours, options.search == "on")
        return 0
    if shutil.which(options.sanitizer) is None:
        print(f"error: no {options.sanitizer} here; it is of the CUDA toolkit", file=sys.stderr)
        return 2
    cases = [
        (dtype, layout, branch, groups)
        for dtype in options.dtypes
        for layout in options.layouts
        for branch in options.branches
        for groups in options.groups
    ]
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        rows = list(pool.map(lambda case: measured(case, options), cases))
    for row in rows:
        print(_told(row))
    if options.json:
        whole = {"ours": options.ours, "search": options.search, "rows": rows}
        sample_files.write(options.json, whole)
    if any(row["error"] for row in rows):
        return 2
    return 1 if options.ours and any(row["fault"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
