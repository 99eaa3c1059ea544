"""`engines`: rows of tiny networks, what they record, and what makes them invalid or skipped."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from one_row import EXPERIMENTS, Rows
from torch import nn

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import SkippedError, UnknownNameError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, read_events
from narrowgauge_contract.outcome import Fold, Metric, Row, Status, Validity
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab.engines import ENGINES
from narrowgauge_lab.networks import NETWORKS, NOTES, network
from narrowgauge_lab.networks.trained import TRAINED

NAME = "engines"
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = ("model=resnet50-tiny", "batch=2", "limit_s=0.05", "cache=none", "engine=eager")
_ROWS = Rows(NAME, QUICK)
module, spec, job, run_row = _ROWS.module, _ROWS.spec, _ROWS.job, _ROWS.run


# Rows.


def test_a_row_records_what_it_promises(tmp_path: Path) -> None:
    row = run_row(tmp_path)

    assert row.validity.valid, row.validity.reasons
    metrics = {metric.name: metric for metric in row.metrics}
    assert set(metrics) == {
        "build_seconds", "relative_error", "max_error", "latency", "images_per_second",
        "macs_per_second", "engine_memory",
    }, "top1 and top5 are not among them: the weights are random"  # fmt: skip
    assert metrics["latency"].conditions["calls_per_sample"] == 1
    assert metrics["relative_error"].values[0] < 1e-5
    assert metrics["relative_error"].source == "fp64"
    facts = row.facts
    assert facts["weights"].startswith("random, seed 0")
    assert facts["input_shape"] == "2x3x32x32"
    assert facts["precision_ran"] == "fp32"
    assert facts["engine_cache"] == {"from_cache": False, "key": "", "note": ""}
    assert sum(group["layers"] for group in facts["providers"]) == len(facts["layers"]) == 18
    assert facts["layers_left_out"] == 0
    assert 0 < facts["roofline_share"] < 1
    assert {"state_before", "windows_discarded", "ceiling", "options"} <= set(facts)


def test_weights_are_the_runs_and_images_the_repeats() -> None:
    """An engine that was kept for the first repeat can only serve the second with its weights."""
    rows = job(*QUICK, profile="short").rows
    found: List[Tuple[int, torch.Tensor, torch.Tensor]] = []
    make_subject = module("run").make_subject
    for plan in (rows[0], next(row for row in rows if row.repeat == 1)):
        subject = make_subject("resnet50-tiny", "random", 2, run_seed=plan.seed - plan.repeat,
                               images_seed=plan.seed, files=dict)  # fmt: skip
        found.append((plan.repeat, subject.model.conv1.weight, subject.images))

    (_, weights, images), (_, weights_again, others) = found
    assert torch.equal(weights, weights_again)
    assert not torch.equal(images, others)


def test_an_engine_is_kept_and_comes_from_the_cache_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("engine=narrowgauge", "cache=kept", "options=narrowgauge.tune_s=0")

    first, second = (run_row(tmp_path / name, *words) for name in ("first", "second"))

    assert first.metric("build_seconds") is not None
    assert first.facts["engine_cache"]["from_cache"] is False
    assert first.facts["options"]["tune_s"] == 0.0
    assert second.metric("build_seconds") is None
    assert second.metric("load_seconds") is not None
    assert second.facts["engine_cache"]["from_cache"] is True
    assert list((tmp_path / "cache" / "narrowgauge" / "engines").glob("*.engine"))


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        (("engine=tensorrt",), "this host has no tensorrt", ""),
        (("engine=cuda-graph",), "this host has no cuda-graph", ""),
        (("engine=eager", "precision=fp8"), "eager runs no fp8 on this cpu", "fp8"),
        (("engine=eager", "precision=tf32"), "eager runs no tf32 on this cpu", "TF32"),
    ],
)
def test_what_this_host_lacks_is_skipped_with_the_reason(
    words: Tuple[str, ...], what: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(SkippedError) as caught:
        run_row(tmp_path, *words)

    assert caught.value.what == what
    assert why in caught.value.why != ""
    (row,) = Fold().add_all(read_events(tmp_path / EVENTS_FILE)).rows()
    assert row.facts["input_shape"] == "2x3x32x32", "the table shows it all the same"


def test_an_output_that_overflows_is_counted_and_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What once printed an error of 0.00E+00: infinity minus infinity."""
    run = module("run")
    prepared = run.build

    def spoilt(*given: Any) -> Any:
        runner = prepared(*given)
        call = runner.run

        def overflowing(x: torch.Tensor) -> torch.Tensor:
            output = call(x).clone()
            output[1, 3] = math.nan
            output[0, 2] = math.inf
            return output

        runner.run = overflowing
        return runner

    monkeypatch.setattr(run, "build", spoilt)
    row = run_row(tmp_path)

    assert row.validity.reasons[0] == "2 of 20 outputs are not finite"
    assert row.facts["outputs_not_finite"] == 2
    assert row.metric("max_error") is None


