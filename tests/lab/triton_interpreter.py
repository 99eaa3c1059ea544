"""Triton 3.6's interpreter with NumPy 2.4, which no longer makes a number of an array of one.

The interpreter holds a scalar as an array of one value and takes `int()` of it for `range` in a
kernel. Import this before a kernel runs, and only where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _mended(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _mended
