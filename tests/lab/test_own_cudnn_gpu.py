"""cuDNN's plans on a GPU against float64. `-s` shows how many plans each convolution has."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch
from cudnn_cases import beside, convolution, error, expected, operands

from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.cudnn import ConvPlan, ConvProblem, CudnnPlanError
from narrowgauge_lab.engines.own.cudnn_trials import computes

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
RESNET50 = {
    "stem": convolution(32, 3, 224, 64, kernel=7, step=2),
    "3x3 at 56": convolution(32, 64, 56, 64),
    "1x1 with residual at 56": convolution(32, 64, 56, 256, kernel=1, residual=True),
    "3x3 by two at 28": convolution(32, 256, 28, 256, step=2),
    "1x1 down at 7": convolution(32, 2048, 7, 512, kernel=1),
}
SLICES = {
    "x": convolution(8, 64, 28, 32, x_pixel=256),
    "y": convolution(8, 128, 28, 32, y_pixel=256),
    "all": convolution(8, 64, 28, 64, residual=True, x_pixel=96, y_pixel=128, residual_pixel=128),
}
OTHERS = {
    "mobilenet expand": convolution(8, 24, 56, 144, kernel=1, activation="relu6"),
    "mobilenet depthwise": convolution(8, 144, 56, 144, groups=144, activation="relu6"),
    "growth of 12": convolution(8, 48, 32, 12, activation="none"),
    "without a bias": convolution(8, 64, 28, 64, bias=False, activation="none"),
    "residual of other pixels": convolution(8, 64, 28, 64, residual=True, residual_pixel=80),
    "dilated": convolution(8, 64, 28, 64, edge=2, dilation=(2, 2)),
}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "tf32": 2e-3, "float32": 5e-5}


@pytest.fixture(autouse=True)
def _plans_can_be_had() -> None:
    reason = cudnn.missing()
    if reason:
        pytest.skip(reason)


def found(name: str, problem: ConvProblem, seconds: float = 6.0) -> List[ConvPlan]:
    survey = cudnn.survey(problem, CUDA, limit=80, seconds=seconds)
    print(f"\n{name} ({problem.dtype}): {survey.note}")
    for plan in survey.plans[:3]:
        print(f"    {plan.name}, {plan.workspace} bytes, {plan.source}")
    return list(survey.plans)


def scratch(plan: ConvPlan) -> torch.Tensor:
    return torch.empty(plan.workspace, dtype=torch.uint8, device=CUDA)


def run(plan: ConvPlan, tensors: Dict[str, Any]) -> torch.Tensor:
    tensors["y"].fill_(float("nan"))
    plan.start(**tensors, workspace=scratch(plan))
    return tensors["y"]


def replay(plan: ConvPlan, tensors: Dict[str, Any]) -> torch.Tensor:
    """By a CUDA graph, after what `run` did."""
    start = plan.bind(**tensors, workspace=scratch(plan))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        start()
    tensors["y"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return tensors["y"]


def cases(
    problem: ConvProblem, plans: List[ConvPlan], offset: int = 0
) -> Iterator[Tuple[ConvPlan, Dict[str, Any], torch.Tensor]]:
    """Each plan with operands and what they should give; of each kind of bias they are the same."""
    made: Dict[Any, Any] = {}
    for plan in plans:
        if plan.bias_dtype not in made:
            tensors = operands(problem, plan, offset)
            made[plan.bias_dtype] = tensors, expected(problem, tensors)
        yield (plan, *made[plan.bias_dtype])


def check(name: str, problem: ConvProblem, plans: List[ConvPlan]) -> List[float]:
    """Each plan's error, launched and replayed. Fails with every plan that is wrong."""
    errors, wrong = [], []
    for plan, tensors, wanted in cases(problem, plans):
        both = [error(run(plan, tensors), wanted), error(replay(plan, tensors), wanted)]
        errors.append(both[0])
        if not all(each <= TOLERANCE[problem.dtype] for each in both):
            wrong.append(f"{plan.name}: launched {both[0]:.2g}, replayed {both[1]:.2g}")
    print(f"    errors {min(errors, default=0):.2g} to {max(errors, default=0):.2g}")
    assert not wrong, f"{name}: {wrong}"
    return errors


