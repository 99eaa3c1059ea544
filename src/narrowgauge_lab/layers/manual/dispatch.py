"""Which compiled kernel forms the products of a policy on a device, and why.

| path         | products                                                                    |
|--------------|-----------------------------------------------------------------------------|
| `functor`    | float32, by the policy's own function inlined into the kernel               |
| `exact`      | of codes, exact                                                             |
| `structured` | a table proved to be a sum of masked exact products: masks in the kernel    |
| `factored`   | a table proved to be a sum of exact products of codes looked up first: one  |
|              | exact layer for each                                                        |
| `table`      | by the table itself                                                         |

All paths that an 8-bit policy has give the same integers; only what they cost differs. What is
proved is proved over all 65,536 pairs of codes, and goes into the record.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_kernels.codes import CodeMac
from narrowgauge_kernels.codes import Term as KernelTerm
from narrowgauge_kernels.library import require
from narrowgauge_kernels.mac import Mac
from narrowgauge_lab.layers.manual import kernels
from narrowgauge_lab.layers.manual.codes import CodeLayer
from narrowgauge_lab.layers.manual.factors import Factor, factor_on
from narrowgauge_lab.layers.manual.floats import FloatLayer
from narrowgauge_lab.layers.manual.multiplier import Multiplier, multiplier_of
from narrowgauge_lab.layers.manual.policies import Policy
from narrowgauge_lab.layers.manual.quantise import Scales
from narrowgauge_lab.layers.manual.settings import AUTO, Settings
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.multipliers.structure import BILINEAR, LOW_RANK
from narrowgauge_lab.multipliers.terms import Term

__all__ = ["Choice", "choose", "lacking_room", "layer_for", "prepare"]

#: Sums of products of codes are held in 32 bits.
_SUMS_END = 2**31
#: The greatest product of two bytes.
_GREATEST = 255 * 255
#: The first GPUs that multiply four bytes at once (dp4a), which every exact path of codes takes.
_EXACT_CAPABILITY = (6, 1)
#: Multipliers times devices whose tensors are kept.
_KEPT = 64
#: Instructions that multiply and add up four bytes at once.
# unverified: eight products beat a table on AVX-512 VNNI and AMX | AVX2 at hand | approx-mac there
_DOTS = ("avx512vnni", "amx")
#: Where there are none, more exact products than these take longer than the table, by AVX2: 64
#: channels to 64, 3 x 3, of 28 x 28 pixels run at 18 G MAC/s exact, 7 with two terms, 5.5 with
#: seven; by table at 11 where products fit 16 bits, and else 4.
_TERMS_WITHOUT_DOTS = 2
_MACS = {"axfpm": "axfpm_faithful"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The path that is taken and why; the ones that would have come before it, with why not.

    `terms`: exact products that one product takes, 0 by functor and by table. `proof`: what the
    analysis of the table says, for a record; empty for float policies.
    """

    path: str
    why: str
    passed_over: Tuple[Tuple[str, str], ...] = ()
    terms: int = 0
    proof: Optional[Dict[str, Any]] = None

    def to_fact(self) -> Dict[str, Any]:
        return {
            "path": self.path,
            "why": self.why,
            "passed_over": [{"path": path, "why": why} for path, why in self.passed_over],
            "terms": self.terms,
            "proof": self.proof or {},
        }


@dataclasses.dataclass(frozen=True)
class _Candidate:
    path: str
    terms: int
    why: str


def choose(settings: Settings, device: torch.device, depth: int) -> Choice:
    """How a layer that sums `depth` products into one result forms them on `device`.

    Raises UsageError where such sums do not fit 32 bits, NotApplicableError where the path that the
    settings insist on is not to be had here, and what reading the table raises.
    """
    if not settings.policy.eight_bit:
        found = Choice("functor", "a float32 policy's only path")
        return _insisted(settings, [found], ())
    multiplier = multiplier_of(settings.policy)
    beyond = lacking_room(settings.policy, depth)
    if beyond:
        raise UsageError(
            f"a layer cannot form its products by {settings.policy}",
            why=beyond,
            next_step="leave this layer out (exclude=), or take a multiplier of smaller products",
        )
    open_paths: List[Choice] = []
    costly: List[Choice] = []
    passed_over: List[Tuple[str, str]] = []
    proof = multiplier.structure.to_fact()
    for candidate in _candidates(settings.policy, multiplier):
        lacking, cost = _lacking(candidate, device, depth), _costing(candidate, device)
        if lacking or cost:
            passed_over.append((candidate.path, lacking or cost))
        before = () if cost else tuple(passed_over)
        found = Choice(candidate.path, candidate.why, before, candidate.terms, proof)
        if not lacking:
            (costly if cost else open_paths).append(found)
    return _insisted(settings, [*open_paths, *costly], passed_over)


def layer_for(
    settings: Settings,
    problem: Problem,
    device: torch.device,
    depth: int,
    scales: Optional[Scales] = None,
) -> Union[CodeLayer, FloatLayer]:
    """What runs a layer. `scales` (of 8-bit policies): on `device`. Raises what `choose` raises."""
    policy, gradient = settings.policy, settings.gradient
    if not policy.eight_bit:
        # An exact product is its own slope's plane: both gradients are one.
        local = gradient.local and policy.name != "exact_fp32"
        return FloatLayer(problem, _float_mac(policy, device.type == "cuda"), local)
    multiplier = multiplier_of(policy)
    mac, factors = _code_mac(policy, _path(settings, device, depth), device)
    slopes = None
    if gradient.local:
        slopes = functools.partial(multiplier.slopes, gradient.window)
    form = multiplier.form(settings.per_channel)
    scales = scales or Scales()
    scales.require(form)
    return CodeLayer(problem, form, mac, multiplier.largest, scales, slopes, factors)


