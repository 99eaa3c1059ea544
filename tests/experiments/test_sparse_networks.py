"""The experiments `sparsity-census`, `sparse-network` and `sparse-energy`, on small networks."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import SkippedError, UnknownNameError, UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab import sparse_networks
from narrowgauge_lab.measure.agreement import reference_output
from narrowgauge_lab.networks import build, scale_activations
from narrowgauge_lab.networks.registry import NETWORKS
from narrowgauge_lab.networks.trained import TRAINED
from narrowgauge_lab.sparse_networks import WAYS, make_ready

TINY = ("model=resnet50-tiny", "weights=random", "images=noise")
CENSUS = Rows("sparsity-census", (*TINY, "limit=2"))
NETWORK = Rows("sparse-network", (*TINY, "limit_s=0.02", "calibrate_s=0.005", "threads=1"))
ENERGY = Rows("sparse-energy", (*TINY, "energy=none", "calibrate_s=0.005", "threads=1"))
needs_kernels = pytest.mark.skipif(not has_kernels("cpu"), reason="the kernels are not built")


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[0]


# The census.


def _filters_and_strides() -> List[Tuple[int, int]]:
    """Of the tiny ResNet's 3×3 convolutions."""
    model: Any = build("resnet50-tiny")
    stages = (getattr(model, f"layer{stage}") for stage in range(1, 5))
    second = [stage[0].conv2 for stage in stages]
    return [(conv.out_channels, conv.stride[0]) for conv in second]


def test_a_census_counts_every_3x3_layer(tmp_path: Path) -> None:
    row = CENSUS.run(tmp_path)

    assert row.validity.valid
    names = [layer["layer"] for layer in row.facts["layers"]]
    assert names == [f"layer{stage}.0.conv2" for stage in range(1, 5)]
    assert row.facts["counted"] == 4
    assert row.facts["preprocessing"] == "none: noise as it is"
    layers = row.facts["layers"]
    sizes = [each["channels"] * each["height"] * each["width"] for each in layers]
    for metric in ("zero_fraction", "group_zero_fraction"):
        wanted = sum(n * each[metric] for n, each in zip(sizes, layers)) / sum(sizes)
        assert _value(row, metric) == pytest.approx(wanted, abs=1e-5)
        one_by_one = row.metric(f"layer_{metric}")
        assert one_by_one is not None
        assert one_by_one.values == pytest.approx([each[metric] for each in layers], abs=1e-5)
        assert "random weights" in one_by_one.source
    # Of 3×3 convolutions of stride 1: elements × filters × 9, those of stride 2 a quarter.
    work = [n * (f / s**2) for n, (f, s) in zip(sizes, _filters_and_strides())]
    for metric, field in (
        ("mac_zero_fraction", "zero_fraction"), ("mac_group_zero_fraction", "group_zero_fraction")
    ):  # fmt: skip
        wanted = sum(n * each[field] for n, each in zip(work, layers)) / sum(work)
        assert _value(row, metric) == pytest.approx(wanted, abs=1e-5)
    stage = [each for each in layers if each["height"] == layers[0]["height"]]
    ones = [each["channels"] for each in stage]
    wanted = sum(n * each["zero_fraction"] for n, each in zip(ones, stage)) / sum(ones)
    side = layers[0]["height"]
    assert _value(row, f"zero_fraction.{side}x{side}") == pytest.approx(wanted, abs=1e-5)
    assert 0.2 < _value(row, "zero_fraction") < 0.8
    assert _value(row, "group_zero_fraction") <= _value(row, "zero_fraction")
    text = (tmp_path / "row-0" / "layers.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    assert [line["layer"] for line in lines] == names
    assert float(lines[0]["zero_fraction"]) == layers[0]["zero_fraction"]


def test_a_census_of_other_windows_and_of_none(tmp_path: Path) -> None:
    every = CENSUS.run(tmp_path / "all", "kernel=all")
    ones = CENSUS.run(tmp_path / "ones", "kernel=1x1")

    assert ones.facts["counted"] + 4 == every.facts["counted"]
    assert all(each["layer"] != "conv1" for each in every.facts["layers"])
    with pytest.raises(UsageError, match="no 1x1 convolution"):
        CENSUS.run(tmp_path / "vgg", "model=vgg-tiny", "kernel=1x1")


def test_a_census_does_not_depend_on_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = CENSUS.run(tmp_path / "a", "limit=3")
    monkeypatch.setattr(CENSUS.module("run"), "_TOGETHER", 1)
    alone = CENSUS.run(tmp_path / "b", "limit=3")

    for one, other in zip(together.facts["layers"], alone.facts["layers"]):
        assert one["zero_fraction"] == pytest.approx(other["zero_fraction"], abs=1e-4)


def test_weights_that_are_not_obtainable_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no trained weights of densenet-tiny"):
        CENSUS.run(tmp_path, "model=densenet-tiny", "weights=trained")


# Whole networks.


@pytest.fixture(autouse=True)
def _calibrated_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_networks, "levels_for", lambda device: (0.0, 0.9))
    monkeypatch.setattr(sparse_networks, "_PAIRS", 1)


