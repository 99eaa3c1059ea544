"""`pruning`: rows of every method, what they keep of each ratio, and the pair with quantisation."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import one_row
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    UsageError,
)
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.spec import load_toml
from narrowgauge_lab.errors import DataUnavailableError
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.precision import available
from narrowgauge_lab.sparse_networks import make_ready
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

NAME = "pruning"
CPU = torch.device("cpu")
#: No figure of these tests is a measurement.
QUICK = (
    "method=l1-channel", "schedule=one-shot", "channels=inner", "ratios=0.5",
    "data=synthetic", "width=0.0625", "train_limit=32", "validation=20",
    "test_limit=20", "batch_size=16", "epochs=1", "finetune_epochs=1", "lr=0.01", "limit_s=0.01",
    "pairs=1", "passes=1", "recalibration=0",
)  # fmt: skip
ROWS = Rows(NAME, QUICK)
EACH = ("accuracy_before", "accuracy_after", "removed", "macs", "parameters", "speedup")


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = cifar_resnet(18, 1 / 16)
    for name, parameter in net.named_parameters():
        if "bn" in name and name.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = tmp_path_factory.mktemp("weights") / "weights-0.pt"
    torch.save(net.state_dict(), str(path))
    return path


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing and timing two networks is half of a row's time, and one test has it."""
    clock = types.SimpleNamespace(record=lambda ctx, pruned: (1.0,), close=lambda: None)
    monkeypatch.setattr(ROWS.module("run"), "Clock", lambda *arguments: clock)


def _values(row: Row, name: str) -> List[float]:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return list(metric.values)


def test_a_row_records_what_it_promises(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "method=l1-channel", "channels=all", "recalibration=32")

    assert row.validity.valid, row.validity.reasons
    recorded = {metric.name for metric in row.metrics}
    spec = ROWS.spec()
    assert set(spec.headline) <= recorded
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        asked = {each.metric for each in claim.selections}
        assert asked <= recorded or claim.id == "quantisation-is-better"
    assert {"r50_latency", "r50_latency_whole", "r50_speedup", "r50_train_loss"} <= recorded
    for name in EACH:
        assert len(_values(row, name)) == 1
    (speedup,), (whole,), (latency,) = (
        _values(row, f"r50_{name}") for name in ("speedup", "latency_whole", "latency")
    )
    assert speedup == pytest.approx(whole / latency)
    twin = cifar_resnet(18, 1 / 32)  # half of every channel is what half the width has
    assert _values(row, "parameters") == [sum(each.numel() for each in twin.parameters())]
    assert _values(row, "removed") == [0.5]
    assert _values(row, "removal_difference")[0] < 1e-4
    assert list(row.facts["layers_left_alone"]) == ["linear"]
    assert row.facts["layers_held_at_least"] == {}
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.names() == ("50 % pruned", "whole")
    assert run.direct_macs.tolist() == [_values(row, "macs")[0], _values(row, "macs_whole")[0]]
    assert run.base_accuracy == _values(row, "accuracy_whole")[0]
    right = (run.test.logits.argmax(2) == run.test.labels).mean(1) * 100
    assert right[0] == pytest.approx(_values(row, "accuracy_after")[0])
    assert right[1] == pytest.approx(_values(row, "accuracy_whole")[0])
    assert row.facts["variant"] == (
        "resnet-18, l1-channel, one-shot, all channels, twin of width 0.0625"
    )


@pytest.mark.skipif("bf16" not in available(CPU), reason="CPU autocast needs torch 1.10")
def test_training_may_be_in_less_than_what_is_tested_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, timed = [], []
    examine, module = ROWS.module("run").examine, ROWS.module("times")

    def seen(pruned: Any, splits: Any, mode: Any) -> Any:
        tested.append(mode.name)
        return examine(pruned, splits, mode)

    def ready(way: str, model: Any, images: torch.Tensor, *rest: Any) -> Any:
        timed.append((images.dtype, images.is_contiguous(), rest[0]))
        return make_ready(way, model, images, *rest)

    monkeypatch.setattr(ROWS.module("run"), "examine", seen)
    monkeypatch.setattr(module, "make_ready", ready)
    # The least width that a CPU trains in nhwc.
    words = ("width=0.25", "training_precision=bf16", "layout=nhwc", "latency_batch=2")
    row = ROWS.run(tmp_path, *words)

    assert row.validity.valid, row.validity.reasons
    assert row.facts["r50_precision_ran"] == "bf16"
    assert set(tested) == {"fp32"}
    assert timed == 2 * [(torch.float32, True, "fp32")]


