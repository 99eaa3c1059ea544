"""One row of `robustness`: one policy under one attack, beside the exact network under the same."""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.manual.policies import parse_gradient, parse_policy

from .attack import Attack, adversarial, loss_gradient
from .outcomes import change, predicted, record_changes, transfer_success
from .subjects import EXACT, Subjects, approximate, exact_network, feeds

#: Sets of attacked images: made against the exact network by its own gradient; against the
#: approximate one by the row's gradient; against it by that of the exact network.
_BY_EXACT, _BY_OWN, _BY_SURROGATE = "by_exact", "by_own", "by_surrogate"


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    # Before anything is trained for an attack or a policy that there is not.
    attack = _attack(ctx)
    parse_policy(ctx.parameters["policy"])
    if ctx.parameters["gradient"] != EXACT:
        parse_gradient(ctx.parameters["gradient"])
    precision.enter("fp32", ctx.device)
    training_set, test_set, classes = feeds(ctx)
    exact, there = exact_network(ctx, training_set, test_set, classes)
    if not there:
        return
    subjects = Subjects(exact, approximate(ctx, exact, training_set))
    images, labels = test_set.images.float() / 255.0, test_set.labels
    sets = {
        name: _attacked(ctx, attack, subjects, name, images, labels)
        for name in (_BY_EXACT, _BY_OWN, _BY_SURROGATE)
    }
    _record(ctx, subjects, images, labels, sets)


def _attack(ctx: RowContext) -> Attack:
    parameters = ctx.parameters
    kind, epsilon = parameters["attack"], parameters["epsilon"]
    if kind == "fgsm":
        return Attack(kind, epsilon)
    return Attack(kind, epsilon, parameters["steps"], parameters["random_start"])


def _attacked(
    ctx: RowContext,
    attack: Attack,
    subjects: Subjects,
    name: str,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """The set of that name. All sets of a row begin at the same random places."""
    own = name == _BY_OWN and ctx.parameters["gradient"] != EXACT
    gradient = loss_gradient(subjects.approximate if own else subjects.exact)
    judge = subjects.exact if name == _BY_EXACT else subjects.approximate
    generator = torch_compat.generator_for(torch.device("cpu"), ctx.seed)
    batch, made = ctx.parameters["attack_batch"], []
    for some, theirs in zip(images.split(batch), labels.split(batch)):
        made.append(adversarial(attack, some, theirs, gradient, judge, generator))
        done = sum(map(len, made))
        ctx.progress(done, len(images), unit="image", phase=f"{attack.kind}, {name}")
    return torch.cat(made)


def _record(
    ctx: RowContext,
    subjects: Subjects,
    images: torch.Tensor,
    labels: torch.Tensor,
    sets: Dict[str, torch.Tensor],
) -> None:
    batch = ctx.parameters["attack_batch"]

    def answers(each: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        exact = predicted(subjects.exact, each, batch)
        return exact, predicted(subjects.approximate, each, batch)

    def percent(name: str, share: torch.Tensor) -> float:
        value = 100.0 * float(share.double().mean())
        ctx.metric(name, value, unit="%", source="computed")
        return value

    clean = answers(images)
    right = (clean[0] == labels, clean[1] == labels)
    before = percent("clean_accuracy_exact", right[0]), percent("clean_accuracy", right[1])
    percent("agreement", clean[0] == clean[1])
    # Of each set: whether the exact network, and the approximate one, still answers right.
    still = {name: tuple(a == labels for a in answers(each)) for name, each in sets.items()}
    exact = percent("attacked_accuracy_exact", still[_BY_EXACT][0])
    own = percent("attacked_accuracy", still[_BY_OWN][1])
    percent("surrogate_accuracy", still[_BY_SURROGATE][1])
    percent("transferred_accuracy", still[_BY_EXACT][1])
    percent("transferred_accuracy_exact", still[_BY_OWN][0])
    every: List[torch.Tensor] = [found[1] for found in still.values()]
    worst = percent("worst_accuracy", torch.stack(every).all(dim=0))
    for name, value in (
        ("accuracy_loss_exact", before[0] - exact),
        ("accuracy_loss", before[1] - own),
        ("worst_loss", before[1] - worst),
        ("masked", own - worst),
    ):
        ctx.metric(name, value, unit="points", source="computed")
    _record_transfers(ctx, right, still)
    record_changes(ctx, change(images, sets[_BY_EXACT]), change(images, sets[_BY_OWN]))
    ctx.fact("attacked_images", len(images))


def _record_transfers(
    ctx: RowContext,
    right: Tuple[torch.Tensor, torch.Tensor],
    still: Dict[str, Tuple[torch.Tensor, ...]],
) -> None:
    """`transfer_success`, from the exact network to the approximate one, `transfer_robustness`,
    which is 100 % without it, and `transfer_success_back`."""
    there = (~still[_BY_EXACT][0], ~still[_BY_EXACT][1])
    back = (~still[_BY_OWN][1], ~still[_BY_OWN][0])
    for name, sides, fooled in (
        ("transfer_success", right, there),
        ("transfer_success_back", (right[1], right[0]), back),
    ):
        share, count = transfer_success(sides, fooled)
        ctx.fact(f"{name}_images", count)
        if count == 0:
            continue  # no image fooled the network that it was made against: nothing can transfer
        ctx.metric(name, share, unit="%", source="computed")
        if name == "transfer_success":
            ctx.metric("transfer_robustness", 100.0 - share, unit="%", source="computed")
