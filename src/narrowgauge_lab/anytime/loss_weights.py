"""The parameter `loss_weights` of experiments."""

from __future__ import annotations

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.gradients import Combination, Sum, Weighted

__all__ = ["parse_loss_weights"]


def parse_loss_weights(text: str, exits: int) -> Combination:
    """Of `1,0.3`, a weight for each exit's loss, or one number for all of them. Raises
    BadValueError for another count, for what is no number, and for what `Weighted` refuses."""
    try:
        weights = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise BadValueError(
            f"loss_weights '{text}' are no numbers",
            next_step=f"one for each of the {exits} exits, such as 1,0.3 for two, or one for all",
        ) from error
    whole = weights * exits if len(weights) == 1 else weights
    combination = Weighted(whole)
    combination.weights(exits)
    return Sum() if all(weight == 1 for weight in whole) else combination
