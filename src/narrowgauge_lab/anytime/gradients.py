"""Several gradients made one: sums, and projections that keep exits out of one another's way.

Orthogonalised SGD (Wan, Hoffmann, Lu and Maire, ICML 2020, arXiv 2008.06635) "projects gradients
from later outputs onto a parameter subspace that does not interfere with those from earlier ones".
Its text beyond the abstract was not to be had, so `Orthogonalised` is a reconstruction: Gram and
Schmidt's process over the exits in order of priority. PCGrad is Yu and others 2020 (arXiv
2001.06782).

Every g'_i is a combination of the g_j, whose coefficients follow from the inner products alone. So
the long vectors are read twice, once for the matrix of products and once for the sum, and all else
happens in float64 on matrices [exits, exits], on the device.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.optim import SGD, FlatOptimizer

__all__ = [
    "Combination", "Orthogonalised", "PCGrad", "PerExit", "Projection", "Sum", "Weighted",
    "cosines", "gram_schmidt", "pcgrad", "products",
]  # fmt: skip

#: Of a squared norm. What is left of a gradient below it is rounding: it has no direction.
_NOTHING = 1e-12


class Combination:
    """How the losses of several exits become one update: here by the sum of all."""

    def weights(self, exits: int) -> Tuple[float, ...]:
        """What each loss is multiplied by. Raises BadValueError where it is not for so many."""
        return (1.0,) * exits

    def optimizer(self, inner: FlatOptimizer, exits: int) -> FlatOptimizer:
        """What updates by so many losses: `inner` itself, where their sum is all it has to know."""
        del exits
        return inner


@dataclasses.dataclass(frozen=True)
class Sum(Combination):
    """All losses alike: the gradient of their sum."""


@dataclasses.dataclass(frozen=True)
class Weighted(Combination):
    """The gradient of a weighted sum. BadValueError unless each weight is finite and not below 0,
    and one is above."""

    of: Tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in self.of) or not any(self.of):
            raise BadValueError(
                f"loss weights {', '.join(map(str, self.of)) or 'of no exit'}",
                why="each has to be finite and 0 or more, and one above 0",
                next_step="give one for each exit, such as 1,1,0.3",
            )

    def weights(self, exits: int) -> Tuple[float, ...]:
        if len(self.of) != exits:
            raise BadValueError(
                f"{len(self.of)} loss weights for {exits} exits",
                next_step=f"give {exits}, first exit first",
            )
        return self.of


class Projection(Combination, abc.ABC):
    """A combination that has to know the gradient of each exit by itself."""

    #: Inner products and projections over each parameter by itself, or over all as one vector.
    per_tensor: bool
    #: What each exit's own momentum is multiplied by in each update; None: gradients are combined.
    momentum: Optional[float]

    @abc.abstractmethod
    def coefficients(self, gram: torch.Tensor) -> torch.Tensor:
        """float64 [..., exits, exits] from the matrices of inner products [..., exits, exits]: row
        i has g'_i as a combination of all g_j."""

    def optimizer(self, inner: FlatOptimizer, exits: int) -> FlatOptimizer:
        return PerExit(inner, exits, self)


@dataclasses.dataclass(frozen=True)
class Orthogonalised(Projection):
    """g'_i = g_i − Σ_j ⟨g_i, g'_j⟩ / ‖g'_j‖² · g'_j over the exits j before i. A reconstruction.

    `negative_only`: take a component away only where it points against g'_j. `rescale`: give each
    g'_i the norm of g_i back. `last_first`: the last exit has priority, not the first.
    """

    per_tensor: bool = False
    momentum: Optional[float] = None
    negative_only: bool = False
    rescale: bool = False
    last_first: bool = False

    def __post_init__(self) -> None:
        _require_momentum(self.momentum)

    def coefficients(self, gram: torch.Tensor) -> torch.Tensor:
        found = gram_schmidt(gram, self.negative_only, self.last_first)
        return _rescaled(found, gram) if self.rescale else found


