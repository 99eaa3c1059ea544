"""A ladder of answers that no single network gives: cut, quantised or pruned variants of one net,
resolutions, ensembles of 1, 2, … members. Its rungs are scored as the exits of a network are.

What is known beforehand and what is interruptible differ here as they do for exits. Whoever knows
the budget runs one rung alone. Whoever may be stopped at any time runs the rungs from the cheapest
on, and each of them starts anew, so that costs add up; unless the ladder is `cumulative`: a rung
goes on with what the one before has done, as a further member of an ensemble does.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision
from narrowgauge_lab.anytime import logits_file, scores
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.precision import Mode
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, Split, write_logits

__all__ = ["Forward", "Rung", "score_ladder"]

#: Images [B, C, H, W] as logits [B, classes], or as a pair of them and MACs [B].
Forward = Callable[[torch.Tensor], Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One variant: its name in pictures and tables, its multiply-accumulates of one image, and what
    computes its logits.

    `macs`: of the rung alone; in a `cumulative` ladder that is with the rungs before it. None where
    they depend on the image: `forward` then gives a pair, the second MACs [B]. A `forward` that is
    a module is put into eval mode; whatever else it calls has to be in it.
    """

    name: str
    macs: Optional[int]
    forward: Forward


def score_ladder(
    ctx: RowContext,
    rungs: Sequence[Rung],
    splits: Splits,
    about: About,
    *,
    cumulative: bool,
    mode: Optional[Mode] = None,
    batch_size: int = 1000,
    passes: int = 30,
) -> RunLogits:
    """Ask every rung of every test and validation image, write the row's `logits.npz` with the
    rungs as exits, cheapest first, record the scores that a trained anytime network has, and return
    what is in the file. The names of exits are those of the rungs, whatever `about` says.

    Of a ladder that is not `cumulative`, the cost without the heads before is that of the rung
    alone, and the cost with them is the sum up to it. Seconds are of each rung alone, one image
    `passes` times (0: not measured, as for arithmetic that is only simulated); the fact `ladder`
    says so. `mode`: the precision that all rungs run in; fp32 by default. It happens once in a row,
    and not in one that has written a network's exits.

    Raises BadValueError for no rungs, two of one name, MACs that are not 1 or more or that fall in
    a cumulative ladder, and logits of another shape or not finite: the rung is named.
    """
    _require_ladder(rungs)
    mode = precision.enter("fp32", ctx.device) if mode is None else mode
    splits.record(ctx)
    asked = [_Asked.of(rung, splits, mode, batch_size) for rung in rungs]
    if cumulative:
        _require_rising(asked)
    asked.sort(key=lambda each: each.mean)  # stable: of equal costs the caller's order
    _require_alike(asked, splits)
    # Of both splits or of none: a split without costs of its own has the mean of the test images.
    parts = [part for each in asked for part in (each.test, each.validation)]
    depends = any(bool((_macs(part) != _macs(part)[:, :1]).any()) for part in parts)
    test = _split([each.test for each in asked], splits.test_samples, cumulative, depends)
    direct = np.array([each.mean for each in asked], dtype=np.int64)
    total = direct if cumulative else direct.cumsum()
    images = logits_file.timed_images(splits.test, mode, passes)
    seconds = _seconds(asked, images, mode, passes) if passes else None
    costs = ExitCosts(tuple(total.tolist()), tuple(direct.tolist()), (), ())
    base = about.base_accuracy() if about.base_accuracy is not None else None
    run = RunLogits(
        family=about.family,
        variant=about.variant,
        data=splits.data,
        seed=ctx.seed,
        test=test,
        cumulative_macs=total,
        direct_macs=direct,
        exit_names=tuple(each.rung.name for each in asked),
        val=_split(
            [each.validation for each in asked], splits.validation_samples, cumulative, depends
        ),
        latency=seconds,
        device=logits_file.device_name(mode.device),
        synthetic=splits.data == "synthetic",
        base_accuracy=base,
        base_macs=None if base is None or about.base_macs is None else about.base_macs(costs),
    )
    write_logits(ctx.side_file(LOGITS_FILE), run)
    if seconds is not None:
        ctx.fact("latency_images", len(images))
    ctx.fact("ladder", {"rungs": len(asked), "cumulative": cumulative, "seconds": "each alone"})
    scores.record(ctx, run)
    return run


