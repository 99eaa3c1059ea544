"""A training through torch.compile: the same weights as without, and a say where it cannot be."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
from anytime_cases import CLASSES, AnytimeCase
from anytime_cases import recipe as exits_recipe
from training_cases import Case, recipe

from narrowgauge_contract.errors import ExitCode, SkippedError, UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.gradients import Orthogonalised, PCGrad, Projection
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.anytime.staged import StagedForward
from narrowgauge_lab.anytime.systems.iresnext import SharedIResNeXt
from narrowgauge_lab.anytime.systems.iresnext_parts import Geometry
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_lab.compiling import (
    CompileError,
    Forward,
    PartByPart,
    compiled_call,
    compiled_or_say,
)

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


def _counting(sizes: List[int]) -> Callable[..., Any]:
    """In place of inductor: dynamo's own part, and a backend that notes the batches it is given."""

    def compiled(call: Callable[..., Any], mode: str, *, whole: bool) -> Callable[..., Any]:
        assert (mode, whole) == ("default", True)

        def backend(graph: Any, inputs: Any) -> Any:
            def run(*given: torch.Tensor) -> Any:
                images = (each for each in given if each.dim() == 4 and each.shape[2] == 8)
                sizes.append(len(next(images)))
                return graph(*given)

            return run

        whole_graph = {"fullgraph": True, "dynamic": False}
        made: Callable[..., Any] = torch.compile(call, backend=backend, **whole_graph)
        return made

    return compiled


@needs_compiler
def test_full_batches_are_compiled_and_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 images by 16: four full batches and one of 6, in each of two epochs."""
    sizes: List[int] = []
    plain, case = Case(tmp_path / "plain"), Case(tmp_path / "compiled")
    expected = plain.train(recipe(epochs=2), dropout=0.0)
    monkeypatch.setattr(torch_compat, "compiled", _counting(sizes))
    found = case.train(recipe(epochs=2, compiles=True), dropout=0.0)

    assert sizes == [16] * 8
    assert int(found.norm.num_batches_tracked) == 10
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], tensor)


@needs_compiler
def test_the_losses_of_exits_are_compiled_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: List[int] = []
    given = exits_recipe(ExitLosses(2), epochs=2)
    states, rows = [], []
    for compiles in (False, True):
        if compiles:
            monkeypatch.setattr(torch_compat, "compiled", _counting(sizes))
        torch.manual_seed(0)
        case = AnytimeCase(tmp_path / str(compiles))
        net = NestedNet(classes=CLASSES, exits=2, channels=2)
        case.run(dataclasses.replace(given, compile=compiles), net=net)
        states.append(net.state_dict())
        rows.append(case.row())

    assert sizes == [16] * 8
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor)
    names = ("train_loss", "exit0_train_loss", "exit1_train_loss")
    values = [[row.metric(name).values for name in names] for row in rows]
    for mine, theirs in zip(*values):
        assert mine == pytest.approx(theirs, rel=1e-5)


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


@needs_compiler
@pytest.mark.parametrize(
    "combination",
    [Orthogonalised(), pytest.param(PCGrad(per_tensor=True), marks=pytest.mark.slow)],
    ids=repr,
)
def test_projected_gradients_are_taken_through_stages_that_are_compiled_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, combination: Projection
) -> None:
    sizes: List[int] = []
    given = exits_recipe(ExitLosses(3, combination, cosine_images=8), epochs=2)
    states = []
    for compiles in (False, True):
        if compiles:
            monkeypatch.setattr(torch_compat, "compiled", _counting(sizes))
        torch.manual_seed(0)
        net = NestedNet(classes=CLASSES, exits=3, channels=2)
        case = AnytimeCase(tmp_path / str(compiles))
        case.run(dataclasses.replace(given, compile=compiles), net=net)
        states.append(net.state_dict())
        assert "advance" not in vars(net)

    assert sizes == [16] * 8 * 3, "three stages of each full batch"
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.slow
def test_there_are_more_stages_than_the_compiler_keeps_versions_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight of one code object, whatever network they are of."""
    monkeypatch.setattr(torch_compat, "compiled", _counting([]))
    images = torch.rand(4, 3, 8, 8)
    for exits in (4, 6):
        net = NestedNet(classes=CLASSES, exits=exits, channels=2).eval()
        with torch.no_grad():
            for mine, theirs in zip(StagedForward(net, net, 4)(images), net(images)):
                torch.testing.assert_close(mine, theirs)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_inductor_makes_of_stages_is_differentiated_again_and_again(tmp_path: Path) -> None:
    given = exits_recipe(ExitLosses(2, Orthogonalised()), epochs=2)
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = NestedNet(classes=CLASSES, exits=2, channels=2)
        AnytimeCase(tmp_path / str(compiles)).run(
            dataclasses.replace(given, compile=compiles), net=net
        )
        states.append(net.state_dict())

    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-3, atol=1e-4)


