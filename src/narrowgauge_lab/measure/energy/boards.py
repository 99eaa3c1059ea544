"""Which rail of a Jetson feeds what, and how a board's total is had. Data, and how it is matched.

A board is known by its rails, not by its name: a container does not see the device tree, and the
modules that share a set of rails share all that is said here. A rail that feeds several parts keeps
its name and all of them; how they share it nobody can say from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional, Tuple

from narrowgauge_lab.measure.energy.source import Rail, Total

__all__ = ["BOARDS", "PRIMARY", "SECONDARY", "Board", "board_with", "describe_rail", "total_of"]

#: Where a line of the map is from. What is secondary was never read on a board by us.
PRIMARY = "the name on the board itself"
SECONDARY = "secondary source, not checked on a board"

_NX_PARTS = ("cpu", "gpu", "dla", "pva")


@dataclass(frozen=True)
class Board:
    """`rails`: name → parts. `optional` ones are on a monitor that a carrier may lack. `total` is a
    rule of `Total`; `layouts` are the kernels' that the board has had: "hwmon" from JetPack 5 on,
    "iio" up to JetPack 4. `secondary`: the rails whose line has a secondary source only."""

    names: Tuple[str, ...]
    rails: Tuple[Tuple[str, Tuple[str, ...]], ...]
    total: Total
    layouts: Tuple[str, ...]
    optional: Tuple[str, ...] = ()
    secondary: Tuple[str, ...] = ()

    @property
    def all_rails(self) -> Tuple[str, ...]:
        return tuple(name for name, _ in self.rails)

    @property
    def needed(self) -> Tuple[str, ...]:
        return tuple(name for name in self.all_rails if name not in self.optional)


#: A module's DLA and PVA are named where at least one of the board's modules has them.
# unverified: NX, Orin Nano, 2nd Orin monitor | secondary sources | cat hwmon*/in*_label on one
BOARDS = (
    Board(
        names=("AGX Xavier",),
        rails=(
            ("GPU", ("gpu",)),
            ("CPU", ("cpu",)),
            ("SOC", ("soc",)),
            ("CV", ("dla", "pva")),
            ("VDDRQ", ("memory",)),
            ("SYS5V", ("carrier 5 V",)),
        ),
        total=Total(
            "sum",
            ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
            "the board has no rail for all of it; the sum of its six",
        ),
        layouts=("iio", "hwmon"),
    ),
    Board(
        names=("Xavier NX", "Orin NX", "Orin Nano"),
        rails=(
            ("VDD_IN", ("module",)),
            ("VDD_CPU_GPU_CV", _NX_PARTS),
            ("VDD_SOC", ("soc",)),
        ),
        total=Total("rail", ("VDD_IN",), "VDD_IN feeds the whole module"),
        layouts=("iio", "hwmon"),
        secondary=("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"),
    ),
    Board(
        names=("AGX Orin",),
        rails=(
            ("VDD_GPU_SOC", ("gpu", "soc")),
            ("VDD_CPU_CV", ("cpu", "dla", "pva")),
            ("VIN_SYS_5V0", ("carrier 5 V",)),
            ("VDDQ_VDD2_1V8AO", ("memory", "always-on 1.8 V")),
        ),
        total=Total(
            "none",
            (),
            "the board has no rail for all of it, and nothing says that its rails are all there is",
        ),
        layouts=("hwmon",),
        optional=("VDDQ_VDD2_1V8AO",),
        secondary=("VDDQ_VDD2_1V8AO",),
    ),
    Board(
        names=("TX2",),
        rails=(
            ("VDD_IN", ("module",)),
            ("VDD_CPU", ("cpu",)),
            ("VDD_GPU", ("gpu",)),
            ("VDD_SOC", ("soc",)),
            ("VDD_WIFI", ("wifi",)),
            ("VDD_DDR", ("memory",)),
        ),
        total=Total("rail", ("VDD_IN",), "VDD_IN feeds the whole module"),
        layouts=("iio",),
    ),
    Board(
        names=("Nano",),
        rails=(
            ("POM_5V_IN", ("module",)),
            ("POM_5V_GPU", ("gpu",)),
            ("POM_5V_CPU", ("cpu",)),
        ),
        total=Total("rail", ("POM_5V_IN",), "POM_5V_IN feeds the whole module"),
        layouts=("iio",),
    ),
)


def board_with(rails: Iterable[str]) -> Optional[Board]:
    """The board that has exactly these rails, up to optional ones; None where none has."""
    found = set(rails)
    for board in BOARDS:
        if set(board.needed) <= found <= set(board.all_rails):
            return board
    return None


def total_of(rails: Iterable[str]) -> Total:
    """How the total is had from these rails, or why it is not."""
    found = tuple(rails)
    board = board_with(found)
    if board is not None:
        return board.total
    near = _most_like(found)
    listed = ", ".join(found)
    if near is None:
        return Total("none", (), f"no board with the rails {listed} is known")
    missing = ", ".join(name for name in near.needed if name not in found)
    more = ", ".join(name for name in found if name not in near.all_rails)
    differs = " and ".join(
        words for words in (missing and f"without {missing}", more and f"with {more}") if words
    )
    return Total("none", (), f"like {' or '.join(near.names)}, but {differs}: a part is no total")


def describe_rail(name: str, rails: Iterable[str], place: str) -> Rail:
    """A rail with what the map of its board says of it; with nothing where no board is known."""
    board = board_with(rails)
    if board is None:
        return Rail(name, (), "no board with these rails is known", place)
    origin = SECONDARY if name in board.secondary else PRIMARY
    return Rail(name, dict(board.rails)[name], f"{' or '.join(board.names)}: {origin}", place)


def _most_like(rails: Tuple[str, ...]) -> Optional[Board]:
    """The board that shares most rails with these; None where none shares any."""
    shared = [(len(set(rails) & set(board.all_rails)), board) for board in BOARDS]
    count, board = max(shared, key=lambda pair: pair[0])
    return board if count else None
