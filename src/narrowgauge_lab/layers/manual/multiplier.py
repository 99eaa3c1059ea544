"""The table behind an 8-bit policy, and what was found of its structure. Each is read and analysed
once a process."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from narrowgauge_lab.layers.manual.gradients import Slopes, slopes_of
from narrowgauge_lab.layers.manual.policies import Policy
from narrowgauge_lab.layers.manual.quantise import Format
from narrowgauge_lab.multipliers.families import exact
from narrowgauge_lab.multipliers.importing import find_table
from narrowgauge_lab.multipliers.structure import Structure, analyse
from narrowgauge_lab.multipliers.table import Table

__all__ = ["Multiplier", "multiplier_of"]

#: Tables and their analyses that are kept; one is 256 KB.
_KEPT = 64
_CODES = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Multiplier:
    """`largest`: the greatest magnitude of any product."""

    table: Table
    structure: Structure
    largest: int

    def form(self, per_channel: bool) -> Format:
        """The codes that it takes."""
        table = self.table
        return Format(table.a_signed, table.b_signed, per_channel, table.bits)

    def slopes(self, window: int) -> Slopes:
        """Of its own table, for local gradients."""
        return _slopes(self, window)


@functools.lru_cache(maxsize=_KEPT)
def multiplier_of(policy: Policy) -> Multiplier:
    """Of `exact_int8` or a `lut8x8`. Raises what naming, importing and checking a table raise."""
    table = _table(policy)
    return Multiplier(table, analyse(table), int(np.abs(table.values.astype(np.int64)).max()))


def _table(policy: Policy) -> Table:
    if policy.name == "exact_int8":
        return exact(signed=True)
    return find_table(policy.source, policy.signed)


@functools.lru_cache(maxsize=_KEPT)
def _slopes(multiplier: Multiplier, window: int) -> Slopes:
    table = multiplier.table
    used = (_used(table.a_signed, table.bits), _used(table.b_signed, table.bits))
    return slopes_of(table.values, window, used)


def _used(signed: bool, bits: int) -> slice:
    """Where a table has the codes of an operand of so many bits."""
    first = _CODES // 2 - 2 ** (bits - 1) if signed else 0
    return slice(first, first + 2**bits)