class _Alone(AnytimeNetwork):
    """A rung as a network of one exit, so that it is asked and timed as any other is."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.exits = 1
        self.rung = rung
        self.forwarded = rung.forward  # a module thereby becomes a part, and follows eval()

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        del exit, head
        given = self.forwarded(state[0])
        logits, macs = given if isinstance(given, tuple) else (given, None)
        batch, name = len(state[0]), self.rung.name
        if (macs is None) == (self.rung.macs is None):
            times = "nowhere" if macs is None else "twice"
            raise BadValueError(
                f"the rung '{name}' says what it costs {times}",
                next_step="give macs, or None and a forward that gives logits and MACs [B]",
            )
        if logits.dim() != 2 or len(logits) != batch:
            raise BadValueError(
                f"the rung '{name}' gives {list(logits.shape)} of {batch} images",
                why="logits are [images, classes]",
            )
        if macs is not None and macs.shape != (batch,):
            raise BadValueError(
                f"the rung '{name}' gives MACs {list(macs.shape)} of {batch} images",
            )
        return Answer(logits, (), macs)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A rung with its answers, each Split of one exit, and its MACs per test image, rounded."""

    rung: Rung
    test: Split
    validation: Split
    mean: int

    @classmethod
    def of(cls, rung: Rung, splits: Splits, mode: Mode, batch_size: int) -> _Asked:
        """Raises BadValueError where its logits or MACs are none."""
        found: List[Split] = []
        stage = (0 if rung.macs is None else rung.macs,)
        costs = ExitCosts(stage, stage, stage, (0,))
        for feed, samples in (
            (splits.test, splits.test_samples),
            (splits.validation, splits.validation_samples),
        ):
            split = logits_file.answers(_Alone(rung), feed, samples, costs, mode, batch_size)
            if not np.isfinite(split.logits).all():
                raise BadValueError(
                    f"the rung '{rung.name}' answers with NaN or infinity",
                    why="what it runs has diverged, or overflows in this arithmetic",
                    next_step="leave it out of the ladder and say so, or train it otherwise",
                )
            macs = np.full((1, split.images), float(stage[0])) if split.macs is None else split.macs
            if not np.isfinite(macs).all() or macs.min() < 1:
                raise BadValueError(
                    f"the rung '{rung.name}' costs {macs.min():g} multiply-accumulates",
                    why="a rung that computes something costs 1 or more, known and finite",
                )
            found.append(dataclasses.replace(split, macs=macs))
        return cls(rung, found[0], found[1], round(float(_macs(found[0]).mean())))


def _macs(split: Split) -> np.ndarray:
    assert split.macs is not None
    return np.asarray(split.macs)


def _split(parts: Sequence[Split], samples: np.ndarray, cumulative: bool, depends: bool) -> Split:
    """The rungs' answers as those of exits. Costs per image are kept where they `depend` on it."""
    macs = np.concatenate([_macs(part) for part in parts])
    return Split(
        logits=np.concatenate([part.logits for part in parts]),
        labels=parts[0].labels,
        samples=np.asarray(samples, dtype=np.int64),
        macs=(macs if cumulative else macs.cumsum(axis=0)) if depends else None,
    )


def _require_ladder(rungs: Sequence[Rung]) -> None:
    if not rungs:
        raise BadValueError("a ladder without rungs", next_step="give one variant or more")
    names = collections.Counter(rung.name for rung in rungs)
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        raise BadValueError(
            f"two rungs are called '{twice[0]}'", why="tables and pictures name rungs by it"
        )


def _require_rising(asked: Sequence[_Asked]) -> None:
    """Sorted, such rungs would be answers to costs that are not theirs."""
    for before, each in zip(asked, asked[1:]):
        for one, other in ((before.test, each.test), (before.validation, each.validation)):
            if (_macs(other) < _macs(one)).any():
                raise BadValueError(
                    f"the rung '{each.rung.name}' costs less than '{before.rung.name}' before it",
                    why="in a cumulative ladder each rung goes on with what the one before has "
                    "done, and its cost is with that",
                    next_step="give the rungs in the order in which they run, with summed costs",
                )


def _require_alike(asked: Sequence[_Asked], splits: Splits) -> None:
    for each in asked:
        if each.test.classes != len(splits.classes):
            raise BadValueError(
                f"the rung '{each.rung.name}' tells {each.test.classes} classes apart",
                why=f"{splits.data} has {len(splits.classes)}",
            )


def _seconds(asked: Sequence[_Asked], images: torch.Tensor, mode: Mode, passes: int) -> np.ndarray:
    """float64 [rungs, passes]."""
    taken = [logits_file.latencies(_Alone(each.rung), images, mode, passes) for each in asked]
    return np.concatenate(taken)
