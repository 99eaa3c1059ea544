"""What must be equal before the rows of two records may be put into one statistic."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from narrowgauge_contract.codec import encode
from narrowgauge_contract.outcome import InsideFacts
from narrowgauge_contract.placement import document_hash
from narrowgauge_contract.record import Record

__all__ = ["MUST_AGREE", "agreement_facts", "differing", "disagreements"]

MUST_AGREE = (
    "experiment",
    "experiment_code",
    "source",
    "parameters",
    "plan",
    "target",
    "synthetic",
    "torch",
    "kernels_build",
    "measurement",
    "device",
    "threads",
    "allocator",
    "power_mode",
    "energy_source",
)
#: What begins the names of variables that say how many threads there are and how they wait.
_THREADS = ("GOMP_", "KMP_", "MKL_", "OMP_")
#: And of those that say where the memory of a CPU's tensors comes from.
_ALLOCATOR = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_", "THP_")


def agreement_facts(record: Record) -> Dict[str, Any]:
    """What must be equal in records that are aggregated, by the names in MUST_AGREE."""
    inside = record.inside
    machine = record.host.machine if record.host else None
    sources = sorted({m.source for row in record.rows for m in row.metrics if m.unit == "J"})
    return {
        "experiment": record.experiment,
        # Twelve digits of the hashes: enough to tell versions apart, and to be read out.
        "experiment_code": record.hashes.experiment[:12],
        "source": record.hashes.source[:12],
        "parameters": encode(record.parameters),
        # A built-in plan keeps its name where a later version of ours says something else in it.
        "plan": {name: document_hash(each)[:8] for name, each in (record.plan or {}).items()},
        "target": record.target,
        "synthetic": record.synthetic,
        "torch": inside.torch if inside else None,
        "kernels_build": inside.kernels_build if inside else None,
        "measurement": inside.measurement if inside else None,
        "device": (inside.accelerator or inside.cpu) if inside else None,
        "threads": _variables(inside, _THREADS),
        "allocator": _variables(inside, _ALLOCATOR),
        "power_mode": machine.power_mode if machine else None,
        "energy_source": sources,
    }


def _variables(inside: Optional[InsideFacts], begins: Tuple[str, ...]) -> Optional[Dict[str, str]]:
    if inside is None:
        return None
    found = inside.environment.items()
    return {name: value for name, value in sorted(found) if name.startswith(begins)}


def disagreements(one: Record, other: Record) -> List[str]:
    """Why two records must not be aggregated: a line per fact that differs, with both values."""
    return differing(agreement_facts(one), agreement_facts(other))


def differing(left: Dict[str, Any], right: Dict[str, Any]) -> List[str]:
    """`disagreements` of two records by their `agreement_facts`."""
    return [f"{key}: {left[key]} / {right[key]}" for key in MUST_AGREE if left[key] != right[key]]
