"""What is wrong with a multiplier's table, or with what should have made one."""

from __future__ import annotations

from narrowgauge_contract.errors import BadValueError, ExitCode, NarrowgaugeError

__all__ = ["CompilerMissingError", "TableError", "TableSourceError"]


class TableError(BadValueError):
    """Values that are no 256×256 table of products: their shape, dtype or range."""


class TableSourceError(BadValueError):
    """A file or a function of the user's gives no table: it is not there, does not compile, fails,
    or runs too long."""


class CompilerMissingError(NarrowgaugeError):
    """A multiplier in C is to be compiled, and there is no C compiler."""

    exit_code = ExitCode.TOOLCHAIN_MISSING
