"""`tensor-cores` without running a row: its network, setups, ladder, evidence and declarations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from tensor_cores_cases import CPU, EXPERIMENTS, NAME, job, module, parameters, spec
from torch import nn

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_contract.outcome import Metric, Row, Status, Validity
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab import torch_compat
from narrowgauge_lab.measure.agreement import check_output

GOLDEN = Path(__file__).parents[1] / "data" / "networks" / "torchvision-resnet50.txt"


def _build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return module("network").INFERENCE[name].build()


def test_the_network_has_torchvisions_names_and_shapes() -> None:
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()[1:]
    state = _build("resnet50").state_dict()

    found = [f"{name} {'x'.join(map(str, t.shape)) or 'scalar'}" for name, t in state.items()]
    assert found == lines
    assert sum(t.numel() for n, t in state.items() if "running" not in n and "num" not in n) == (
        25557032
    )


def test_the_network_is_torchvisions_weight_for_weight() -> None:
    try:
        import torchvision
    except (ImportError, RuntimeError):
        pytest.skip("no torchvision, or one of another torch")
    ours = _build("resnet50")
    torch.manual_seed(3)
    theirs = torchvision.models.resnet50().eval()
    images = torch.rand(1, 3, 64, 64)

    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


def test_a_seed_gives_the_same_network_and_another_a_different_one() -> None:
    first, again = _build("resnet50-tiny"), _build("resnet50-tiny")
    other = module("network").INFERENCE["resnet50-tiny"].build()

    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    assert not first.training


def test_each_rung_differs_from_the_one_before_in_exactly_one_thing() -> None:
    chain = module("setups").rung_chain()
    setups = [dataclasses.asdict(setup) for setup in chain.values()]

    assert setups[0] == dataclasses.asdict(module("setups").Setup())
    for before, after in zip(setups, setups[1:]):
        assert len([key for key in before if before[key] != after[key]]) == 1
    assert list(chain) == [
        "fp32-strict", "tf32", "fp16", "channels-last", "cudnn-benchmark", "bn-fold", "graph",
        "compile", "int8", "fp8",
    ]  # fmt: skip


def test_the_ladder_that_is_drawn_is_the_chain_and_its_ends_are_rows_of_their_own() -> None:
    (ladder,) = [drawing.ladder for drawing in spec().drawings if drawing.ladder is not None]
    setups = module("setups")

    assert ladder.order == tuple(setups.rung_chain())[:-1]
    slow, fast = ladder.ends
    assert setups.RUNGS[slow] == setups.RUNGS[ladder.order[0]]
    assert setups.RUNGS[fast] == setups.RUNGS[ladder.order[-1]]
    assert set(spec().parameter("rung").choices) == {"none", *setups.RUNGS}


@pytest.mark.parametrize(
    ("mode", "precision", "form"),
    [
        ("fp32", "fp32", "plain"), ("O0", "fp32", "plain"), ("tf32", "tf32", "plain"),
        ("O1", "fp16", "autocast"), ("O2", "fp16", "fp32-norms"), ("O3", "fp16", "plain"),
        ("fp16", "fp16", "plain"), ("bf16", "bf16", "plain"),
    ],
)  # fmt: skip
def test_the_levels_are_their_native_equivalents(mode: str, precision: str, form: str) -> None:
    setup = module("setups").from_parameters(parameters(f"mode={mode}"))

    assert (setup.precision, setup.form) == (precision, form)
    assert set(module("setups").MODES) == set(spec().parameter("mode").choices)


def test_a_rung_is_taken_whole_and_refuses_what_contradicts_it() -> None:
    setups = module("setups")

    assert setups.from_parameters(parameters("mode=fp32", "rung=graph")) == setups.RUNGS["graph"]
    with pytest.raises(UsageError, match="decides what the row also sets: layout, fold"):
        setups.from_parameters(
            parameters("mode=fp32", "rung=graph", "layout=channels_last", "fold=true")
        )


def test_eight_bit_rows_say_that_they_fold_and_are_channels_last() -> None:
    setup = module("setups").from_parameters(parameters("mode=int8"))

    assert (setup.layout, setup.fold, setup.engine) == ("channels_last", True, "eager")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mode=tf32",), "tensor cores"),
        (("mode=fp32", "engine=graph"), "CUDA graph needs a CUDA device"),
        (("mode=fp32", "cudnn_benchmark=true"), "cuDNN"),
    ],
)
def test_what_a_cpu_cannot_run_is_refused_with_the_reason(words: Any, says: str) -> None:
    setups = module("setups")
    with pytest.raises(NotApplicableError) as caught:
        setups.require(setups.from_parameters(parameters(*words)), CPU)

    assert says in str(caught.value)


def test_reduced_precision_is_refused_exactly_where_torch_has_none() -> None:
    setups = module("setups")
    reduced = {"fp16": torch.float16, "bf16": torch.bfloat16}
    for name, dtype in reduced.items():
        setup = setups.Setup(precision=name)
        if dtype in torch_compat.autocast_dtypes(CPU):
            setups.require(setup, CPU)
        else:
            with pytest.raises(NotApplicableError, match=name):
                setups.require(setup, CPU)


def test_energy_is_asked_for_by_what_a_row_can_use() -> None:
    words = spec().parameter("energy").help
    assert all(name in words for name in ("auto", "nvml", "ina3221", "rapl"))
    assert "replay" not in words, "no recording fits a row whose length nobody knows beforehand"


# Evidence: what binds, what was computed.

MS = 1e-3


@pytest.mark.parametrize(
    ("latency", "enqueue", "busy", "by"),
    [
        (2.83, 2.81, 0.85, "launches"),  # batch 1, eager: the host queues all the time
        (35.7, 2.9, 35.5, "device"),  # batch 128: the host is done early
        (3.0, 2.95, 2.9, "device"),  # both busy
        (2.83, 2.81, None, "undecided"),
        (35.7, 2.9, None, "device"),
    ],
)
def test_what_binds_is_found_and_proved(latency: float, enqueue: float, busy: Any, by: str) -> None:
    hidden = None if busy is None else [busy * MS] * 3
    bound = module("evidence").bound_by([latency * MS] * 3, [enqueue * MS] * 3, hidden)

    assert bound.by == by
    assert f"{latency:.3g} ms" in bound.proof
    assert f"{enqueue:.3g} ms" in bound.proof
    assert busy is None or by == "device" or f"{busy:.3g} ms" in bound.proof


class _Said:
    """What a row's context is told."""

    def __init__(self) -> None:
        self.reasons: List[str] = []
        self.metrics: Dict[str, Any] = {}
        self.facts: Dict[str, Any] = {}

    def invalid(self, reason: str) -> None:
        self.reasons.append(reason)

    def metric(self, name: str, value: Any, *, unit: str, source: str) -> None:
        self.metrics[name] = value

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value


