"""`quantisation`: rows of each method, the same start for all, and what is refused beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import ClaimKind, load_claims
from narrowgauge_contract.errors import BadValueError, SkippedError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant import executors, ort
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.torch_compat import torch_version
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

NAME = "quantisation"
#: No figure of these tests is a measurement.
QUICK = (
    "data=synthetic", "width=0.25", "train_limit=40", "validation=40", "test_limit=30",
    "calibration=20", "batch_size=20", "epochs=1", "qat_epochs=1", "limit_s=0.01", "pairs=1",
)  # fmt: skip
_ROWS = Rows(NAME, QUICK)


def _last(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[-1]


def _facts(row: Row) -> Dict[str, Any]:
    assert row.validity.valid, row.validity.reasons
    return dict(row.facts)


def test_a_row_by_tensorrt_is_timed_beside_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the row asks of the executor; the executor itself is held by tests/lab."""
    asked: List[Tuple[str, int, int]] = []

    def engine(
        model: torch.nn.Module,
        images: torch.Tensor,
        device: torch.device,
        most: int,
        precision: str,
    ) -> executors.Executed:
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        asked.append((precision, len(images), most))
        shift = 100.0 if precision == "int8" else 0.0
        turned = torch.arange(10.0) * shift  # int8 says 9 of every image
        return executors.Executed(lambda x: model(x) + turned, f"TensorRT, {precision}")

    monkeypatch.setattr(executors, "require_executor", lambda *_: None)
    monkeypatch.setattr(executors, "by_tensorrt", engine)
    words = ("method=static", "executor=tensorrt", "test_batch_size=600")
    row = _ROWS.run(tmp_path, *words)

    facts = _facts(row)
    assert asked == [("int8", 20, 600), ("fp32", 20, 600)]
    assert facts["ran_by"] == "TensorRT, int8"
    assert facts["widths"] == {"0": [8, 8], "4": [8, 8]}
    assert _last(row, "latency_gain") > 0
    answers = read_logits(tmp_path / "row-0" / LOGITS_FILE).test.logits[0]
    assert (answers.argmax(1) == 9).all()


def test_a_row_records_what_it_promises(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "method=static", "executor=torch")

    facts = _facts(row)
    recorded = {metric.name for metric in row.metrics}
    spec = _ROWS.spec()
    assert set(spec.headline) <= recorded
    files = {Path(side_file.path).name for side_file in row.side_files}
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
        assert not drawing.side_file or drawing.side_file in files
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        assert {each.metric for each in claim.selections} <= recorded, claim.id
    # 3 channels: conv 3@3×3 on 26×26, linear 3·13·13 → 10.
    macs = 3 * 9 * 26 * 26 + 3 * 13 * 13 * 10
    assert _last(row, "macs") == _last(row, "exit0_macs") == macs
    assert _last(row, "parameters") == 3 * 9 + 3 + 507 * 10 + 10
    activations = exact_activation_bits()
    assert _last(row, "bit_operations") == macs * 8 * activations
    assert facts["widths"] == {"0": [8, activations], "4": [8, activations]}
    assert _last(row, "float_bytes") == 4 * _last(row, "parameters")
    assert _last(row, "stored_bytes") < 0.3 * _last(row, "float_bytes")
    gain = _last(row, "float_latency") / _last(row, "latency")
    assert _last(row, "latency_gain") == pytest.approx(gain)
    lost = _last(row, "float_accuracy") - _last(row, "accuracy")
    assert _last(row, "accuracy_lost") == pytest.approx(lost)
    assert _last(row, "accuracy") == _last(row, "exit0_accuracy")
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert (run.family, run.exits, run.base_macs) == ("quantisation", 1, macs)
    assert "static, 8 bits, torch" in run.variant
    assert "twin of width 0.25" in run.variant
    assert run.latency is not None