@needs_compiler
def test_projected_gradients_of_what_has_no_stages_are_not_compiled(tmp_path: Path) -> None:
    objective = ExitLosses(2, Orthogonalised())
    given = dataclasses.replace(recipe(compiles=True), objective=objective)
    with pytest.raises(UsageError, match=r"does not go with this training") as caught:
        Case(tmp_path).train(given)
    assert "exit by exit" in str(caught.value)


@needs_compiler
def test_nor_are_those_of_a_network_that_answers_all_exits_at_once(tmp_path: Path) -> None:
    """Nothing of it would have been compiled, and the record would have said that it was."""
    net = SharedIResNeXt(Geometry(1, 0.25, CLASSES))
    given = exits_recipe(ExitLosses(net.exits, Orthogonalised()), epochs=2)
    with pytest.raises(UsageError, match=r"does not go with this training") as caught:
        AnytimeCase(tmp_path).run(dataclasses.replace(given, compile=True), net=net)
    assert "SharedIResNeXt has no stages to train by" in str(caught.value)


def test_without_a_compiler_the_row_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "compiler_available", lambda: False)
    with pytest.raises(SkippedError, match=r"needs torch\.compile"):
        Case(tmp_path).train(recipe(compiles=True))


def test_uncompiled_every_batch_goes_through_the_model() -> None:
    model = torch.nn.Linear(2, 3)
    images = torch.ones(4, 2)
    assert torch.equal(Forward(model, 4)(images), model(images))


class _Pair(PartByPart):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.ask(self.parts[0], images) + self.ask(self.parts[1], images)


class TestPartByPart:
    @pytest.fixture(autouse=True)
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> List[Any]:
        """What went through the compiler, call by call."""
        calls: List[Any] = []

        def compiled(call: Any, mode: str, *, whole: bool = False) -> Any:
            assert whole

            def counted(images: torch.Tensor) -> Any:
                calls.append(call)
                return call(images)

            return counted

        monkeypatch.setattr(torch_compat, "compiled", compiled)
        return calls

    def test_full_batches_go_through_each_part_compiled(self, asked: List[Any]) -> None:
        model = _Pair()
        forward = Forward(model, 4, compiled_call(model, model))
        for images in (torch.ones(4, 2), torch.ones(3, 2), torch.ones(4, 2)):
            assert torch.equal(forward(images), model(images))
        assert asked == [*model.parts, *model.parts]

    def test_uncompiled_and_beside_the_step_parts_run_as_they_are(self, asked: List[Any]) -> None:
        model = _Pair()
        Forward(model, 4)(torch.ones(4, 2))
        Forward(model, 4, compiled_call(model, model))(torch.ones(4, 2))
        assert len(asked) == 2
        model(torch.ones(4, 2))
        assert len(asked) == 2

    def test_a_step_that_fails_leaves_them_uncompiled(self, asked: List[Any]) -> None:
        model = _Pair()

        def failing(images: torch.Tensor) -> None:
            model(images)
            raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"):
            Forward(failing, 4, compiled_call(model, failing))(torch.ones(4, 2))
        assert len(asked) == 2
        model(torch.ones(4, 2))
        assert len(asked) == 2

    def test_a_copy_asks_its_own_parts(self, asked: List[Any]) -> None:
        model = _Pair()
        Forward(model, 4, compiled_call(model, model))(torch.ones(4, 2))
        other = copy.deepcopy(model)
        for part in other.parts:
            torch.nn.init.zeros_(part.weight)
            torch.nn.init.zeros_(part.bias)
        said = Forward(other, 4, compiled_call(other, other))(torch.ones(4, 2))
        assert torch.equal(said, torch.zeros(4, 3))
