"""What only a GPU can show of training by exits: captured steps equal eager ones."""

from __future__ import annotations

from typing import List, Tuple

import pytest
import torch
from anytime_cases import EXITS, ThreeExits, made_up

from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime.feeds import make_splits
from narrowgauge_lab.anytime.gradients import Combination, Orthogonalised, PCGrad, Sum
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.anytime.resolution import RandomSizes
from narrowgauge_lab.anytime.stepping import ExitStepper
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.optim import SGD

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _walk(graphs: str, combination: Combination, name: str, compiles: bool = False) -> ExitStepper:
    """Twelve updates of ten images: three warm up, nine are replayed."""
    torch.manual_seed(0)
    net = ThreeExits(dropout=0.0).to(CUDA).train()
    objective = ExitLosses(EXITS, combination)
    optimizer = combination.optimizer(SGD(net, 0.05), EXITS)
    feed = make_splits(made_up(), CUDA, validation=20).training
    mode = precision.enter(name, CUDA)
    stepper = ExitStepper(net, optimizer, feed, mode, ALONE, 10, graphs, objective, compiles)
    stepper.begin()
    for start in range(12):
        stepper((torch.arange(10, device=CUDA) + 7 * start) % len(feed))
    return stepper


@pytest.mark.parametrize("name", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "combination",
    [Sum(), PCGrad(), Orthogonalised(), Orthogonalised(per_tensor=True, momentum=0.9)],
    ids=str,
)
def test_a_captured_step_does_what_the_eager_one_does(combination: Combination, name: str) -> None:
    if not torch_compat.graphs_available(CUDA):
        pytest.skip("this torch has no CUDA graphs")
    walks: List[ExitStepper] = [_walk(graphs, combination, name) for graphs in ("off", "auto")]

    assert [walk.description for walk in walks] == ["off", "cuda-graph"]
    tolerance = 1e-3 if name == "fp32" else 5e-2
    one, other = (walk.optimizer.values for walk in walks)
    assert float((one - other).abs().max()) <= tolerance
    sums = [walk.sums.tolist() for walk in walks]
    assert sums[0] == pytest.approx(sums[1], rel=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what a compiler warns of is no fault of ours
@pytest.mark.parametrize("combination", [Sum(), Orthogonalised()], ids=str)
def test_what_is_compiled_is_captured_and_gives_the_same(combination: Combination) -> None:
    if not (torch_compat.graphs_available(CUDA) and torch_compat.compiler_available()):
        pytest.skip("this torch has no CUDA graphs, or no torch.compile")
    eager = _walk("off", combination, "fp32")
    compiled = _walk("auto", combination, "fp32", compiles=True)

    assert compiled.description == "cuda-graph"
    assert float((eager.optimizer.values - compiled.optimizer.values).abs().max()) <= 1e-3


def _sizes(graphs: str) -> Tuple[ExitStepper, torch.Tensor]:
    """Thirty updates at random sizes: of each, three warm up and the rest are replayed. The weights
    before them too. At a usual rate such a net is chaotic: of a perturbation of 1e-7 an eighth of a
    weight has come after thirty updates. At this one noise moves it a hundredth of what they do."""
    torch.manual_seed(0)
    net = cifar_resnet(18, 0.0625).to(CUDA).train()
    feed = make_splits(made_up(), CUDA, validation=20).training
    mode = precision.enter("fp32", CUDA)
    objective = RandomSizes((16, 20, 32), 0, 30)
    stepper = ExitStepper(net, SGD(net, 1e-5), feed, mode, ALONE, 10, graphs, objective)
    before = stepper.optimizer.values.clone()
    stepper.begin()
    objective.begin_epoch(0, net)
    for start in range(30):
        stepper((torch.arange(10, device=CUDA) + 7 * start) % len(feed))
    return stepper, before


def test_each_size_has_a_captured_step_of_its_own() -> None:
    if not torch_compat.graphs_available(CUDA):
        pytest.skip("this torch has no CUDA graphs")
    (eager, before), (graphed, _) = (_sizes(graphs) for graphs in ("off", "auto"))

    assert [eager.description, graphed.description] == ["off", "cuda-graph"]
    one, other = eager.optimizer.values, graphed.optimizer.values
    assert float((one - other).norm()) <= 0.05 * float((one - before).norm())
    sums = [walk.sums.tolist() for walk in (eager, graphed)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-2)