def test_all_rows_of_a_run_start_from_the_same_weights(tmp_path: Path) -> None:
    rows = {}
    for method in ("static", "qat", "greedy", "dynamic", "fp32"):
        (tmp_path / "events.jsonl").unlink() if rows else None
        rows[method] = _ROWS.run(tmp_path, f"method={method}", "bits=4", "executor=fake")
    facts = {method: _facts(row) for method, row in rows.items()}
    assert len({each["weights_sha256"] for each in facts.values()}) == 1
    assert facts["static"]["weights_from"] == "trained in this row"
    assert facts["qat"]["weights_from"] == "an earlier row of this run"
    assert len({_last(row, "float_accuracy") for row in rows.values()}) == 1
    # Simulated arithmetic is not timed.
    assert all(row.metric("latency") is None for row in rows.values())
    # Counted before anything is converted: the same for all.
    assert len({_last(row, "macs") for row in rows.values()}) == 1
    assert len({_last(row, "parameters") for row in rows.values()}) == 1
    full = _last(rows["fp32"], "bit_operations")
    assert _last(rows["fp32"], "agreement") == 100
    assert _last(rows["fp32"], "accuracy_lost") == 0
    assert _last(rows["static"], "bit_operations") == full / 64
    assert _last(rows["greedy"], "bit_operations") <= facts["greedy"]["budget_bit_operations"]
    assert facts["greedy"]["budget_bit_operations"] == full / 64
    assert set(facts["greedy"]["allocation"]) == {"0", "4"}
    assert len(facts["greedy"]["sensitivity"]) == 2 * 4
    # Of the convolution nothing is rounded.
    assert facts["dynamic"]["widths"] == {"4": [4, 4]}
    assert rows["qat"].metric("train_loss") is not None
    assert rows["static"].metric("train_loss") is None
    file = tmp_path / "weights-qkeras-mnist-0.25-SEED.pt"
    other = _ROWS.run(tmp_path / "other", "method=static", "executor=fake", f"weights={file}")
    assert _facts(other)["weights_from"] == "the file weights-qkeras-mnist-0.25-0.pt"
    assert _facts(other)["weights_sha256"] == facts["static"]["weights_sha256"]


def test_what_layers_lose_is_measured_once_for_all_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = _ROWS.module("methods")
    measured = []
    losses = methods.allocation.width_losses

    def counting(*given: Any) -> Any:
        measured.append(losses(*given))
        return measured[-1]

    monkeypatch.setattr(methods.allocation, "width_losses", counting)
    rows = []
    for bits in ("bits=4", "bits=6", "bits=4 observer=percentile"):
        (tmp_path / "events.jsonl").unlink() if rows else None
        rows.append(_ROWS.run(tmp_path, "method=greedy", "executor=fake", *bits.split()))

    assert len(measured) == 2
    tables = [_facts(row)["sensitivity"] for row in rows]
    wanted = {(name, bits): loss for name, row in measured[0].items() for bits, loss in row.items()}
    assert {(each["layer"], each["bits"]): each["loss"] for each in tables[1]} == wanted
    assert tables[0] == tables[1] != tables[2]


def test_every_exit_of_a_network_is_quantised(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "net=b-lenet", "method=static", "executor=torch")

    facts = _facts(row)
    assert len(facts["widths"]) == 7
    for number in range(2):
        assert row.metric(f"exit{number}_accuracy_lost") is not None
        assert row.metric(f"exit{number}_latency") is not None
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.exit_names == ("branch 1", "whole")
    assert _last(row, "exit0_macs") < _last(row, "exit1_macs") < _last(row, "macs")
    trained = _ROWS.run(
        tmp_path / "trained", "net=b-lenet", "method=greedy-qat", "bits=4", "executor=fake"
    )
    _facts(trained)
    assert trained.metric("exit0_train_loss") is not None


def test_linear_layers_run_dynamically_in_int8(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "method=dynamic", "executor=torch", "bits=8")
    assert _facts(row)["widths"] == {"4": [8, exact_activation_bits()]}
    assert row.metric("latency_gain") is not None


def test_a_ladder_has_a_rung_for_each_width(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "method=ladder", "bits=6", "executor=fake")
    _facts(row)
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.exit_names == ("2 bits", "4 bits", "6 bits")
    # Narrower integers are as many products; that they are cheaper is the bit operations' to say.
    assert len(set(run.direct_macs.tolist())) == 1
    assert not np.array_equal(run.test.logits[0], run.test.logits[1])


@pytest.mark.parametrize(
    ("net", "macs", "parameters"),
    # The two columns of the notes' table: two networks.
    [("resnet50", 1297829888, 23520842), ("resnet50-imagenet-form", 85458944, 25557032)],
)
def test_the_two_forms_of_resnet_50_are_told_apart(net: str, macs: int, parameters: int) -> None:
    from narrowgauge_lab.measure.cost import count

    model = _ROWS.module("nets").NETS[net].build(1.0)
    cost = count(model.eval(), torch.zeros(1, 3, 32, 32))
    assert (cost.macs, cost.parameters) == (macs, parameters)


def test_untrained_networks_have_costs_and_no_accuracy(tmp_path: Path) -> None:
    words = ("epochs=0", "executor=fake")
    row = _ROWS.run(tmp_path, *words)
    assert _facts(row)["weights_from"] == "random"
    assert row.metric("accuracy") is None
    assert _last(row, "agreement") > 0
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()
    with pytest.raises(BadValueError, match="nobody trained"):
        _ROWS.run(tmp_path / "ladder", *words, "method=ladder")