def test_a_precision_without_a_ceiling_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As int8 by TensorRT with a torch that has no such product on a GPU."""
    from narrowgauge_contract.errors import NotApplicableError
    from narrowgauge_lab.measure import recording

    def none(*_: Any) -> Any:
        raise NotApplicableError("no product", why="not in this torch")

    monkeypatch.setattr(recording, "ceiling_of_precision", none)
    row = run_row(tmp_path)

    assert row.validity.valid, row.validity.reasons
    assert row.facts["ceiling_missing"] == "no product: not in this torch"
    assert "roofline_share" not in row.facts


def test_a_network_without_trained_weights_has_no_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_pictures(tmp_path / "data", monkeypatch)
    row = run_row(tmp_path / "out", "weights=trained", data=tmp_path / "data")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["weights"].startswith("random")
    assert row.facts["pictures"].startswith("20 of ImageNet")
    assert row.metric("top1") is None
    assert row.metric("top5") is None


def test_trained_weights_have_an_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that answer 7 whatever they are shown, and three of twenty images of class 7."""
    from narrowgauge_lab.networks import subject, trained

    def load(model: nn.Module, name: str, files: Any) -> None:
        with torch.no_grad():
            model.fc.weight.zero_()
            model.fc.bias.copy_(torch.tensor([0.0, 0, 0, 3, 0, 2, 1, 4, 0, 0.5]))

    _write_pictures(tmp_path / "data", monkeypatch)
    entry = trained.Trained("imagenet-20", lambda files: {})
    monkeypatch.setitem(trained.TRAINED, "resnet50-tiny", entry)
    monkeypatch.setattr(subject, "load_trained", load)
    row = run_row(tmp_path / "out", "weights=trained", "batch=3", data=tmp_path / "data")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["weights"] == "trained: imagenet-20"
    top1, top5 = row.metric("top1"), row.metric("top5")
    assert top1 is not None
    assert top5 is not None
    # Classes 0 to 6, 7, 8 and 9 in turn, so 7 twice; 3, 5, 6, 7 and 9 are its first five.
    assert (top1.values, top5.values) == ((2 / 20,), (10 / 20,))


def _write_pictures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 images of 32×32 in the place of ImageNet's, of the classes 0 to 9 twice."""
    import dataclasses

    from narrowgauge_contract import datasets

    real = datasets.data_set("imagenet-20")
    shapes = {"test-images.u8": (20, 3, 32, 32), "test-labels.u8": (20, 2)}
    files = tuple(dataclasses.replace(flat, shape=shapes[flat.name]) for flat in real.files)
    declared = dataclasses.replace(real, files=files)
    monkeypatch.setitem(datasets.DATA_SETS, "imagenet-20", declared)
    folder = root / "imagenet-20"
    folder.mkdir(parents=True)
    pixels = torch.randint(0, 256, (20 * 3 * 32 * 32,), generator=torch.Generator().manual_seed(0))
    (folder / "test-images.u8").write_bytes(bytes(pixels.tolist()))
    (folder / "test-labels.u8").write_bytes(bytes(v for i in range(20) for v in (i % 10, 0)))


