"""State dicts in files, as torch.save writes them: torchvision's `.pth`, others', our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = ["checked_state", "first_reason", "load_state_file", "read_state"]

#: What a batch normalisation counts and never uses in eval mode; files from before torch 0.4.1 have
#: none of it.
_COUNTER = "num_batches_tracked"


def load_state_file(model: nn.Module, path: Path) -> None:
    """Put a file's state dict into `model`: the same names, shapes and dtypes, all of them.

    Nothing that the file says is run. Raises DataUnavailableError where there is no such file,
    DataCorruptError where it holds something else; then the model is as it was.
    """
    model.load_state_dict(checked_state(path, read_state(path), model.state_dict()))


def read_state(path: Path) -> Any:
    """What torch reads from the file, onto the CPU. Raises as `load_state_file` does."""
    try:
        with path.open("rb") as stream:
            return torch_compat.load_state(stream)
    except OSError as error:
        raise DataUnavailableError(
            f"no weights in {path}",
            why=error.strerror or str(error),
            next_step="give the path of a file that torch.save wrote, such as resnet50.pth",
        ) from error
    except Exception as error:  # torch's unpickling raises of everything
        raise _corrupt(path, f"torch does not read it: {error!r}") from error


def checked_state(
    path: Path, found: Any, wanted: Dict[str, torch.Tensor]
) -> Dict[str, torch.Tensor]:
    """`found` where it fits a network whose state dict is `wanted`. DenseNets of torchvision's
    older files have `norm.1` for `norm1` and the like; counters of batches may be missing.

    Raises DataCorruptError, which says what differs; `path` is what it names.
    """
    if not isinstance(found, dict):
        raise _corrupt(path, f"it holds a {type(found).__name__}, not a state dict")
    state: Dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        renamed = _renamed(str(name), wanted)
        if renamed in state:
            raise _corrupt(path, f"two of its names are {renamed} here")
        state[renamed] = tensor
    for name, tensor in wanted.items():
        if name.endswith(_COUNTER):
            state.setdefault(name, tensor)
    if set(state) != set(wanted):
        differing = ", ".join(sorted(set(state) ^ set(wanted)))
        raise _corrupt(path, f"its names are not the network's: {_shortened(differing)}")
    for name, tensor in wanted.items():
        other = state[name]
        if not isinstance(other, torch.Tensor):
            raise _corrupt(path, f"{name} is a {type(other).__name__}")
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise _corrupt(
                path,
                f"{name} is {other.dtype} {list(other.shape)}, not {tensor.dtype} "
                f"{list(tensor.shape)}",
            )
    return state


def _renamed(name: str, wanted: Dict[str, torch.Tensor]) -> str:
    """As the network has it: `denselayer1.norm.1.weight` is `denselayer1.norm1.weight` there."""
    if name in wanted:
        return name
    for kind in ("norm", "conv", "relu"):
        for number in ("1", "2"):
            candidate = name.replace(f".{kind}.{number}.", f".{kind}{number}.")
            if candidate in wanted:
                return candidate
    return name


def first_reason(error: Exception) -> str:
    """One line of what torch says of a state dict: its heading, and what comes below that where it
    ends in a colon, such as the tensors that are missing."""
    lines = (str(error).strip() or repr(error)).splitlines()
    return _shortened(" ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")]))


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def _corrupt(path: Path, why: str) -> DataCorruptError:
    return DataCorruptError(
        f"{path} does not hold this network's weights",
        why=why.splitlines()[0],
        next_step="give a state dict of this network, as torch.save writes it",
    )