@pytest.mark.skipif(torch_version() < (2, 0), reason="onnx is for current images")
def test_onnx_runtime_leaves_a_file(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "executor=onnxruntime")
    assert "QLinearConv" in _facts(row)["ran_by"]
    assert _last(row, "file_bytes") > _last(row, "stored_bytes")


@pytest.mark.skipif(torch_version() < (2, 0), reason="onnx and other threads are for current torch")
def test_onnx_runtime_is_timed_on_the_threads_that_the_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions keep the threads that they were made with: quantised and float alike."""
    asked = []
    real = ort.OrtModel.__init__

    def made(model: Any, path: Path, threads: Any = None) -> None:
        asked.append(threads)
        real(model, path, threads)

    monkeypatch.setattr(ort.OrtModel, "__init__", made)
    row = _ROWS.run(tmp_path, "executor=onnxruntime", "threads=2", "epochs=0")
    assert _facts(row)["latency_threads"] == 2
    assert asked == [2, 2]


@pytest.mark.skipif(torch_version() < (2, 0), reason="threads change with current torch")
def test_a_ladder_is_timed_on_the_threads_that_the_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        _ROWS.module("run"),
        "score_ladder",
        lambda *_, **named: seen.append((torch.get_num_threads(), named["passes"])),
    )
    row = _ROWS.run(tmp_path, "method=ladder", "bits=4", "executor=torch", "threads=2")
    assert seen == [(2, 30)]
    assert _facts(row)["latency_threads"] == 2


class TestBadInput:
    def _refused(self, tmp_path: Path, error: Any, match: str, *words: str) -> Any:
        with pytest.raises(error, match=match) as caught:
            _ROWS.run(tmp_path, *words)
        assert not list(tmp_path.glob("weights-*")), "it cost a training"
        return caught.value

    def test_a_width_that_no_executor_has(self, tmp_path: Path) -> None:
        self._refused(tmp_path, BadValueError, "no executor has 16 bits", "bits=16")

    @pytest.mark.parametrize("method", ["static", "qat", "greedy", "ladder"])
    def test_no_calibration_data(self, tmp_path: Path, method: str) -> None:
        words = (f"method={method}", "executor=fake")
        said = "there is no calibration data"
        self._refused(tmp_path, CalibrationError, said, *words, "calibration=0")
        said = "50 images to calibrate on"
        self._refused(tmp_path, BadValueError, said, *words, "calibration=50")

    def test_what_an_executor_does_not_do_is_skipped(self, tmp_path: Path) -> None:
        words = ("executor=tensorrt", "method=static")
        self._refused(tmp_path, SkippedError, "tensorrt does not run here", *words)
        words = ("executor=torch", "method=dynamic", "bits=4")
        self._refused(tmp_path, SkippedError, "nothing dynamic of 4 bits", *words)
        if torch_version() >= (2, 0):
            for more in (("method=dynamic",), ("net=b-lenet",), ("net=b-lenet", "method=fp32")):
                words = ("executor=onnxruntime", *more)
                self._refused(tmp_path, SkippedError, "onnxruntime runs n", *words)

    def test_images_that_a_network_does_not_take(self) -> None:
        make = _ROWS.module("nets").make
        with pytest.raises(BadValueError, match="resnet18 does not take the images of mnist"):
            make("resnet18", 1.0, (1, 28, 28), "mnist")
        with pytest.raises(BadValueError, match="width nan"):
            make("resnet18", float("nan"), (3, 32, 32), "cifar10")


def test_a_search_that_ends_where_it_began_is_not_claimed_as_a_gain() -> None:
    """Uniform widths are among what is searched: a bound at their accuracy could never fail."""
    claims = load_claims(EXPERIMENTS / NAME / "claims.toml", _ROWS.spec())
    found = [each for each in claims if each.id.endswith("greedy-beats-uniform")]
    assert len(found) == 2
    for each in found:
        assert each.kind is ClaimKind.ORDERING
        assert [side.where["method"] for side in each.selections] == ["static", "greedy"]


def test_profiles_have_what_claims_need() -> None:
    spec = _ROWS.spec()
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        for selection in claim.selections:
            words = [f"{name}={value}" for name, value in selection.where.items()]
            rows = _ROWS.job(*words, profile=claim.profile).rows
            met = [r for r in rows if selection.where.items() <= dict(r.parameters).items()]
            assert len(met) >= claim.minimum_repeats, claim.id