def prepare(settings: Settings, device: torch.device, depth: int, scales: Scales) -> None:
    """Everything that can fail before the first call: kernels that are not built, a functor that
    does not compile, scales of another format; and what `choose` raises."""
    require(device.type)
    layer_for(settings, Problem("linear"), device, depth, scales)


def lacking_room(policy: Policy, depth: int) -> str:
    """Why sums of `depth` products of an 8-bit policy may not fit 32 bits; empty where they do."""
    largest = multiplier_of(policy).largest
    if depth * largest < _SUMS_END:
        return ""
    return f"it sums {depth} products of up to {largest}: {depth * largest} is beyond 32 bits"


def _candidates(policy: Policy, multiplier: Multiplier) -> List[_Candidate]:
    """The paths that the multiplier has, the one that costs least first."""
    structure, found = multiplier.structure, []
    count = len(structure.terms)
    if structure.proved and structure.kind == BILINEAR:
        proof = f"proved over {structure.checked_pairs} pairs"
        if policy.name == "exact_int8" or _is_exact(structure.terms):
            found.append(_Candidate("exact", 1, f"the products are exact, {proof}"))
        else:
            why = f"{count} masked exact products make the table, {proof}"
            found.append(_Candidate("structured", count, why))
    elif structure.proved and structure.kind == LOW_RANK:
        count = len(structure.factors)
        why = (
            f"{count} exact products of looked-up codes make the table, proved over "
            f"{structure.checked_pairs} pairs"
        )
        found.append(_Candidate("factored", count, why))
    reason = structure.evidence.get("why", "") if not found else ""
    why = f"no sum of few exact products: {reason}" if reason else "any table can go by itself"
    found.append(_Candidate("table", 0, why))
    return found


def _is_exact(terms: Sequence[Term]) -> bool:
    return list(terms) == [Term(0xFF, 0xFF)]


def _lacking(candidate: _Candidate, device: torch.device, depth: int) -> str:
    """Why a path is not to be had on a device, or for that depth; empty where it is."""
    if candidate.path == "factored" and depth * _GREATEST >= _SUMS_END:
        return f"exact sums of {depth} products of bytes may not fit 32 bits"
    if candidate.path != "table" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _EXACT_CAPABILITY:
            return (
                f"a GPU of compute capability {capability[0]}.{capability[1]} has no products of "
                f"bytes; they came with {_EXACT_CAPABILITY[0]}.{_EXACT_CAPABILITY[1]}"
            )
    return ""


def _costing(candidate: _Candidate, device: torch.device) -> str:
    """Why a path would take longer than the table on a device; empty where it would not."""
    if device.type == "cuda" or candidate.terms <= _TERMS_WITHOUT_DOTS:
        return ""
    instructions = kernels.product_instructions()
    if instructions in _DOTS:
        return ""
    return (
        f"{candidate.terms} exact products take longer than the table on a processor that forms "
        f"them by {instructions}"
    )


def _insisted(
    settings: Settings, open_paths: Sequence[Choice], passed_over: Sequence[Tuple[str, str]]
) -> Choice:
    """The first, or the one that the settings name."""
    if settings.path == AUTO:
        return open_paths[0]
    for choice in open_paths:
        if choice.path == settings.path:
            return dataclasses.replace(choice, why=f"asked for; {choice.why}")
    reasons = dict(passed_over)
    raise NotApplicableError(
        f"{settings.policy} has no path '{settings.path}' here",
        why=reasons.get(settings.path, "its products do not have that form"),
        next_step=f"path='{AUTO}', or {', '.join(choice.path for choice in open_paths)}",
    )


@functools.lru_cache(maxsize=_KEPT)
def _path(settings: Settings, device: torch.device, depth: int) -> str:
    """What `choose` takes, without the record of it: this is asked at every call."""
    return choose(settings, device, depth).path


@functools.lru_cache(maxsize=_KEPT)
def _float_mac(policy: Policy, cuda: bool) -> Mac:
    if policy.name == "custom":
        # What finds and runs compilers, which no other policy needs.
        from narrowgauge_kernels.custom import compile_functor

        return compile_functor(policy.source, cuda)
    return Mac(_MACS.get(policy.name, policy.name), policy.bits)


@functools.lru_cache(maxsize=_KEPT)
def _code_mac(
    policy: Policy, path: str, device: torch.device
) -> Tuple[CodeMac, Tuple[Factor, ...]]:
    """The multiplier as kernels take it; by `factored`, the factors that take its place."""
    multiplier = multiplier_of(policy)
    table, structure = multiplier.table, multiplier.structure
    signs = (table.a_signed, table.b_signed)
    if path == "exact":
        return CodeMac("exact_int8", None, *signs), ()
    if path == "structured":
        terms = tuple(
            KernelTerm(t.a_mask, t.b_mask, t.coefficient, a_shift=t.a_shift, b_shift=t.b_shift)
            for t in structure.terms
        )
        return CodeMac("structured", None, *signs, terms), ()
    factors: Tuple[Factor, ...] = ()
    if path == "factored":
        factors = tuple(factor_on(term, device) for term in structure.factors)
    return CodeMac("lut8x8", torch.from_numpy(table.values.copy()), *signs), factors
