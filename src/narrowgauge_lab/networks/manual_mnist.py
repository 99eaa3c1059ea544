"""The network of the original's manual layers, and its files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = ["ManualNet", "load_pth"]


class ManualNet(nn.Module):
    """conv(1→4, 5×5) ReLU pool2, conv(4→10, 5×5) ReLU pool2, linear 160→100 ReLU, linear 100→10.

    18,224 parameters under the original's names. Takes float32 [B, 1, 28, 28] (of pixels in [0, 1],
    less 0.5, over 0.5), gives logits [B, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 4, 5)
        self.conv_2 = nn.Conv2d(4, 10, 5)
        self.fc_1 = nn.Linear(10 * 4 * 4, 100)
        self.fc_2 = nn.Linear(100, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # ReLU after pooling gives what ReLU before it gives, on a quarter of the elements.
        hidden = F.relu(F.max_pool2d(self.conv_1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv_2(hidden), 2))
        hidden = F.relu(self.fc_1(hidden.flatten(1)))
        return self.fc_2(hidden)


def load_pth(model: nn.Module, path: Path) -> None:
    """Put the weights of a .pth file of the original's into `model`: a state dict by torch.save,
    float32 under the names that `ManualNet` has. Layers that compute otherwise under these names
    take them too.

    Raises DataUnavailableError where there is no such file, DataCorruptError where it holds
    something else; then the model is as it was.
    """
    try:
        with path.open("rb") as stream:
            found: Any = torch_compat.load_state(stream)
    except OSError as error:
        raise DataUnavailableError(
            f"no weights in {path}",
            why=error.strerror or str(error),
            next_step="give the path of a .pth file, such as pytorch_mnist.pth",
        ) from error
    except Exception as error:  # torch's unpickling raises of everything
        raise _corrupt(path, f"torch does not read it: {error!r}") from error
    model.load_state_dict(_checked(path, found, model.state_dict()))


def _checked(path: Path, found: Any, wanted: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    if not isinstance(found, dict):
        raise _corrupt(path, f"it holds a {type(found).__name__}, not a state dict")
    if set(found) != set(wanted):
        differing = ", ".join(sorted(map(str, set(found) ^ set(wanted))))
        raise _corrupt(path, f"its names are not the network's: {differing}")
    for name, tensor in wanted.items():
        other = found[name]
        if not isinstance(other, torch.Tensor):
            raise _corrupt(path, f"{name} is a {type(other).__name__}")
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise _corrupt(
                path,
                f"{name} is {other.dtype} {list(other.shape)}, not {tensor.dtype} "
                f"{list(tensor.shape)}",
            )
    return found


def _corrupt(path: Path, why: str) -> DataCorruptError:
    return DataCorruptError(
        f"{path} does not hold this network's weights",
        why=why.splitlines()[0],
        next_step="give a .pth file of the original's mnist_train.py",
    )
