"""A training through torch.compile: the same weights as without, and a say where it cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from training_cases import CLASSES, Case, recipe

from narrowgauge_contract.errors import ExitCode, SkippedError, UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.compiling import CompileError, Forward, compiled_or_say

needs_compiler = pytest.mark.skipif(
    not torch_compat.compiler_available(), reason="this torch has no torch.compile"
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what a compiler warns of is no fault of ours
def test_what_inductor_makes_trains_like_what_it_was_made_of(tmp_path: Path) -> None:
    models = []
    for compiles in (False, True):
        case = Case(tmp_path / str(compiles))
        models.append(case.train(recipe(compiles=compiles), dropout=0.0))
        assert ("compiled" in case.row().facts) is compiles
        assert case.row().validity.valid

    for key, tensor in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[key], tensor, rtol=1e-3, atol=1e-5)


@needs_compiler
def test_full_batches_are_compiled_and_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 images by 16: four full batches and one of 6, in each of two epochs; dynamo's own part of
    the compiler runs, and a backend that only counts."""
    sizes = []

    def counted(model: Callable[..., Any], mode: str, *, whole: bool) -> Callable[..., Any]:
        assert (mode, whole) == ("default", True)

        def backend(graph: Any, inputs: Any) -> Any:
            def call(*given: torch.Tensor) -> Any:
                sizes.append(next(len(each) for each in given if each.dim() == 4 and len(each) > 8))
                return graph(*given)

            return call

        compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True)
        return compiled

    plain, case = Case(tmp_path / "plain"), Case(tmp_path / "compiled")
    expected = plain.train(recipe(epochs=2), dropout=0.0)
    monkeypatch.setattr(torch_compat, "compiled", counted)
    found = case.train(recipe(epochs=2, compiles=True), dropout=0.0)

    assert sizes == [16] * 8
    assert int(found.norm.num_batches_tracked) == 10
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], tensor)


def test_the_compilers_own_errors_say_how_to_do_without_it() -> None:
    failure = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})
    with pytest.raises(CompileError) as caught, compiled_or_say():
        raise failure("inductor raised:\nInvalidCxxCompiler: none\nand a long log")

    assert caught.value.exit_code is ExitCode.RUN_FAILED
    assert "InvalidCxxCompiler: none" in str(caught.value)
    assert "long log" not in str(caught.value)
    assert "-p compile=false" in caught.value.next_step


def test_what_a_model_raises_is_none_of_the_compilers() -> None:
    with pytest.raises(RuntimeError, match="sizes") as caught, compiled_or_say():
        raise RuntimeError("sizes differ")
    assert not isinstance(caught.value, CompileError)


def test_losses_of_exits_are_not_compiled(tmp_path: Path) -> None:
    given = dataclasses.replace(recipe(compiles=True), objective=ExitLosses(2))
    with pytest.raises(UsageError, match=r"torch\.compile goes with"):
        Case(tmp_path).train(given)


def test_without_a_compiler_the_row_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "compiler_available", lambda: False)
    with pytest.raises(SkippedError, match=r"needs torch\.compile"):
        Case(tmp_path).train(recipe(compiles=True))


def test_uncompiled_every_batch_goes_through_the_model() -> None:
    model = torch.nn.Linear(2, len(CLASSES))
    images = torch.ones(4, 2)
    assert torch.equal(Forward(model, 4, compiles=False)(images), model(images))
