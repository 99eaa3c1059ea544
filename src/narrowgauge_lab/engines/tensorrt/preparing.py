"""A runner from the cache or from a build, whatever the network comes from."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, ContextManager, List, Mapping, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.engines.base import Preparation, Profile
from narrowgauge_lab.engines.cache import EngineCache
from narrowgauge_lab.engines.keys import CacheKey, content_hash, device_fields
from narrowgauge_lab.engines.tensorrt.build import Define, Kept, build
from narrowgauge_lab.engines.tensorrt.bundle import Built, pack, unpack
from narrowgauge_lab.engines.tensorrt.execution import Loaded, load, make_queue
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.refit import Trained
from narrowgauge_lab.engines.tensorrt.runner import TensorRTRunner
from narrowgauge_lab.engines.tensorrt.settings import Settings
from narrowgauge_lab.errors import CalibrationError

__all__ = ["Job", "calibration_table", "prepared"]


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a build is made of. `key`: of the engine, None where nothing is cached."""

    library: Library
    define: Define
    settings: Settings
    profile: Profile
    wanted: Preparation
    key: Optional[CacheKey]
    weights: Optional[Trained] = None

    @property
    def device(self) -> torch.device:
        return self.wanted.device


def prepared(job: Job) -> TensorRTRunner:
    """The runner of the engine in the cache, or of a new one, which is then kept there.

    Raises what `build` raises, EngineRunError, NotApplicableError where a DLA core is full.
    """
    cache, key = job.wanted.cache, job.key
    if cache is None or key is None:
        return _runner(job, _built(job, Kept()), None)
    usable: List[Tuple[Built, Loaded]] = []
    said: List[str] = []

    def make() -> bytes:
        built, notes = _with_caches(job, cache, key)
        said.extend(notes)
        return pack(built)

    def unusable(payload: bytes) -> str:
        built = unpack(payload)
        if built is None:
            return "the cached engine is not as it was written"
        try:
            queue = make_queue(job.device)
            usable.append((built, load(job.library, built.plan, job.settings.dla, queue)))
        except EngineRunError as error:
            return f"TensorRT cannot load the cached engine: {error.why}"
        return ""

    cached = cache.fetch(key, make, unusable)
    if cached.from_cache:
        built, loaded = usable[0]
        runner = _runner(job, built, loaded)
    else:
        fresh = unpack(cached.payload)
        assert fresh is not None
        runner = _runner(job, fresh, None)
    runner.from_cache, runner.cache_key = cached.from_cache, cached.key
    runner.cache_note = "; ".join(filter(None, (cached.note, *said)))
    return runner


def calibration_table(job: Job) -> bytes:
    """The table that the job's calibrator writes: a kept one, or that of a build. Raises what
    `build` raises, CalibrationError where TensorRT writes none."""
    cache, key = job.wanted.cache, job.key
    if cache is not None and key is not None:
        kept = cache.get(_table_key(job, key)).payload
        if kept is not None:
            return kept
    made = Kept()
    _built(job, made)
    if made.new_table is None:
        raise CalibrationError("TensorRT calibrated and wrote no table")
    if cache is not None and key is not None:
        cache.put(_table_key(job, key), made.new_table)
    return made.new_table


def _runner(job: Job, built: Built, loaded: Optional[Loaded]) -> TensorRTRunner:
    return TensorRTRunner(
        job.library, built, job.profile, job.device, job.settings.dla, job.weights, loaded
    )


def _on(device: torch.device) -> ContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _built(job: Job, kept: Kept) -> Built:
    with _on(job.device):
        return build(
            job.library, job.define, job.settings, job.profile, job.wanted.calibration,
            job.device, kept,
        )  # fmt: skip


def _with_caches(job: Job, cache: EngineCache, key: CacheKey) -> Tuple[Built, Sequence[str]]:
    """The engine, and what there is to say about the caches that helped to build it."""
    timings, table = _timings_key(job), _table_key(job, key)
    kept, notes = Kept(), []
    if job.settings.timing_cache:
        entry = cache.get(timings)
        kept.timings = entry.payload
        notes.append(entry.note.replace("the cached engine", "the timing cache"))
    if job.settings.calibrator:
        entry = cache.get(table)
        kept.table = entry.payload
        notes.append(entry.note.replace("the cached engine", "the calibration table"))
    built = _built(job, kept)
    if kept.timings:
        notes.append(cache.put(timings, kept.timings))
    if kept.new_table is not None:
        notes.append(cache.put(table, kept.new_table))
    return built, [note for note in notes if note]


def _timings_key(job: Job) -> CacheKey:
    """Timings are of kernels on a device, of whatever network."""
    return CacheKey({"engine": "tensorrt-timings"}, _here(job))


def _table_key(job: Job, key: CacheKey) -> CacheKey:
    """A calibration table is of a network and images; the device has no part in it."""
    asked = {
        "engine": "tensorrt-calibration",
        "calibrator": job.settings.calibrator,
        "images": content_hash([("", each) for each in job.wanted.calibration]),
        **{name: key.asked[name] for name in ("network", "weights")},
    }
    return CacheKey(asked, {"version of tensorrt": job.library.features.version})


def _here(job: Job) -> Mapping[str, str]:
    version = job.library.features.version
    return {"version of tensorrt": version, **device_fields(job.device)}
