"""The sight of torch 2.0 and later: a mode that every operator passes before it is executed."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge_lab.measure.operators import RULES, Invocation, Operand, Use, use_of

__all__ = ["Dispatched", "graphs_given_to_compiler"]

Note = Callable[[Use], None]

#: What TorchScript's passes ask of constants. A tensor that is a number comes here as the number,
#: which these do not take back.
_OF_CONSTANTS = ("aten::equal", "aten::_local_scalar_dense")


class Dispatched(TorchDispatchMode):
    """Gives every operator of the table to `note` and changes nothing."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's base class would have dynamo leave our method alone, and import it for that: two
        seconds in every row. Nothing is compiled while this mode is on."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        given = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **given)
        name = func._schema.name
        rule = RULES.get(name)
        # Under inference_mode, operators that only call others come here whole: take them apart.
        if name.startswith("aten::") and (rule is None or rule.composite):
            with self:
                result = func.decompose(*args, **given)
            if result is not NotImplemented:
                return result
        if name in _OF_CONSTANTS:
            args = tuple(map(torch.as_tensor, args))
        result = func(*args, **given)
        if rule is not None:
            made = Invocation(name, _operands(args), _operands(result))
            use = use_of(made)
            if use is not None:
                self._note(use)
        return result


def _operands(values: Any) -> Any:
    """The same values with tensors, and weights packed for quantised operators, described."""
    if isinstance(values, torch.Tensor):
        return Operand.of(values)
    if isinstance(values, (list, tuple)):
        return tuple(_operands(each) for each in values)
    if isinstance(values, torch.ScriptObject):
        return _operands(values.unpack()[0])
    return values


@contextlib.contextmanager
def graphs_given_to_compiler(note: Note) -> Iterator[List[Any]]:
    """Notes the operators of each graph that torch.compile hands to inductor; gives the graphs."""
    from torch._inductor import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: List[Any] = []
    inductor = compile_fx.compile_fx

    def watched(model: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(model)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            inputs = [_without_data(fake, value) for value in example_inputs]
            with Dispatched(note):
                model(*inputs)
        return inductor(model, example_inputs, *args, **kwargs)

    compile_fx.compile_fx = watched
    try:
        yield graphs
    finally:
        compile_fx.compile_fx = inductor


def _without_data(fake: Any, value: Any) -> Any:
    return fake.from_tensor(value) if isinstance(value, torch.Tensor) else value
