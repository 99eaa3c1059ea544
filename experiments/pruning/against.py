"""Pruning beside quantisation, image by image, where both are there: at equal bytes of weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, List, Optional

import numpy as np

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import DataUnavailableError
from narrowgauge_lab.shared_weights import asked_file
from narrowgauge_scores.answers import correct_of
from narrowgauge_scores.resampling import draw_means, interval_of
from narrowgauge_scores.side_file import RunLogits, read_logits

from .outcomes import Outcome

__all__ = ["Against", "record_against"]


@dataclasses.dataclass(frozen=True, eq=False)
class Against:
    """The answers of a quantised network: exit `number` of `run`; its weights have `share` of the
    bytes of float32."""

    run: RunLogits
    number: int
    share: float

    @classmethod
    def of(cls, parameters: Any, folder: Path, seed: int) -> Optional[Against]:
        """What the parameters of a row of `seed` name; None where they name nothing. Raises
        DataUnavailableError where there is no such file, BadValueError where no exit has that
        name, and what `read_logits` raises."""
        path = asked_file(parameters["against"], folder, seed)
        if path is None:
            return None
        if not path.is_file():
            raise DataUnavailableError(
                f"against={parameters['against']}: no file {path}",
                next_step="give the logits.npz of a row of quantisation (README of pruning)",
            )
        run = read_logits(path)
        names = run.names()
        if parameters["against_exit"] not in names:
            raise BadValueError(
                f"against_exit='{parameters['against_exit']}'",
                why=f"{path.name} has: {', '.join(names)}",
                next_step="-p against_exit=NAME, one of these",
            )
        return cls(run, names.index(parameters["against_exit"]), parameters["against_share"])

    def require_alike(self, splits: Splits) -> None:
        """Raises BadValueError unless it answered the images that this row is tested on."""
        same = self.run.data == splits.data and np.array_equal(
            self.run.test.samples, splits.test_samples
        )
        if not same or not np.array_equal(self.run.test.labels, splits.test.labels.cpu().numpy()):
            raise BadValueError(
                "the quantised network was tested on other images",
                why=f"{self.run.test.images} of {self.run.data}, here {len(splits.test)} of "
                f"{splits.data}",
                next_step="run both on the same data with the same test_limit",
            )


def record_against(
    ctx: RowContext, against: Against, scored: RunLogits, outcomes: List[Outcome]
) -> None:
    """Record how many points of the test images the quantised network is ahead, with the 95 %
    interval of the paired bootstrap, of the pruned network that does best on validation images of
    those whose weights are no more bytes; the fact `against` says of which. An index of the weights
    that are left is not counted, in favour of pruning."""
    whole = outcomes[0].parameters
    small = [each for each in outcomes if each.parameters_nonzero <= against.share * whole]
    about = {
        "family": against.run.family,
        "variant": against.run.variant,
        "exit": against.run.names()[against.number],
        "seed": against.run.seed,
        "pruned": "none is as small",
    }
    if not small:
        ctx.fact("against", about)
        return
    rival = max(small, key=lambda each: each.validation)
    ours = correct_of(scored.test)[scored.names().index(rival.name)]
    theirs = correct_of(against.run.test)[against.number]
    values = [100.0 * each[np.newaxis].astype(np.float64) for each in (theirs, ours)]
    drawn = draw_means(values)
    ahead = float(values[0].mean() - values[1].mean())
    interval = interval_of(ahead, drawn[0] - drawn[1], -100.0, 100.0)
    ctx.fact("against", {**about, "pruned": rival.name})
    ctx.metric("quantised_ahead", interval.value, unit="points", source="computed")
    ctx.metric("quantised_ahead_low", interval.low, unit="points", source="computed")
    ctx.metric("quantised_ahead_high", interval.high, unit="points", source="computed")
