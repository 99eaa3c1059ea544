"""A MAC policy: how one product of an activation (first) and a weight (second) is formed.

| text                  | products                                                               |
|-----------------------|------------------------------------------------------------------------|
| `exact_fp32`          | float32, exact before the sum rounds                                   |
| `axfpm`               | Ax-FPM as its authors' program computes it (`axfpm_faithful` as well)  |
| `axfpm_fixed`         | Ax-FPM with the exponent put right where the significand overflows     |
| `axbf16`              | its bfloat16 variant                                                   |
| `truncated(k)`        | of the k leading significand bits of both operands, 1 to 23            |
| `mitchell`            | the logarithmic multiplier                                             |
| `custom:FILE`         | a functor in C++, compiled at its first use                            |
| `exact_int8`          | of 8-bit codes, exact; activations and weights symmetric               |
| `lut8x8:NAME`         | of 8-bit codes, by the table of 256 × 256 of a known multiplier        |
| `lut8x8:FILE`         | by a table of the user's: FILE.npy, FILE.c, FILE.c:FUNCTION or         |
|                       | FILE.py:FUNCTION, and `,signed` or `,unsigned` behind it               |

Sums are exact in their accumulator: float32 in ascending order for the first seven, int32 for the
8-bit ones.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Match, Optional

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.multipliers.importing import is_file

__all__ = ["GRADIENTS", "NAMES", "Gradient", "Policy", "parse_gradient", "parse_policy"]

NAMES = (
    "exact_fp32",
    "axfpm",
    "axfpm_fixed",
    "axbf16",
    "truncated",
    "mitchell",
    "custom",
    "exact_int8",
    "lut8x8",
)
GRADIENTS = ("straight-through", "local")

_SYNONYMS = {"axfpm_faithful": "axfpm"}
_CODES = ("exact_int8", "lut8x8")
#: What a policy takes after its colon, and an example.
_SOURCES = {
    "lut8x8": ("table", "lut8x8:ama5, or lut8x8:table.npy"),
    "custom": ("file", "custom:mac.h"),
}
_TEXT = re.compile(r"(?P<name>[^(:]*)(?:\((?P<number>[^()]*)\)|:(?P<source>.+))?", re.DOTALL)
_MOST_BITS = 23
_SIGNS = (",signed", ",unsigned")
#: A window of one code to each side, and of half the codes at most.
_LEAST_WINDOW, _MOST_WINDOW = 1, 127


@dataclasses.dataclass(frozen=True)
class Policy:
    """One policy. `bits`: of `truncated`; `source`: the table of `lut8x8`, the file of `custom`;
    `signed`: whether the codes of a table from a file are, None where it says so itself.

    Raises UnknownNameError with the nearest name, BadValueError for what a name does not take.
    """

    name: str
    bits: int = 0
    source: str = ""
    signed: Optional[bool] = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UnknownNameError("MAC policy", self.name, NAMES)
        self._check_bits()
        self._check_source()

    def _check_bits(self) -> None:
        truncated = self.name == "truncated"
        if truncated and not 1 <= self.bits <= _MOST_BITS:
            raise BadValueError(
                f"a significand truncated to {self.bits} bits",
                why="float32 has 23 after the hidden one, and none at all is no number",
                next_step=f"give 1 to {_MOST_BITS}, as in truncated(7)",
            )
        if self.bits and not truncated:
            raise BadValueError(
                f"'{self.name}' takes no number of bits", next_step="only truncated(k) does"
            )

    def _check_source(self) -> None:
        wanted = _SOURCES.get(self.name)
        if wanted and not self.source:
            raise BadValueError(
                f"'{self.name}' does not say which {wanted[0]}",
                next_step=f"give it after a colon: {wanted[1]}",
            )
        if self.source and not wanted:
            raise BadValueError(
                f"'{self.name}' takes nothing after a colon",
                next_step="lut8x8:TABLE and custom:FILE do",
            )
        if self.signed is not None and (self.name != "lut8x8" or not is_file(self.source)):
            raise BadValueError(
                f"'{self.source or self.name}' cannot be told to be signed or not",
                why="only a table from a file can; a known multiplier's name says so itself",
                next_step="such as lut8x8:ama5-signed",
            )

    @property
    def eight_bit(self) -> bool:
        """Whether operands are 8-bit codes, and not float32."""
        return self.name in _CODES

    def __str__(self) -> str:
        if self.bits:
            return f"{self.name}({self.bits})"
        said = "" if self.signed is None else _SIGNS[not self.signed]
        return f"{self.name}:{self.source}{said}" if self.source else self.name


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What stands for the derivative of a product, which has steps.

    `straight-through`: that of the exact product. `local`: the slope of the policy's own product
    around the operands: over `window` codes to each side for 8-bit policies, over an eighth of the
    operand to each side for the others.
    """

    kind: str = "straight-through"
    window: int = _LEAST_WINDOW

    def __post_init__(self) -> None:
        if self.kind not in GRADIENTS:
            raise UnknownNameError("gradient", self.kind, GRADIENTS)
        if not _LEAST_WINDOW <= self.window <= _MOST_WINDOW:
            raise BadValueError(
                f"a local gradient over {self.window} codes to each side",
                next_step=f"give {_LEAST_WINDOW} to {_MOST_WINDOW}, as in local(4)",
            )

    @property
    def local(self) -> bool:
        return self.kind == "local"

    def __str__(self) -> str:
        plain = self.window == _LEAST_WINDOW
        return self.kind if plain else f"{self.kind}({self.window})"


def parse_policy(text: str) -> Policy:
    """The policy that `text` names; see the module's table. No file is read.

    Raises UnknownNameError with the nearest name, BadValueError where the rest is malformed.
    """
    found = _matched(text, "MAC policy")
    name = found.group("name").strip()
    name = _SYNONYMS.get(name, name)
    number = _number(text, found.group("number"))
    if number is not None and name in NAMES and name != "truncated":
        raise BadValueError(f"'{name}' takes no number", next_step="only truncated(k) does")
    source, signed = found.group("source") or "", None
    for said in _SIGNS if name == "lut8x8" else ():
        if source.endswith(said):
            source, signed = source[: -len(said)], said == _SIGNS[0]
    return Policy(name, number or 0, source, signed)


def parse_gradient(text: str) -> Gradient:
    """`straight-through`, `local`, or `local(h)` with h codes to each side.

    Raises UnknownNameError with the nearest name, BadValueError where the rest is malformed.
    """
    found = _matched(text, "gradient")
    name, number = found.group("name").strip(), _number(text, found.group("number"))
    if found.group("source") is not None or (number is not None and name == "straight-through"):
        raise BadValueError(
            f"'{text}' is no gradient", next_step="give straight-through, local or local(h)"
        )
    return Gradient(name) if number is None else Gradient(name, number)


def _matched(text: str, kind: str) -> Match[str]:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise BadValueError(
            f"'{text}' is no {kind}", next_step="a name, and what it takes: truncated(7)"
        )
    return found


def _number(text: str, digits: Optional[str]) -> Optional[int]:
    if digits is None:
        return None
    if not re.fullmatch(r"\s*\d{1,9}\s*", digits, re.ASCII):
        raise BadValueError(f"'{digits}' in '{text}' is no number")
    return int(digits)