@needs_kernels
@pytest.mark.parametrize(
    ("model", "calibrate_s"),
    [("resnet50-tiny", 0.0), ("densenet-tiny", 0.0), ("vgg-tiny", 0.0), ("vgg-tiny", 0.002)],
)
def test_a_sparse_network_computes_what_dense_does(model: str, calibrate_s: float) -> None:
    network, images = build(model), torch.randn(2, 3, 32, 32)
    scale_activations(network, images)
    ready = make_ready("sparse", network, images, "fp32", calibrate_s)

    wanted = reference_output(network, images, CPU)
    difference = float((ready.runner(images).double() - wanted).norm() / wanted.norm())

    assert difference < 1e-5
    assert ready.layers
    assert all(layer["chosen"] in ("sparse", "dense") for layer in ready.layers)
    assert all(0 <= layer["zeros"] <= 1 for layer in ready.layers)
    if calibrate_s == 0.0:
        assert ready.sparse_layers == len(ready.layers)
    convolutions = sum(isinstance(each, torch.nn.Conv2d) for each in network.modules())
    assert len(ready.layers) + len(ready.left_alone) == convolutions
    assert not any(type(each).__name__ == "SparseConv2d" for each in network.modules())
    ready.runner.close()


def test_dense_ways_agree_and_an_unknown_one_is_named() -> None:
    network, images = build("resnet50-tiny"), torch.randn(1, 3, 32, 32)
    scale_activations(network, images)
    wanted = reference_output(network, images, CPU)

    for way in ("eager", "dense"):
        ready = make_ready(way, network, images, "fp32", 0.0)
        assert float((ready.runner(images).double() - wanted).norm() / wanted.norm()) < 1e-5
        assert (ready.layers, ready.sparse_layers) == ((), 0)
    with pytest.raises(UnknownNameError, match="did you mean 'sparse'"):
        make_ready("spars", network, images, "fp32", 0.0)