@dataclasses.dataclass(frozen=True)
class PCGrad(Projection):
    """Each gradient loses what points against another's original one, one other after another.

    In the paper the order of the others is drawn anew in each update; here they come in the order
    of the exits, so that a row which is captured, resumed or spread over processes is the same.
    """

    per_tensor: bool = False
    momentum: Optional[float] = None

    def __post_init__(self) -> None:
        _require_momentum(self.momentum)

    def coefficients(self, gram: torch.Tensor) -> torch.Tensor:
        return pcgrad(gram)


def products(rows: torch.Tensor, extents: Optional[Sequence[int]] = None) -> torch.Tensor:
    """Inner products of the rows of a matrix [n, P]: float64 [n, n]; with `extents`, the sizes of
    consecutive parts, of each part by itself: [parts, n, n].

    In float64, for what is left of nearly parallel vectors, and because TF32 has no say there.
    """
    wide = rows.double()
    if extents is None:
        return wide @ wide.t()
    return torch.stack([part @ part.t() for part in wide.split(list(extents), 1)])


def gram_schmidt(
    gram: torch.Tensor, negative_only: bool = False, last_first: bool = False
) -> torch.Tensor:
    """Coefficients [..., n, n] of the orthogonalised vectors in terms of the given ones, from the
    latter's inner products [..., n, n].

    A vector that those before it span, up to rounding, becomes 0; one that is 0 changes nothing. A
    NaN stays one wherever it reaches.
    """
    count = gram.shape[-1]
    order = list(range(count))[:: -1 if last_first else 1]
    unit = torch.eye(count, dtype=gram.dtype, device=gram.device).expand_as(gram)
    found: Dict[int, torch.Tensor] = {}
    duals: Dict[int, torch.Tensor] = {}
    squares: Dict[int, torch.Tensor] = {}
    for i in order:
        mine = unit[..., i, :]
        for j in found:
            along = _dot(mine, duals[j])
            part = torch.where(squares[j] > 0, along / squares[j], torch.zeros_like(along))
            part = part.clamp(max=0) if negative_only else part
            mine = mine - part.unsqueeze(-1) * found[j]
        mine, duals[i], squares[i] = _settled(mine, gram, gram[..., i, i])
        found[i] = mine
    return torch.stack([found[i] for i in range(count)], dim=-2)