def test_a_training_precision_that_is_not_there_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROWS.module("run"), "trained_weights", lambda *_: pytest.fail("trains"))
    with pytest.raises(NotApplicableError, match="tf32 does not work on cpu"):
        ROWS.run(tmp_path, "training_precision=tf32")


@pytest.mark.usefixtures("untimed")
def test_single_weights_stay_zero_and_cost_what_they_cost(tmp_path: Path, weights: Path) -> None:
    words = (f"weights={weights}", "method=magnitude", "ratios=0.3,0.6")
    row = ROWS.run(tmp_path, *words, "schedule=iterative", "finetune_lr=0.1")

    assert row.validity.valid, row.validity.reasons
    whole = _values(row, "macs_whole")[0]
    assert _values(row, "macs") == [whole, whole]
    assert _values(row, "parameters") == 2 * _values(row, "parameters_whole")
    net = cifar_resnet(18, 1 / 16)
    count = sum(each.numel() for each in net.parameters() if each.dim() > 1)
    others = sum(each.numel() for each in net.parameters() if each.dim() == 1)
    for ratio, left in zip((0.3, 0.6), _values(row, "parameters_nonzero")):
        kept = count - int(ratio * count)
        # Betas were zero before; one of them may be so again.
        assert kept <= left <= kept + others
    assert _values(row, "macs_nonzero")[0] > _values(row, "macs_nonzero")[1]
    assert row.metric("removal_difference") is None
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.names() == ("60 % pruned", "30 % pruned", "whole")
    assert run.direct_macs.tolist() == [whole] * 3
    assert row.facts["layers_left_alone"] == {}


