"""Trained weights that the rows of a run start from: of a file, of an earlier row, or trained now.

Rows that compare ways to run one network have to start from the same weights, and each row is a
process of its own. The first row of a seed that needs them trains them and leaves them in the run's
folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn

from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab import checkpoint, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_lab.networks.state_files import first_reason

__all__ = ["asked_file", "load_weights", "trained_weights"]

#: What metrics and facts of the training begin with.
_STAGE = "exact"
#: In the name of a file: the row's seed, so that repeats start from networks of their own.
_SEED = "SEED"


def asked_file(name: str, folder: Path, seed: Optional[int] = None) -> Optional[Path]:
    """The file that a parameter names; None where it names none.

    It is looked for in `folder`, the experiment's, first: a container sees no others. `seed`: of
    the row, which then takes the place of the word SEED in the name.
    """
    if not name:
        return None
    path = Path(name)
    if seed is not None:
        path = path.parent / path.name.replace(_SEED, str(seed))
    inside = folder / path
    return inside if inside.is_file() else path.expanduser()


def trained_weights(
    ctx: RowContext,
    model: nn.Module,
    asked: Optional[Path],
    train: Callable[[RowContext, nn.Module], Optional[bool]],
    label: str = "",
) -> bool:
    """Give `model`, which is on `ctx.device`, its weights, and put it into eval mode. False where
    training diverged: the row is INVALID, and nothing is left for others.

    `asked`: the file of a state dict, or None. `train(stage, model)` trains it, by parameters that
    all rows of a run have alike, and may say False where that diverged; what it records begins with
    `exact_`. `label`: what tells networks apart where rows of one run have several. Facts
    `weights_from` and `weights_sha256` say which weights these are. Raises what `load_weights` and
    `train` raise.
    """
    path = asked or ctx.out / f"weights-{label}{ctx.seed}.pt"
    source = f"the file {path.name}" if asked else "an earlier row of this run"
    if asked is None and not path.is_file():
        source = "trained in this row"
        stage = ctx.for_stage(_STAGE)
        diverged = train(stage, model) is False
        weights = model.state_dict().values()
        if diverged or not all(bool(torch.isfinite(each).all()) for each in weights):
            ctx.invalid("the exact network's training diverged, and nothing was done with it")
            return False
        checkpoint.write_weights(path, model)
        stage.checkpoints.clear()
        ctx.add_side_file(path)
    load_weights(model, path)
    ctx.fact("weights_from", source)
    ctx.fact("weights_sha256", sha256_file(path))
    model.eval()
    return True


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the state dict of a file (torch.save, such as `weights.pt` of a row with
    `-p save_weights=true`) into `model`.

    Raises DataUnavailableError where there is no such file, DataCorruptError where it holds
    something else.
    """
    try:
        with path.open("rb") as stream:
            found: Any = torch_compat.load_state(stream)
        model.load_state_dict(found)
    except OSError as error:
        raise DataUnavailableError(
            f"no weights in {path}",
            why=error.strerror or str(error),
            next_step="give the path of a state dict, such as weights.pt of an earlier run",
        ) from error
    except Exception as error:  # torch's unpickling raises of everything
        raise DataCorruptError(
            f"{path} does not hold weights of this {type(model).__name__}",
            why=first_reason(error),
            next_step="give the state dict of the same network, as torch.save writes it",
        ) from error
