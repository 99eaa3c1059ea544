"""A policy's single products: how far they are from exact, without any network."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional

import numpy as np

from narrowgauge_kernels.mac import FLOAT_MACS, Mac, reference
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.manual.policies import Policy, parse_policy
from narrowgauge_lab.multipliers import error_statistics, find_table

from .weights import FOLDER

__all__ = ["found_policy", "mac_of", "product_figures", "record_products"]

#: Pairs, uniform in [0, 1): the deviation of a mean over them is below a thousandth of it.
_PAIRS = 1 << 20
_SEED = 0
#: The operands that Defensive Approximation's tutorial shows the product of.
_SHOWN = (0.856, 0.471)
_NAMES = {"axfpm": "axfpm_faithful"}


def found_policy(text: str) -> Policy:
    """The policy that `text` names; its file is looked for in this experiment's folder first.

    Raises what `parse_policy` raises.
    """
    policy = parse_policy(text)
    # Behind a table's file may stand a function.
    name = policy.source if policy.name == "custom" else policy.source.partition(":")[0]
    if name and (FOLDER / name).is_file():
        return dataclasses.replace(policy, source=str(FOLDER / policy.source))
    return policy


def mac_of(policy: Policy) -> Optional[Mac]:
    """As `reference` takes it; None where numpy has no such product: codes, and functors."""
    name = _NAMES.get(policy.name, policy.name)
    return Mac(name, policy.bits) if name in FLOAT_MACS else None


def product_figures(mac: Mac) -> Dict[str, float]:
    """Of random pairs: `product_mred`, the mean of |error| / exact; `product_bias`, that with its
    sign; `product_larger`, the share in percent above exact. Of 0.856 · 0.471: `product_shown`."""
    random = np.random.RandomState(_SEED)
    a, b = (random.random_sample(_PAIRS).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) * b
    relative = reference(mac, a, b).astype(np.float64) / exact - 1.0
    shown = reference(mac, *(np.array([each], dtype=np.float32) for each in _SHOWN))
    return {
        "product_mred": float(np.abs(relative).mean()),
        "product_bias": float(relative.mean()),
        "product_larger": 100.0 * float((relative > 0).mean()),
        "product_shown": float(shown[0]),
    }


def record_products(ctx: RowContext, policy: Policy) -> None:
    """Record a float policy's figures, or those of a table over all pairs of codes."""
    mac = mac_of(policy)
    if mac is not None:
        for name, value in product_figures(mac).items():
            unit = "%" if name == "product_larger" else "1"
            ctx.metric(name, value, unit=unit, source="computed")
    elif policy.name == "lut8x8":
        statistics = error_statistics(find_table(policy.source, policy.signed))
        for name in ("er", "med", "nmed", "mred", "worst", "bias"):
            value = float(getattr(statistics, name))
            ctx.metric(f"table_{name}", value, unit="1", source="all pairs")