def test_steps_go_on_from_each_other_and_shots_do_not(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row that was stopped at its second ratio goes on there, to the same end."""
    words = (f"weights={weights}", "method=bn-gamma", "finetune_lr=0.1", "ratios=0.3,0.6")
    stops = iter([False, True])

    def record(_ctx: Any, _pruned: Any) -> Tuple[float, ...]:
        if next(stops, False):
            raise KeyboardInterrupt
        return (1.0,)

    clock = types.SimpleNamespace(record=record, close=lambda: None)
    monkeypatch.setattr(ROWS.module("run"), "Clock", lambda *arguments: clock)
    with pytest.raises(KeyboardInterrupt):
        ROWS.run(tmp_path / "stopped", *words, "schedule=iterative")
    (tmp_path / "stopped" / "events.jsonl").unlink()
    shots = ROWS.run(tmp_path / "shots", *words)
    steps = ROWS.run(tmp_path / "steps", *words, "schedule=iterative")
    monkeypatch.setattr(one_row, "RowContext", functools.partial(one_row.RowContext, resume=True))
    resumed = ROWS.run(tmp_path / "stopped", *words, "schedule=iterative")

    for row in (shots, steps, resumed):
        assert row.validity.valid, row.validity.reasons
        assert row.facts["weights_from"] == "the file weights-0.pt"
        assert _values(row, "accuracy_whole") == _values(steps, "accuracy_whole")
        assert _values(row, "r30_train_loss") == _values(steps, "r30_train_loss")
    assert _values(shots, "r60_train_loss") != _values(steps, "r60_train_loss")
    assert _values(steps, "removed") == pytest.approx([0.3, 0.6], abs=0.02)
    inner = [name for name in steps.facts["layers_left_alone"] if name.endswith("conv1")]
    assert inner == ["conv1"], "streams are left alone"
    assert "residual stream" in steps.facts["layers_left_alone"]["conv1"]
    assert resumed.facts["r30_resumed_after_epoch"] == resumed.facts["r60_resumed_after_epoch"] == 1
    for name in ("r60_train_loss", "accuracy_after", "parameters"):
        assert _values(resumed, name) == _values(steps, name)
    files = [tmp_path / name / "row-0" / LOGITS_FILE for name in ("stopped", "steps")]
    one, other = (read_logits(path).test.logits for path in files)
    assert np.array_equal(one, other)


@pytest.mark.usefixtures("untimed")
def test_a_layer_that_would_be_emptied_is_refused_or_held(tmp_path: Path, weights: Path) -> None:
    state = torch.load(str(weights))
    state["layer1.0.bn1.weight"].fill_(9.0)
    state["layer3.0.bn1.weight"].mul_(1e-3)
    poor = tmp_path / "poor.pt"
    torch.save(state, str(poor))
    words = ("method=bn-gamma", f"weights={poor}", "finetune_epochs=0")

    with pytest.raises(BadValueError, match=r"leaves no channel of layer3\.0\.conv1"):
        ROWS.run(tmp_path / "refused", *words, "ratios=0.3", "least_channels=0")
    row = ROWS.run(tmp_path / "held", *words, "ratios=0.3", "least_channels=2")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["layers_held_at_least"] == {"0.3": ["layer3.0.conv1"]}
    assert 0.2 < _values(row, "removed")[0] < 0.3
    assert row.metric("r30_train_loss") is None
    assert _values(row, "accuracy_before") == _values(row, "accuracy_after")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ratios=1.0",), "a pruning ratio of 1"),
        (("ratios=-0.1",), "a pruning ratio of -0.1"),
        (("ratios=nan",), "does not take 'nan'"),
        (("ratios=0.5,0.3",), "do not rise"),
        (("ratios=half",), "does not take 'half'"),
        (("ratios=0.1,-",), "ratios '0.1,-'"),
        (("least_channels=5",), "least_channels=5"),
        (("method=l1",), "method"),
        (("width=0.001",), "width"),
        (("validation=400",), "400 images for validation"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, words: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)
    assert not (tmp_path / "weights-0.pt").exists()


@pytest.mark.usefixtures("untimed")
def test_a_removal_that_changes_more_than_it_says_makes_the_row_invalid(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ROWS.module("steps")
    real = steps.masked_channels

    def off(*arguments: Any) -> Any:
        masked = real(*arguments)
        masked.linear.bias.data.add_(1.0)
        return masked

    monkeypatch.setattr(steps, "masked_channels", off)
    row = ROWS.run(tmp_path, f"weights={weights}", "finetune_epochs=0")

    assert not row.validity.valid
    assert "without the channels is another" in row.validity.reasons[0]


def test_fine_tuning_that_diverges_is_said(tmp_path: Path, weights: Path) -> None:
    words = (f"weights={weights}", "finetune_lr=100", "weight_decay=1", "finetune_epochs=40")
    row = ROWS.run(tmp_path, *words)

    assert not row.validity.valid
    assert "diverged" in row.validity.reasons[0]
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


@pytest.mark.usefixtures("untimed")
class TestAgainst:
    @pytest.fixture
    def kept(self, tmp_path: Path, weights: Path) -> Path:
        ROWS.run(tmp_path / "other", f"weights={weights}", "finetune_epochs=0", "ratios=0.1")
        path = tmp_path / "logits-0.npz"
        (tmp_path / "other" / "row-0" / LOGITS_FILE).rename(path)
        return path

    def test_it_is_paired_at_equal_bytes(self, tmp_path: Path, weights: Path, kept: Path) -> None:
        files = (weights.with_name("weights-SEED.pt"), kept.with_name("logits-SEED.npz"))
        words = (f"weights={files[0]}", f"against={files[1]}", "against_exit=whole",
                 "finetune_epochs=0")  # fmt: skip
        row = ROWS.run(tmp_path / "one", *words, "against_share=0.6", "ratios=0.1,0.5")

        sizes = np.array(_values(row, "parameters_nonzero")) / _values(row, "parameters_whole")
        assert (sizes <= 0.6).tolist() == [False, True]
        about = row.facts["against"]
        assert about["pruned"] == "50 % pruned", "the other is larger, however good it is"
        assert (about["exit"], about["family"]) == ("whole", "pruning")
        rival = _values(row, "accuracy_after")[1]
        (ahead,) = _values(row, "quantised_ahead")
        assert ahead == pytest.approx(_values(row, "accuracy_whole")[0] - rival)
        low, high = (_values(row, f"quantised_ahead_{end}")[0] for end in ("low", "high"))
        assert low <= ahead <= high

        none = ROWS.run(tmp_path / "none", *words, "against_share=0.01", "ratios=0.1")
        assert none.facts["against"]["pruned"] == "none is as small"
        assert none.metric("quantised_ahead") is None

    def test_other_images_and_names_are_refused(
        self, tmp_path: Path, weights: Path, kept: Path
    ) -> None:
        words = (f"weights={weights}", f"against={kept}")
        with pytest.raises(BadValueError, match="tested on other images"):
            ROWS.run(tmp_path / "a", *words, "against_exit=whole", "test_limit=10")
        with pytest.raises(BadValueError, match="against_exit='int8'") as unknown:
            ROWS.run(tmp_path / "b", *words, "against_exit=int8")
        assert "10 % pruned" in unknown.value.why
        with pytest.raises(DataUnavailableError, match="no file"):
            ROWS.run(tmp_path / "c", f"against={tmp_path / 'none.npz'}")


def test_the_chosen_one_is_chosen_on_validation_images() -> None:
    outcomes, steps = ROWS.module("outcomes"), ROWS.module("steps")

    def one(ratio: float, validation: float, macs: int, **more: Any) -> Any:
        pruned = steps.Pruned(ratio, torch.nn.Identity(), ratio)
        return outcomes.Outcome(pruned, 0.0, validation, macs, macs, 1, 1, **more)

    recorded = {}

    class Context:
        def metric(self, name: str, value: float, **_: Any) -> None:
            recorded[name] = value

    several = [
        one(0.0, 90.0, 100),
        one(0.1, 89.5, 50, before=1.0, speedups=(9.0,)),
        one(0.2, 89.4, 50, before=1.0, speedups=(1.1, 1.2, 1.3) * 3),
        one(0.3, 89.2, 20, before=1.0, speedups=(3.0,)),
    ]
    chosen = outcomes.record_chosen(Context(), several)
    assert chosen is several[2]
    assert (recorded["chosen_ratio"], recorded["chosen_speedup"]) == (0.2, 1.2)
    assert (recorded["chosen_speedup_low"], recorded["chosen_speedup_high"]) == (1.1, 1.3)
    assert recorded["chosen_macs_saved"] == 0.5
    recorded.clear()
    assert outcomes.record_chosen(Context(), [several[0], several[3]]) is several[0]
    assert "chosen_speedup_low" not in recorded, "one pair holds no median"
    assert (recorded["chosen_speedup"], recorded["chosen_accuracy_lost"]) == (1.0, 0.0)


class TestDeclarations:
    def test_claims_have_their_rows(self) -> None:
        spec = ROWS.spec()
        for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
            for selection in claim.selections:
                # A claim may name more than rows of the profile differ in, as its own recipe.
                words = [f"{name}={value}" for name, value in selection.where.items()]
                rows = ROWS.job(*words, profile=claim.profile).rows
                met = [r for r in rows if selection.where.items() <= dict(r.parameters).items()]
                assert len(met) >= claim.minimum_repeats, claim.id

    def test_the_last_ratio_of_the_paper_profile_is_the_claimed_one(self) -> None:
        document = load_toml(EXPERIMENTS / NAME / "claims.toml")
        (zeros,) = [each for each in document["claim"] if each["id"] == "zeros-are-not-faster"]
        assert "nine of ten" in zeros["text"]
        ratios = ROWS.job(profile="paper").rows[0].parameters["ratios"]
        assert str(ratios).split(",")[-1] == "0.9"

    def test_the_short_profile_is_a_twin_on_a_thousand_images(self) -> None:
        for row in ROWS.job(profile="short").rows:
            named = {name: row.parameters[name] for name in ("width", "test_limit", "data")}
            assert named == {"width": 0.25, "test_limit": 1000, "data": "cifar10"}
