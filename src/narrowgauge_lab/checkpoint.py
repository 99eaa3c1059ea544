"""Checkpoints of a row: written whole or not at all, checked when read, the last two kept.

A file is one line of text (`narrowgauge-checkpoint 1 <sha256> <bytes>`) and then what torch.save
wrote. The check is in the file itself, so there is no second file to go missing.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.codec import write_atomic
from narrowgauge_contract.errors import DamagedRecordError, UsageError
from narrowgauge_lab import torch_compat

__all__ = [
    "CheckpointMismatchError",
    "Checkpoints",
    "DamagedCheckpointError",
    "random_state",
    "set_random_state",
    "write_weights",
]

_MAGIC = "narrowgauge-checkpoint 1"
_NAME = re.compile(r"^checkpoint-(\d{6})\.pt$")
_KEPT = 2


class DamagedCheckpointError(DamagedRecordError):
    """A checkpoint is truncated, altered, or not one of ours."""


class CheckpointMismatchError(UsageError):
    """A checkpoint belongs to another configuration."""


class Checkpoints:
    """The checkpoints of one row, in a folder of their own.

    `resume` says whether `load` may give one: a run that was not asked to resume starts anew.
    """

    def __init__(self, folder: Path, resume: bool = False) -> None:
        self.folder = folder
        self.resume = resume

    def save(self, state: Dict[str, Any]) -> Path:
        """Write `state` (tensors, numbers, text, and lists, tuples and dicts of them) atomically.

        The one before stays; older ones go. OSError where the disk is full: the old ones stand.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self._numbered()
        number = kept[-1][0] + 1 if kept else 1
        path = self.folder / f"checkpoint-{number:06d}.pt"
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self._sweep()
        write_atomic(path, _seal(buffer.getvalue()))
        for _, old in kept[: len(kept) + 1 - _KEPT]:
            old.unlink()
        return path

    def load(self) -> Optional[Dict[str, Any]]:
        """The newest state, on the CPU; None where there is none or nobody asked to resume.

        Raises DamagedCheckpointError: going back to the one before is the user's decision.
        """
        kept = self._numbered() if self.resume else []
        if not kept:
            return None
        path = kept[-1][1]
        earlier = kept[-2][1] if len(kept) > 1 else None
        payload = _unseal(path, path.read_bytes(), earlier)
        state: Dict[str, Any] = torch_compat.load_state(io.BytesIO(payload))
        return state

    def take(self) -> bytes:
        """The newest checkpoint's file, for a machine that does not have it; empty: none to go on
        from."""
        kept = self._numbered() if self.resume else []
        return kept[-1][1].read_bytes() if kept else b""

    def put(self, content: bytes) -> None:
        """Have just what `take` gave on another machine, and go on from it, if there is any."""
        self._clear_own()
        self.resume = bool(content)
        if content:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / "checkpoint-000001.pt", content)

    def clear(self) -> None:
        """Remove every checkpoint, those of the row's stages (in folders below) too: the row is
        complete and will not be resumed."""
        self._clear_own()
        if self.folder.is_dir():
            for below in self.folder.iterdir():
                if below.is_dir() and not below.is_symlink():
                    Checkpoints(below).clear()

    def _clear_own(self) -> None:
        for _, path in self._numbered():
            path.unlink()
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a killed write left: nothing reads it, and it is as large as a checkpoint."""
        for unfinished in self.folder.glob(".checkpoint-*.tmp"):
            unfinished.unlink()

    def _numbered(self) -> List[Tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.match(path.name), path) for path in self.folder.iterdir())
        return sorted((int(match.group(1)), path) for match, path in matches if match)


def write_weights(path: Path, model: nn.Module) -> None:
    """Write the model's state dict, on the CPU, each tensor with memory of its own, or nothing."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomic(path, buffer.getvalue())


def _seal(payload: bytes) -> bytes:
    digest = hashlib.sha256(payload).hexdigest()
    return f"{_MAGIC} {digest} {len(payload)}\n".encode() + payload


def _unseal(path: Path, content: bytes, earlier: Optional[Path]) -> bytes:
    head, _, payload = content.partition(b"\n")
    words = head.decode("ascii", "replace").split(" ")
    why = ""
    if " ".join(words[:2]) != _MAGIC or len(words) != 4:
        why = "it does not begin as a checkpoint does"
    elif words[3] != str(len(payload)):
        why = f"it holds {len(payload)} bytes of {words[3]}"
    elif hashlib.sha256(payload).hexdigest() != words[2]:
        why = "its content does not match its sha256"
    if why:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged",
            why=why,
            next_step=(
                f"delete it to go on from the one before, {earlier.name}"
                if earlier
                else "delete it to train this row from the start; there is no earlier one"
            ),
        )
    return payload


def random_state(generators: Dict[str, torch.Generator]) -> Dict[str, Any]:
    """Every random state of this process: Python, numpy, torch, CUDA, and the given generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }


def set_random_state(state: Dict[str, Any], generators: Dict[str, torch.Generator]) -> None:
    """Put back what `random_state` gave. KeyError where a generator has no saved state."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])