# Options, precisions, layers.


def test_options_are_those_of_one_engine_with_its_types() -> None:
    options_for = module("building").options_for
    text = "narrowgauge.tune_s=3; compile.cudnn_benchmark=false;compile.compile_mode=default"

    assert options_for("narrowgauge", text) == {"tune_s": 3.0}
    assert options_for("compile", text) == {"cudnn_benchmark": False, "compile_mode": "default"}
    assert options_for("eager", "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("narrowgauge.tune_s", "'narrowgauge.tune_s' is no option of an engine"),
        ("tune_s=3", "'tune_s=3' is no option of an engine"),
        ("narrowgauge.tune_s=long", "long is not of type float"),
        ("compile.fold=1", "'compile.fold=1': 1 is not of type bool"),
    ],
)
def test_options_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        module("building").options_for("eager", text)


@pytest.mark.parametrize(
    ("text", "near"), [("narrowgauge.tunes=3", "tune_s"), ("narowgauge.tune_s=3", "narrowgauge")]
)
def test_the_nearest_engine_and_option_are_named(tmp_path: Path, text: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        module("building").options_for("eager", text)
    assert caught.value.nearest == near
    # Whatever else the row would find: a slip is none of the host's.
    with pytest.raises(UnknownNameError):
        run_row(tmp_path, "engine=tensorrt", f"options={text}")


def test_compilers_begin_with_nothing_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = module("building")
    seen: Dict[str, Optional[str]] = {}
    prepare = building.prepare

    def watched(*given: Any) -> Any:
        seen.update({name: os.environ.get(name) for name in building._COMPILERS})
        return prepare(*given)

    monkeypatch.setattr(building, "prepare", watched)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    run_row(tmp_path)

    assert all(folder and "narrowgauge-compilers-" in folder for folder in seen.values())
    assert os.environ["TRITON_CACHE_DIR"] == "/kept"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_row_says_what_its_engine_tells_of_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = module("building")
    prepare = building.prepare

    def telling(*given: Any) -> Any:
        runner = prepare(*given)
        monkeypatch.setattr(runner, "phases", lambda: {"lower": 0.12345, "search": 2.0})
        monkeypatch.setattr(runner, "searched", lambda: {"problems": 3, "left_out": 7})
        return runner

    assert not {"build_phases", "searched"} & set(run_row(tmp_path / "silent").facts)
    monkeypatch.setattr(building, "prepare", telling)
    facts = run_row(tmp_path / "telling").facts
    assert facts["build_phases"] == {"lower": 0.123, "search": 2.0}
    assert facts["searched"] == {"problems": 3, "left_out": 7}


# Declarations.


def test_parameters_are_the_labs() -> None:
    parameters = spec().parameters
    assert parameters["engine"].choices == ENGINES
    assert set(parameters["model"].choices) == set(NETWORKS)
    assert spec().closing is not None
    assert spec().closing.order == ENGINES


def test_engines_of_a_network_follow_one_another_and_repeats_are_outermost() -> None:
    rows = job(profile="paper").rows
    first = [row for row in rows if row.repeat == 0]

    assert [row.repeat for row in rows] == sorted(row.repeat for row in rows)
    assert tuple(row.parameters["engine"] for row in first[: len(ENGINES)]) == ENGINES
    assert len({(r.parameters["model"], r.parameters["precision"]) for r in first[:11]}) == 1
    assert list(dict.fromkeys(row.parameters["model"] for row in first)) == list(NOTES)
    assert {row.parameters["precision"] for row in first} == {"fp32", "fp16", "int8"}
    assert all(network(row.parameters["model"]).size == 32 for row in job().rows)


def test_data_are_asked_for_with_trained_weights_alone() -> None:
    assert job().data_sets == ()
    assert job("weights=trained").data_sets == ("imagenet-20",)
    for model in spec().parameters["model"].choices:
        own = (TRAINED[model].set_name,) if model in TRAINED else ()
        assert job("weights=trained", f"model={model}").data_sets == ("imagenet-20", *own)
        assert job(f"model={model}").data_sets == ()
    assert job("weights=trained", "model=mobilenet_v2,resnet50-v1").data_sets == (
        "imagenet-20", "mobilenet_v2-imagenet", "resnet50-v1-imagenet",
    )  # fmt: skip


def _row(engine: str, error: float, rate: float, latency: float) -> Row:
    chosen = job("model=resnet18", "precision=fp16", f"engine={engine}", "batch=1").rows[0]
    metrics = (
        Metric("latency", "s", "cuda-event", (latency,)),
        Metric("images_per_second", "image/s", "cuda-event", (rate,)),
        Metric("max_error", "1", "fp64", (error,)),
    )
    facts = {"input_shape": "1x3x224x224"}
    return Row(0, 0, 0, dict(chosen.parameters), Status.COMPLETE, Validity(True), facts, metrics)


def test_the_last_lines_are_the_notes_columns() -> None:
    closing = spec().closing
    assert closing is not None
    # The notes' own row of ResNet-18 in fp16.
    rows = [_row("eager", 1e-3, 250, 4.01e-3), _row("tensorrt", 7.81e-3, 2370, 0.489e-3)]

    heading, row = summary_lines(closing, rows)
    assert heading.splitlines()[0].startswith("| Model | Data Type | Input Shapes | Engine | Max ")
    assert row == (
        "| resnet18 | fp16 | 1x3x224x224 | tensorrt | 7.81E-03 | 250 | 2.37e+03 | 4.01 | 0.489 |"
        " 8.20 |"
    )


def test_claims_hold_the_published_tables_and_say_what_their_errors_are() -> None:
    claims = {claim.id: claim for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec())}
    for table in ("desktop-fp16", "desktop-int8", "agx-fp16", "agx-int8", "desktop-fp16-error",
                  "desktop-int8-error", "ours-over-eager", "ours-on-a-cpu"):  # fmt: skip
        names = {f"{table}-{name.replace('_', '-')}" for name in NOTES}
        assert names <= set(claims)

    assert claims["desktop-fp16-resnet50"].expected["desktop"].figure == 11.3
    assert claims["agx-fp16-mobilenet-v2"].expected["jetson"].figure == 12.0
    assert "3.56 ms" in claims["agx-fp16-resnet50"].text
    for name in ("resnet101", "resnet152"):
        overflow = claims[f"desktop-fp16-error-{name}"]
        assert overflow.expected["desktop"].figure == 0.0
        assert overflow.not_comparable.startswith("an overflow, not an exact result")
    assert "underflow" in claims["desktop-fp16-error-mobilenet-v2"].not_comparable
    assert all(claims[f"desktop-int8-error-{n.replace('_', '-')}"].not_comparable for n in NOTES)
    assert claims["ours-resnet50-latency"].expected["any"].maximum == 4.0e-4
    assert claims["ours-resnet50-throughput"].expected["any"].minimum == 30000
    assert claims["ours-prepared-cold"].expected["any"].maximum == 60.0
    assert claims["ours-prepared-from-the-cache"].expected["any"].maximum == 1.0
    ours = [claim for name, claim in claims.items() if name.startswith("ours-")]
    for claim in ours:
        here = "AMD EPYC" if claim.id.startswith("ours-on-a-cpu") else "NVIDIA H200"
        assert claim.device == here
    assert claims["agx-fp16-mobilenet-v2"].device == "Jetson AGX Xavier"
    recorded = {"latency", "images_per_second", "max_error", "build_seconds", "load_seconds"}
    assert {each.metric for claim in claims.values() for each in claim.selections} <= recorded
    assert set(spec().headline) <= recorded | {"top1"}, "top1: with trained weights"