def test_an_output_is_held_against_the_strict_one() -> None:
    strict = torch.randn(4, 10).double()
    said = _Said()
    check_output(said, (strict * 1.001).float(), strict, "tf32")

    assert said.reasons == []
    assert said.metrics["relative_error"] == pytest.approx(1e-3, rel=1e-3)
    check_output(said, (strict * 1.001).float(), strict, "fp32")
    check_output(said, strict.flip(0).half(), strict, "fp16")
    assert ["off by" in reason for reason in said.reasons] == [True, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_is_invalid(bad: float) -> None:
    output = torch.randn(4, 10)
    output[3, 2] = bad
    said = _Said()
    # Beyond the images that are compared, too.
    check_output(said, output, torch.randn(2, 10).double(), "fp16")
    module("evidence").check_loss(said, torch.tensor(bad))

    assert said.reasons[0] == "1 of 40 outputs are not finite"
    assert said.reasons[1].startswith("the loss is not finite")


# Declarations.


def test_the_summary_is_the_originals_line_by_line() -> None:
    """The sample run of the original's README, from rows with its seconds."""
    published = {"O3": 9.62, "O2": 9.67, "O1": 9.66, "O0": 9.73, "fp32": 9.70}
    closing = spec().closing
    assert closing is not None

    lines = "\n".join(summary_lines(closing, [_row(m, s) for m, s in published.items()]))
    assert lines == (
        "Results summary (3000 images)\n"
        "===============\n"
        "AMP O3: 9.62 seconds  (1.01x full precision speed)\n"
        "AMP O2: 9.67 seconds  (1.00x full precision speed)\n"
        "AMP O1: 9.66 seconds  (1.00x full precision speed)\n"
        "AMP O0: 9.73 seconds  (1.00x full precision speed)\n"
        "Float32: 9.70 seconds  (1.00x full precision speed)"
    )


def _row(mode: str, seconds: float) -> Row:
    given = parameters(f"mode={mode}")
    metrics = (Metric("seconds", "s", "cuda-event", (seconds,)),)
    facts = {"timed": "3000 images"}
    return Row(0, 0, 0, given, Status.COMPLETE, Validity(True), facts, metrics)


def test_profiles_are_as_promised() -> None:
    paper = job(profile="paper")
    modes = [row.parameters["mode"] for row in paper.rows if row.repeat == 0]
    assert modes == ["O3", "O3", "O2", "O2", "O1", "O1", "O0", "O0", "fp32", "fp32"]
    assert len(paper.rows) == 100
    first = paper.rows[0].parameters
    assert (first["batch"], first["images"], first["workload"]) == (100, 3000, "resnet50")
    assert len(job(profile="short").rows) == 60
    assert [row.parameters["workload"] for row in job().rows] == ["resnet50-tiny"] * 2


def test_the_benches_are_those_published() -> None:
    network = module("network")
    benches = {n: (b.features_in, b.features_out, b.iterations, b.rate)
               for n, b in network.TRAINING.items() if "tiny" not in n}  # fmt: skip

    assert benches == {
        "linear-8192": (8192, 2048, 100, 1e-3),
        "linear-16384": (16384, 4096, 500, 1e-3),
    }
    assert set(spec().parameter("workload").choices) == {*network.INFERENCE, *network.TRAINING}
    modes = spec().parameter("compile_mode").choices
    assert modes == module("engines").COMPILE_MODES


def test_claims_follow_the_schema_and_hold_the_published_figures() -> None:
    claims = {c.id: c for c in load_claims(EXPERIMENTS / NAME / "claims.toml", spec())}

    figures = {name: c.expected["jetson"].figure for name, c in claims.items()
               if "jetson" in c.expected}  # fmt: skip
    assert figures == {
        "resnet50-float32-seconds": 9.70, "resnet50-o3-seconds": 9.72, "batch-one-fp16": 1.82,
        "nvidia-1941": 1941, "linear-8192-o0": 0.99, "linear-8192-o1": 1.68, "linear-8192-o2": 1.88,
        "linear-8192-o3": 4.69, "resnet50-o2-seconds": 9.67, "resnet50-o1-seconds": 9.65,
        "resnet50-o0-seconds": 9.72,
    }  # fmt: skip
    assert [claims[f"linear-16384-{level}"].expected["desktop"].figure
            for level in ("o1", "o2", "o3")] == [3.09, 3.56, 4.63]  # fmt: skip
    null = [c for name, c in claims.items() if name.startswith("contaminated-")]
    assert [c.expected["any"].tolerance for c in null] == [0.03] * 4
    assert claims["clean-best-row"].expected["any"].minimum == 8.0
    assert claims["int8-images-per-second"].expected["any"].minimum == 30000
    assert claims["int8-images-per-second"].device == "NVIDIA H200"
    assert "TensorRT" in claims["nvidia-1941"].not_comparable
    assert [name for name, c in claims.items() if c.not_comparable] == ["nvidia-1941"]


def test_every_metric_of_claims_drawings_and_headline_is_one_that_rows_record() -> None:
    recorded = {"seconds", "latency", "images_per_second"}
    named: List[Tuple[str, ...]] = [spec().headline]
    named += [drawing.metrics for drawing in spec().drawings]
    named += [(d.ladder.metric,) for d in spec().drawings if d.ladder is not None]
    claims = load_claims(EXPERIMENTS / NAME / "claims.toml", spec())
    named += [tuple(each.metric for each in claim.selections) for claim in claims]

    assert {name for names in named for name in names} <= recorded