@pytest.mark.parametrize("name", RESNET50)
def test_every_plan_of_resnet50_is_right(name: str) -> None:
    problem = RESNET50[name]
    plans = found(name, problem)
    assert len(plans) >= 5
    assert len({plan.name for plan in plans}) == len(plans)
    check(name, problem, plans)


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_wider_pixels_are_right_and_their_neighbours_untouched(name: str) -> None:
    """What lies beside x and the residual is NaN, so that reading it would show."""
    problem, offset = SLICES[name], 16
    plans = found(f"slice of {name}", problem)
    assert plans
    check(name, problem, plans)
    for plan, tensors, wanted in cases(problem, plans, offset):
        assert error(run(plan, tensors), wanted) <= 2e-3, plan
        if problem.y_pixel != problem.count:
            assert bool(beside(problem, "y", tensors["y"], offset).isnan().all()), plan


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_right_where_there_are_plans(name: str) -> None:
    plans = found(name, OTHERS[name])
    if name == "without a bias":
        assert plans
    check(name, OTHERS[name], plans)


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32"])
def test_other_dtypes_are_right(dtype: str) -> None:
    """And tf32 has what float32 must not have: a plan that rounds."""
    for name in ("3x3 at 56", "1x1 with residual at 56"):
        problem = dataclasses.replace(RESNET50[name], dtype=dtype, batch=4)
        plans = found(name, problem)
        assert plans
        errors = check(name, problem, plans)
        if dtype == "tf32" and torch.cuda.get_device_capability() >= (8, 0):
            rounding = [plan for plan, each in zip(plans, errors) if each > 1e-4]
            assert rounding
            assert all(computes(plan) for plan in rounding)
            for plan in rounding:
                plan.problem = dataclasses.replace(problem, dtype="float32")
            assert not any(computes(plan) for plan in rounding)


def test_a_stored_plan_does_the_same() -> None:
    problem = RESNET50["1x1 with residual at 56"]
    engines: Dict[str, ConvPlan] = {}
    for plan in found("to be stored", problem):
        engines.setdefault(plan.name.split()[0], plan)
    stored = 0
    for plan, tensors, wanted in cases(problem, list(engines.values())):
        try:
            blob = plan.blob()
        except CudnnPlanError as refused:  # cuDNN may have engines that it does not store
            print(f"    {plan.name}: {refused}")
            continue
        stored += 1
        print(f"    {plan.name}: {len(blob)} bytes")
        again = cudnn.rebuild(problem, blob, CUDA)
        assert again.name == plan.name
        assert again.workspace >= plan.workspace
        assert again.blob() == blob
        assert error(run(again, tensors), wanted) <= 2e-3
        assert error(replay(again, tensors), wanted) <= 2e-3
        with pytest.raises(CudnnPlanError, match="another problem"):
            cudnn.rebuild(dataclasses.replace(problem, batch=31), blob, CUDA)
    assert stored


def test_a_plan_follows_streams_and_threads() -> None:
    problem = RESNET50["3x3 at 56"]
    plan = found("on other streams", problem, seconds=2.0)[0]
    tensors = operands(problem, plan)
    wanted = expected(problem, tensors)
    assert error(run(plan, tensors), wanted) <= 2e-3
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = operands(problem, plan)
        torch.cuda._sleep(50_000_000)  # y is poisoned late, so another stream would be early
        assert error(run(plan, late), wanted) <= 2e-3
    torch.cuda.synchronize()
    seen: List[float] = []

    def work() -> None:
        with torch.cuda.device(0):
            seen.append(error(run(plan, operands(problem, plan)), wanted))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] <= 2e-3