@pytest.mark.parametrize("way", ["eager", "dense"])
def test_what_others_do_on_the_gpu_chooses_no_algorithm(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries try algorithms out while a network is prepared."""
    seen = []

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        seen.append("alone")
        yield
        seen.append("with others")

    class Noted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append("runs")
            return x

    monkeypatch.setattr(sparse_networks.turns, "alone", alone)
    ready = make_ready(way, Noted().eval(), torch.randn(1, 3, 8, 8), "fp32", 0.0)
    ready.runner.close()

    assert (seen[0], seen[-1], seen.count("alone")) == ("alone", "with others", 1)


def test_a_host_without_kernels_skips_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense in the place of sparse would be measured as such."""
    monkeypatch.setattr(
        sparse_networks, "choices", lambda *_: [{"chosen": "dense", "why": "no kernels here"}]
    )
    with pytest.raises(SkippedError, match="no convolution that skips zeros") as caught:
        make_ready("sparse", build("resnet50-tiny"), torch.randn(1, 3, 32, 32), "fp32", 0.1)
    assert caught.value.why == "no kernels here"


@needs_kernels
@pytest.mark.parametrize("engine", ["eager", "sparse"])
def test_a_row_of_a_network(tmp_path: Path, engine: str) -> None:
    row = NETWORK.run(tmp_path, f"engine={engine}", "batch=3")

    assert row.validity.valid
    assert row.facts["images"] == 4
    assert (row.facts["sparse_layers"] > 0) <= (engine == "sparse")
    assert _value(row, "agreement") == 1.0
    assert _value(row, "relative_error") < 1e-5
    assert _value(row, "largest_difference") < 1e-5
    for name in ("latency", "images_per_second"):
        assert _value(row, name) > 0
    assert row.metric("top1") is None, "random weights are right about nothing"
    if engine == "sparse":
        assert {layer["chosen"] for layer in row.facts["layers"]} <= {"sparse", "dense"}
        assert row.facts["left_alone"]["conv1"]


@needs_kernels
def test_a_picture_that_differs_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last picture alone, which is not among those computed in float64 where there are more."""
    run = NETWORK.module("run")
    right = run.make_ready

    class Wrong:
        def __init__(self, runner: Any) -> None:
            self.runner, self.calls = runner, 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.runner(x) * (1.01 if self.calls == 4 else 1.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.runner, name)

    def make(way: str, *rest: Any) -> Any:
        made = right(way, *rest)
        if way == "dense":
            return sparse_networks.Ready(Wrong(made.runner))  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(run, "make_ready", make)
    row = NETWORK.run(tmp_path, "engine=dense")

    assert not row.validity.valid
    assert any(reason.startswith("pictures [3] differ") for reason in row.validity.reasons)


def test_pictures_come_in_turn_and_all_are_seen_once() -> None:
    pictures = NETWORK.module("run").Pictures(torch.arange(5.0).reshape(5, 1), 2)

    seen = [pictures.next().flatten().tolist() for _ in range(4)]
    assert seen == [[2, 3], [4, 0], [0, 1], [2, 3]]
    assert pictures.through(lambda x: 2 * x).flatten().tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(UsageError, match="no picture"):
        NETWORK.module("run").Pictures(torch.zeros(0, 1), 2)


# Energy.


def _draw(row: Tuple[str, ...], tmp_path: Path) -> Row:
    return ENERGY.run(tmp_path, *row)


def test_without_energy_the_outputs_are_checked_all_the_same(tmp_path: Path) -> None:
    row = _draw(("engine=dense",), tmp_path)

    assert row.validity.valid
    assert _value(row, "relative_error") < 1e-5
    assert row.facts["energy_source"] == "none"
    assert row.metric("energy_gross") is None


def test_a_host_that_cannot_say_what_it_draws_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _draw(("engine=dense", "energy=nvml"), tmp_path)

    assert not row.validity.valid
    assert "energy was asked for" in row.validity.reasons[0]


def test_windows_go_through_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a meter that calls seven times and says what a picture drew."""
    run = ENERGY.module("run")
    seen = []

    def measure(ctx: Any, call: Any, _device: Any, source: str, plan: Any) -> Optional[Any]:
        for _ in range(7):
            call()
        ctx.metric("energy_gross", [0.5], unit="J", source=source)
        assert (plan.seconds, plan.windows) == (12.0, 2)

        class Window:
            calls, seconds = 7, 3.5

        return type("Result", (), {"windows": (Window, Window)})

    right = run.make_ready

    def make(*arguments: Any) -> Any:
        made = right(*arguments)
        runner = made.runner

        class Seen:
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(float(x.flatten()[0]))
                return runner(x)

            def __getattr__(self, name: str) -> Any:
                return getattr(runner, name)

        return sparse_networks.Ready(Seen())  # type: ignore[arg-type]

    monkeypatch.setattr(run, "measure_energy", measure)
    monkeypatch.setattr(run, "make_ready", make)
    row = _draw(("engine=dense", "energy=rapl", "window_s=12", "windows=2"), tmp_path)

    called = seen[-7:]
    assert len(set(called)) == 4
    assert called[:3] == called[4:]
    metric = row.metric("images_per_second")
    assert metric is not None
    assert metric.values == (2.0, 2.0)


# The declarations.


@pytest.mark.parametrize("rows", [CENSUS, NETWORK, ENERGY], ids=lambda rows: rows.name)
def test_declarations_name_what_there_is(rows: Rows) -> None:
    spec = rows.spec()
    models = spec.parameters["model"].choices
    assert set(models) <= set(NETWORKS)
    assert set(TRAINED) <= set(models)
    if rows is not CENSUS:
        assert spec.parameters["engine"].choices == WAYS
    for claim in load_claims(EXPERIMENTS / rows.name / "claims.toml", spec):
        values: Dict[str, Any] = spec.profiles[claim.profile].values
        for selection in claim.selections:
            for name, value in selection.where.items():
                declared = values.get(name, (spec.parameters[name].default,))
                beyond = claim.id.startswith("cusnn-") and name in ("weights", "images")
                assert (value in declared) is not beyond, (claim.id, name)


@pytest.mark.parametrize("rows", [CENSUS, NETWORK, ENERGY], ids=lambda rows: rows.name)
def test_published_claims_are_not_of_random_weights(rows: Rows) -> None:
    """They come out SKIPPED where weights cannot be had."""
    for claim in load_claims(EXPERIMENTS / rows.name / "claims.toml", rows.spec()):
        for selection in claim.selections:
            if claim.id.startswith("cusnn-"):
                assert selection.where["weights"] == "trained", claim.id
                assert selection.where["model"] not in TRAINED


@pytest.mark.parametrize("rows", [NETWORK, ENERGY], ids=lambda rows: rows.name)
def test_trained_weights_are_had_or_the_row_is_skipped(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no trained weights of densenet169 are obtainable"):
        rows.run(tmp_path, "model=densenet169", "weights=trained", "engine=dense")
    assert rows.job("model=resnet50-v1", "weights=trained", "images=noise").data_sets == (
        "resnet50-v1-imagenet",
    )
    assert rows.parameters("input=imagenet-20")["images"] == "imagenet-20"


@pytest.mark.parametrize("rows", [CENSUS, NETWORK, ENERGY], ids=lambda rows: rows.name)
def test_only_what_is_read_is_fetched(rows: Rows) -> None:
    def sets(*words: str) -> Tuple[str, ...]:
        return tuple(sorted(rows.job(*words, profile="short").data_sets))

    weights = "trained" if rows is CENSUS else "obtainable"
    assert sets("model=resnet50-v1", f"weights={weights}", "images=imagenet-20") == (
        "imagenet-20", "resnet50-v1-imagenet",
    )  # fmt: skip
    assert sets("model=densenet169", f"weights={weights}", "images=noise") == ()
