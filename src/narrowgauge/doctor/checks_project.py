"""The checkout and what runs need around it: room, results, data, caches, pins, environment."""

from __future__ import annotations

import shlex

from narrowgauge.doctor.findings import Check, Finding, error, note, ok, skipped, warning
from narrowgauge.doctor.situation import Problem, Situation
from narrowgauge.targets import Target

__all__ = ["CHECKS"]

_GB = 10**9
#: An image beside what is downloaded for it: unpacked, and the build's own layers.
_UNPACKED = 4
#: For targets that do not say what they download: the NVIDIA bases take 6 to 15 GB unpacked.
_ACCELERATED_BYTES = 30 * _GB
#: With the image built: a rebuild of its upper layers, logs, caches.
_BUILT_BYTES = 2 * _GB
_RESULTS_BYTES = _GB


def _disk_engine(at: Situation) -> Finding:
    if isinstance(at.engine, Problem):
        return skipped("no engine to ask")
    if at.engine.free_bytes is None:
        return skipped(f"its folder {at.engine.folder} is not on this host, or not for you to see")
    if at.target is None:
        return skipped("no target whose image would need room")
    free, needed = at.engine.free_bytes, _image_bytes(at.target, at.engine.has_image)
    what = "is built" if at.engine.has_image else f"would take up to {needed / _GB:.0f} GB"
    told = f"{free / _GB:.0f} GB free in {at.engine.folder}; the image {what}"
    if free < needed:
        return error(
            told,
            "docker system df shows what takes the room; docker image prune and docker builder"
            " prune free some",
        )
    return ok(told)


def _image_bytes(target: Target, built: bool) -> int:
    if built:
        return _BUILT_BYTES
    if target.download_mb is None:
        return _ACCELERATED_BYTES
    return target.download_mb * 10**6 * _UNPACKED


def _disk_results(at: Situation) -> Finding:
    place = at.project.results
    told = f"{place.free_bytes / _GB:.0f} GB free for {place.path}"
    if place.free_bytes < _RESULTS_BYTES:
        return warning(told, "free some, or keep results elsewhere: --results DIR")
    return ok(told)


def _results(at: Situation) -> Finding:
    place = at.project.results
    if place.writable:
        return ok(f"{place.path} can be {'written' if place.exists else 'made'}")
    return error(
        f"you may not write to {place.path}, which belongs to user {place.owner}",
        f"sudo chown -R $(id -u):$(id -g) {shlex.quote(place.path)};"
        " or choose another: --results DIR",
    )


def _data(at: Situation) -> Finding:
    found = at.project.data
    if isinstance(found, Problem):
        if found.late:
            return note(f"{found.text()}: a set is being hashed?", "narrowgauge data verify")
        look = f"ls -la {shlex.quote(at.project.data_root)}: you must be able to read what is there"
        return error(found.text(), found.next_step or look)
    corrupt = [each.name for each in found if each.state == "corrupt"]
    missing = [each.name for each in found if each.state == "missing"]
    if corrupt:
        names = " ".join(corrupt)
        return error(f"not what it should be: {names}", f"narrowgauge data verify {names} --repair")
    if missing:
        return note(
            f"not here: {', '.join(missing)} (the first run that needs one fetches it)",
            f"narrowgauge data fetch {' '.join(missing)}",
        )
    return ok(f"complete in {at.project.data_root}")


def _cache(at: Situation) -> Finding:
    if isinstance(at.engine, Problem) or at.target is None:
        return skipped("no engine to ask" if isinstance(at.engine, Problem) else "no target")
    if at.engine.volumes:
        return ok(f"{len(at.engine.volumes)} of yours for {at.target.name}")
    return note(
        f"none of yours for {at.target.name} yet: the first run compiles and tunes anew",
        "run once before measuring; the record says whether the cache was cold",
    )


def _pins(at: Situation) -> Finding:
    told = [f"{name} ({', '.join(pins)})" for name, pins in at.project.unresolved.items()]
    if not told:
        return ok("every base and torch is pinned")
    concerned = at.target is not None and at.target.name in at.project.unresolved
    text = f"nobody has resolved: {', '.join(told)}"
    remedy = "on a machine that reaches the registries: narrowgauge images lock"
    return warning(text, remedy) if concerned else note(text, remedy)


def _lab_python(at: Situation) -> Finding:
    lab = at.project.lab
    if lab is None:
        return note(
            "no native environment yet: the first native run makes one",
            "narrowgauge run mnist --executor native, or --lab-python PYTHON",
        )
    remove = f"rm -r {shlex.quote(lab.path)}"
    if not lab.starts:
        return warning(f"{lab.path} has lost its Python", f"{remove}; it is made anew")
    if at.host.has_gpu and "+cpu" in lab.torch:
        return warning(
            f"torch {lab.torch} in {lab.path} has no CUDA, and there is a GPU",
            f"{remove}; it is made anew with a torch for this host",
        )
    return ok(f"Python {lab.python} with torch {lab.torch}")


CHECKS = (
    Check(
        "disk-engine",
        "there is room for the target's image",
        "A build that runs out of room leaves half of it behind, and other runs without any.",
        "docker image prune removes images without a name, docker builder prune the build cache.",
        _disk_engine,
    ),
    Check(
        "disk-results",
        "there is room for results",
        "A record that cannot be written is a run lost. Runs keep events, samples and pictures.",
        "Free some room, or keep results elsewhere with --results DIR.",
        _disk_results,
    ),
    Check(
        "results",
        "you may write the results folder",
        "Containers run as you. A folder that a container of root's once made is closed to them.",
        "sudo chown -R $(id -u):$(id -g) on the folder that the remedy names.",
        _results,
    ),
    Check(
        "data",
        "the data sets are here, and are what they should be",
        "A run verifies its data by sha256 before it starts, and fetches what is missing. On a "
        "board without a network that fails, so bring them before.",
        "narrowgauge data fetch; narrowgauge data verify SET --repair for a damaged one; "
        "narrowgauge data pack and unpack to carry one over.",
        _data,
    ),
    Check(
        "cache",
        "a warm cache volume of yours is there for the target",
        "Compiled and tuned code is kept in one volume for each image and user. With a cold one "
        "the first rows also pay for compiling.",
        "Run once and throw the result away; docker volume rm makes it cold again.",
        _cache,
    ),
    Check(
        "pins",
        "base images and torch are pinned by digest and hash",
        "Without a pin the same recipe gives another image tomorrow. A record of such an image "
        "says so.",
        "narrowgauge images lock, on a machine that reaches the registries; commit what it writes.",
        _pins,
    ),
    Check(
        "lab-python",
        "the native environment is whole and fits the host",
        "Native runs use .venv-lab with torch and the kernels compiled for it. One without CUDA "
        "measures the processor.",
        "Remove the folder: the next native run makes it anew. Or name a Python of your own: "
        "--lab-python PYTHON.",
        _lab_python,
    ),
)
