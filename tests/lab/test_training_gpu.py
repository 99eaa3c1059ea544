"""What only a GPU can show: captured steps equal eager ones, and reduced precision learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from training_cases import Case, recipe

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.schedule import Cosine

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _needs_graphs() -> None:
    if not torch_compat.graphs_available(CUDA):
        pytest.skip("this torch has no CUDA graphs")


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_a_captured_step_does_what_the_eager_one_does(tmp_path: Path, name: str) -> None:
    """70 images in batches of 10, two epochs: 3 steps warm up, 11 are replayed."""
    _needs_graphs()
    states, losses = [], []
    for graphs in ("off", "auto"):
        case = Case(tmp_path / graphs, CUDA)
        given = recipe(epochs=2, precision=name, graphs=graphs, batch_size=10)
        model = case.train(given, dropout=0.0)
        assert case.row().facts["graphs_ran"] == ("cuda-graph" if graphs == "auto" else "off")
        states.append(model.state_dict())
        losses.append(case.values("train_loss"))

    # Not bitwise: atomics and the choice of algorithm differ between two runs of either kind.
    tolerance = 1e-3 if name == "fp32" else 5e-2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=tolerance)
    for key, tensor in states[0].items():
        difference = (tensor.double() - states[1][key].double()).abs().max().item()
        assert difference <= tolerance * max(1.0, tensor.double().abs().max().item()), key


def test_a_partial_batch_runs_between_replays(tmp_path: Path) -> None:
    _needs_graphs()
    case = Case(tmp_path, CUDA)
    model = case.train(recipe(epochs=6), dropout=0.0)

    assert int(model.norm.num_batches_tracked) == 6 * 5
    assert case.values("train_loss")[-1] < 0.6 * case.values("train_loss")[0]


def test_the_rate_of_a_later_epoch_reaches_a_captured_step(tmp_path: Path) -> None:
    """Epochs 3 and 4 have a tenth of the rate: a graph that kept the first moves on as before."""
    _needs_graphs()
    kept = {}
    for epochs in (2, 4):
        case = Case(tmp_path / str(epochs), CUDA)
        given = recipe(epochs=epochs, batch_size=10)
        kept[epochs] = case.train(given, dropout=0.0).linear.weight.detach().clone()
        assert case.values("learning_rate") == pytest.approx((0.05, 0.05, 0.005, 0.005)[:epochs])
    slow = Case(tmp_path / "eager", CUDA)
    given = recipe(epochs=4, batch_size=10, graphs="off")
    eager = slow.train(given, dropout=0.0).linear.weight.detach()

    moved = (kept[4] - kept[2]).norm().item()
    assert (kept[4] - eager).norm().item() <= 0.2 * moved + 1e-4


def test_the_rate_of_every_update_reaches_a_captured_step(tmp_path: Path) -> None:
    """Captured and launched updates end alike, and not where a constant rate leads."""
    _needs_graphs()
    kept = {}
    for graphs in ("auto", "off"):
        case = Case(tmp_path / graphs, CUDA)
        given = recipe(epochs=2, batch_size=10, graphs=graphs)
        schedule = Cosine(0.05, 2, each_update=True)
        given = dataclasses.replace(given, schedule=schedule)
        kept[graphs] = case.train(given, dropout=0.0).linear.weight.detach().clone()
        assert case.row().facts["graphs_ran"] == ("cuda-graph" if graphs == "auto" else "off")
    constant = Case(tmp_path / "constant", CUDA)
    other = constant.train(recipe(epochs=2, batch_size=10), dropout=0.0).linear.weight.detach()

    apart = (other - kept["off"]).norm().item()
    assert (kept["auto"] - kept["off"]).norm().item() <= 0.2 * apart + 1e-4


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_learns(tmp_path: Path, name: str) -> None:
    if name not in precision.available(CUDA):
        pytest.skip(f"{name} does not work on this GPU with this torch")
    case = Case(tmp_path, CUDA)
    case.train(recipe(epochs=12, precision=name))

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == name
    assert case.values("test_accuracy")[-1] > 80.0
    assert row.metric("images_per_second").source == "cuda-event"


def test_killed_and_resumed_goes_on_with_the_same_images(tmp_path: Path) -> None:
    """Not bitwise on a GPU, but the same order and the same crops: the losses stay together."""
    whole, case = Case(tmp_path / "whole", CUDA), Case(tmp_path / "killed", CUDA)
    whole.train(recipe(graphs="off"), dropout=0.0)
    with pytest.raises(KeyboardInterrupt):
        case.train(recipe(graphs="off"), fail_at=13, dropout=0.0)
    case.train(recipe(graphs="off"), dropout=0.0, resume=True)

    assert case.values("train_loss") == pytest.approx(whole.values("train_loss"), rel=1e-2)


@pytest.mark.skipif(not torch_compat.compiler_available(), reason="no torch.compile")
@pytest.mark.filterwarnings("ignore")  # what a compiler warns of is no fault of ours
def test_a_compiled_step_is_captured_and_does_what_the_plain_one_does(tmp_path: Path) -> None:
    states = []
    for compiles in (False, True):
        case = Case(tmp_path / str(compiles), CUDA)
        model = case.train(recipe(epochs=2, batch_size=10, compiles=compiles), dropout=0.0)
        assert case.row().facts["graphs_ran"] == "cuda-graph"
        states.append(model.state_dict())
    for key, tensor in states[0].items():
        difference = (tensor.double() - states[1][key].double()).abs().max().item()
        assert difference <= 1e-3 * max(1.0, tensor.double().abs().max().item()), key