def _settled(
    mine: torch.Tensor, gram: torch.Tensor, whole: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A combination, its products with all vectors, and its squared norm; all 0 where of the
    squared norm `whole` nothing but rounding is left."""
    dual = (mine.unsqueeze(-2) @ gram).squeeze(-2)
    square = _dot(mine, dual)
    gone = square <= _NOTHING * whole  # not of NaN
    kept = gone.logical_not().to(gram.dtype).unsqueeze(-1)
    zero = torch.zeros_like(mine)
    cleared = torch.where(kept > 0, mine, zero), torch.where(kept > 0, dual, zero)
    return (*cleared, torch.where(gone, torch.zeros_like(square), square))


def pcgrad(gram: torch.Tensor) -> torch.Tensor:
    """Coefficients as of `gram_schmidt`, by PCGrad with the others in rising order."""
    count = gram.shape[-1]
    rows: List[torch.Tensor] = []
    for i in range(count):
        mine = torch.eye(count, dtype=gram.dtype, device=gram.device)[i].expand(gram.shape[:-1])
        for j in (other for other in range(count) if other != i):
            along, square = _dot(mine, gram[..., :, j]), gram[..., j, j]
            part = torch.where(square > 0, along / square, torch.zeros_like(along)).clamp(max=0)
            unit = torch.eye(count, dtype=gram.dtype, device=gram.device)[j]
            mine = mine - part.unsqueeze(-1) * unit
        rows.append(mine)
    return torch.stack(rows, dim=-2)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum(-1)


def _rescaled(coefficients: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Each combination with the norm of the vector that it came of; what is 0 stays 0."""
    square = ((coefficients @ gram) * coefficients).sum(-1)
    whole = torch.diagonal(gram, dim1=-2, dim2=-1)
    factor = torch.where(square > 0, (whole / square).sqrt(), torch.ones_like(square))
    return coefficients * factor.unsqueeze(-1)


def _require_momentum(momentum: Optional[float]) -> None:
    if momentum is not None and not 0 <= momentum < 1:
        raise BadValueError(
            f"momentum {momentum} of the exits' gradients", why="it has to be from 0 to below 1"
        )


class PerExit(FlatOptimizer):
    """An optimiser whose gradient has a row for each exit, [exits + 1, parameters], combined when
    it updates: after the processes have exchanged it and its scale has been taken out. The last row
    is of what is not to be projected.

    It works on the tensors of `inner`, which does the update. Where exits keep momentum of their
    own, `inner` has to be SGD: its momentum then holds the last row and the weight decay only, so
    that with coefficients that change nothing the two together are SGD of the sum.
    """

    def __init__(self, inner: FlatOptimizer, exits: int, projection: Projection) -> None:
        """Raises BadValueError where exits keep momentum and `inner` is not SGD."""
        if projection.momentum is not None and (not isinstance(inner, SGD) or inner.nesterov):
            raise BadValueError(
                "the exits' gradients keep momentum, which goes with plain SGD only",
                why=f"the optimiser is {type(inner).__name__}",
                next_step="combine raw gradients, or take SGD without Nesterov's momentum",
            )
        self.inner = inner
        self.projection = projection
        self.parameters, self._gaps = inner.parameters, inner._gaps
        self.values, self.rate = inner.values, inner.rate
        self.gradient = inner.values.new_zeros((exits + 1, inner.values.numel()))
        self.state = dict(inner.state)
        if projection.momentum is not None:
            self.state["exit_momentum"] = torch.zeros_like(self.gradient[:-1])
        self._extents = inner.extents() if projection.per_tensor else None
        self._owner = None if self._extents is None else _owners(self._extents, inner.values)

    def differentiate_each(
        self, losses: Sequence[Optional[torch.Tensor]], extra: Optional[torch.Tensor] = None
    ) -> None:
        """Put the gradients of all losses of one forward pass into the rows; of None, zeros."""
        every = [*losses, extra]
        left = sum(loss is not None for loss in every)
        for row, loss in zip(self.gradient, every):
            if loss is None:
                row.zero_()
                continue
            left -= 1
            self.differentiate_partly(loss, out=row, again=left > 0)

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        """Σ_i g'_i [P] of the rows [exits, P]."""
        chosen = self.projection.coefficients(products(rows, self._extents)).sum(-2)
        factors = chosen.to(rows.dtype)
        if self._owner is None:
            return (factors.unsqueeze(1) * rows).sum(0)
        return (factors.t().index_select(1, self._owner) * rows).sum(0)

    def _update(self) -> None:
        rows, rest = self.gradient[:-1], self.gradient[-1]
        momentum = self.projection.momentum
        if momentum is None:
            self.inner.gradient.copy_(self.combined(rows) + rest)
            self.inner._update()
            return
        velocity = self.state["exit_momentum"]
        velocity.mul_(momentum).add_(rows)
        step = self.combined(velocity)
        self.inner.gradient.copy_(rest)
        self.inner._update()
        self.values.sub_(step * self.rate)


def _owners(extents: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Which part each element belongs to: int64 [P]."""
    sizes = torch.tensor(list(extents), device=like.device)
    return torch.repeat_interleave(torch.arange(len(extents), device=like.device), sizes)


def cosines(
    losses: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> torch.Tensor:
    """float64 [n, n]: the cosines between the gradients of scalar losses, over all parameters as
    one vector. NaN with a gradient that is 0."""
    rows = []
    for number, loss in enumerate(losses):
        again = number + 1 < len(losses)
        found = torch.autograd.grad(loss, parameters, retain_graph=again, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    gram = products(torch.stack(rows))
    norms = torch.diagonal(gram).sqrt()
    return gram / (norms.unsqueeze(0) * norms.unsqueeze(1))
