"""Whether float32 products and convolutions are IEEE float32, or may be TF32 inside: torch's flags,
which torch 2.9 replaced by others.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

__all__ = ["allow_tf32", "cpu_float32_is_strict", "tf32_allowed", "tf32_set_to"]


@functools.lru_cache(maxsize=None)
def _per_operator_math() -> bool:
    """torch 2.9 replaced `allow_tf32` by `fp32_precision`; mixing the two is an error there."""
    return hasattr(torch.backends.cudnn, "conv")


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products and convolutions use TF32, or hold them to IEEE float32."""
    if not _per_operator_math():
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        return
    word = "tf32" if allowed else "ieee"
    with warnings.catch_warnings():
        # The inductor of torch 2.9 to 2.12 reads the old flag, which is an error while it and the
        # new one differ; this sets both. https://github.com/pytorch/pytorch/issues/166387
        warnings.simplefilter("ignore", UserWarning)
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        # So does everybody who enters torch.backends.cudnn.flags().
        torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.fp32_precision = word
    torch.backends.cudnn.conv.fp32_precision = word
    torch.backends.cudnn.rnn.fp32_precision = word
    # oneDNN can be told to use bf16 or tf32 inside float32 operators; a float32 row means float32.
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "ieee"


def tf32_allowed() -> Dict[str, bool]:
    """Whether the flags allow TF32 now, for matrix products and for convolutions.

    What is used, `measure.tf32` finds out: environment and libraries have their say too.
    """
    if not _per_operator_math():
        return {
            "matmul": bool(torch.backends.cuda.matmul.allow_tf32),
            "conv": bool(torch.backends.cudnn.allow_tf32),
        }
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "conv": torch.backends.cudnn.conv.fp32_precision == "tf32",
    }


def cpu_float32_is_strict() -> bool:
    """Whether oneDNN computes float32 in float32; since torch 1.12 it may be told to use less."""
    if _matmul_precision() not in (None, "highest"):
        return False
    if not _per_operator_math():
        return True
    onednn = torch.backends.mkldnn
    # "none": nothing was said of the operator, and then the word of all oneDNN counts.
    words = {onednn.matmul.fp32_precision, onednn.conv.fp32_precision, onednn.fp32_precision}
    return words <= {"ieee", "none"}


@contextlib.contextmanager
def tf32_set_to(allowed: bool) -> Iterator[None]:
    """`allow_tf32` for the length of a block; then all that it sets is as it was."""
    word, convolutions = _matmul_precision(), tf32_allowed()["conv"]
    flags = [(owner, name, getattr(owner, name)) for owner, name in _math_flags(word)]
    allow_tf32(allowed)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # as in allow_tf32
            if word is not None:
                torch.set_float32_matmul_precision(word)
            if _per_operator_math():
                torch.backends.cudnn.allow_tf32 = convolutions
        for owner, name, value in flags:
            setattr(owner, name, value)


def _matmul_precision() -> Optional[str]:
    """torch 1.12's word for float32 products. None before it, and where flags contradict the word:
    torch then tells neither."""
    if not hasattr(torch, "get_float32_matmul_precision"):
        return None
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError as error:
        if "legacy and new APIs" not in str(error):
            raise
        return None


def _math_flags(word: Optional[str]) -> List[Tuple[Any, str]]:
    """The attributes that `allow_tf32` sets beside `word`, which sets some of them too."""
    backends = torch.backends
    if _per_operator_math():
        owners = (
            backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,
            backends.mkldnn.matmul, backends.mkldnn.conv,
        )  # fmt: skip
        return [(owner, "fp32_precision") for owner in owners]
    flags: List[Tuple[Any, str]] = [(backends.cudnn, "allow_tf32")]
    # Where there is a word, the flag of products is no more than whether it is "highest".
    return flags if word is not None else [*flags, (backends.cuda.matmul, "allow_tf32")]
