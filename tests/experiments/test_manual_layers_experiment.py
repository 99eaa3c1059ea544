"""The experiment `manual-layers`: its declaration, its checks, and rows from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import SkippedError, UnknownNameError
from narrowgauge_contract.summary import summary_lines
from narrowgauge_kernels.errors import ToolchainMissingError
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_lab.layers.manual.convert import convert
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.networks.manual_mnist import ManualNet

ROWS = Rows("manual-layers", ("data=synthetic", "train_limit=200", "limit_s=0.001", "batch=20"))
CLAIMS = load_claims(EXPERIMENTS / "manual-layers" / "claims.toml", ROWS.spec())


class Notes:
    """What a row would have recorded."""

    def __init__(self) -> None:
        self.metrics: Dict[str, Any] = {}
        self.facts: Dict[str, Any] = {}
        self.reasons: Any = []

    def metric(self, name: str, values: Any, unit: str, source: str, index: str = "") -> None:
        self.metrics[name] = values

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def invalid(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(ManualNet().state_dict(), str(path))
    return path


@pytest.fixture
def feed() -> Feed:
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (30, 1, 28, 28)).astype(np.uint8)
    return Feed(images, random.randint(0, 10, 30), (0.5,), (0.5,), CPU)


def test_the_first_row_trains_and_has_what_is_drawn_and_printed(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "policy=exact_fp32", "epochs=2")

    assert row.validity.valid
    spec = ROWS.spec()
    recorded = {metric.name for metric in row.metrics}
    assert set(spec.headline) <= recorded
    assert {name for each in spec.drawings for name in each.metrics} <= recorded
    assert row.metric("parameters").values == (18224.0,)
    assert row.metric("appx_agreement").values == row.metric("agreement").values == (100.0,)
    assert row.metric("logit_scale").values[0] == pytest.approx(1.0, rel=1e-5)
    losses = row.metric("exact_train_loss").values
    assert losses[1] < losses[0]
    assert row.facts["weights_from"] == "trained in this row"
    assert row.facts["macs_per_image"] == 138_600
    assert {each["path"] for each in row.facts["choices"]} == {"functor"}
    assert spec.closing is not None
    lines = "\n".join(summary_lines(spec.closing, [row])).splitlines()
    accuracy = row.metric("accuracy").values[0]
    assert lines[:2] == [f"Accuracy of {net}: {accuracy:f} %" for net in ("exact_net", "appx_net")]
    assert lines[2].startswith("Accuracy of quant_net: ")
    assert lines[3].startswith(f"exact_fp32: {accuracy:.2f} %, agrees on 100.00 %")

    again = ROWS.run(tmp_path, "policy=exact_int8")
    assert again.facts["weights_from"] == "an earlier row of this run"
    assert again.facts["weights_sha256"] == row.facts["weights_sha256"]


def test_a_table_runs_with_its_proof_and_by_every_kernel(tmp_path: Path, weights: Path) -> None:
    row = ROWS.run(tmp_path, "policy=lut8x8:truncated-4-signed", f"weights={weights}")

    assert row.validity.valid
    assert row.metric("path_differences").values == (0.0,)
    compared = row.facts["paths_compared"]
    assert {*compared["taken"], *compared["with"]} == {"structured", "table"}
    assert all(each["proof"]["proved"] for each in row.facts["choices"])
    assert row.facts["weights_from"] == "the file net.pth"
    assert row.metric("agreement").values[0] > 50


def test_ax_fpm_enlarges_logits(tmp_path: Path, weights: Path) -> None:
    row = ROWS.run(tmp_path, "policy=axfpm", f"weights={weights}")

    assert row.validity.valid
    assert row.metric("logit_scale").values[0] > 1.05
    assert len(row.metric("layer_error").values) == 4


@pytest.mark.parametrize("policy", ["axfpm", "axbf16", "lut8x8:ama5"])
def test_claims_about_products_hold(policy: str) -> None:
    module, notes = ROWS.module("products"), Notes()
    module.record_products(notes, parse_policy(policy))

    about = [
        (selection.metric, claim.expected["any"])
        for claim in CLAIMS
        for selection in claim.selections
        if selection.where["policy"] == policy and selection.metric.startswith(("product", "table"))
    ]
    assert about
    for metric, expected in about:
        assert notes.metrics[metric] == pytest.approx(expected.figure, rel=expected.tolerance)


def test_claims_are_of_rows_that_their_profile_has() -> None:
    for claim in CLAIMS:
        rows = ROWS.job(profile=claim.profile).rows
        for selection in claim.selections:
            matching = [
                row for row in rows
                if all(row.parameters[name] == value for name, value in selection.where.items())
            ]  # fmt: skip
            assert len(matching) >= claim.minimum_repeats, claim.id


def test_every_policy_of_a_profile_is_one_and_has_a_closing_line() -> None:
    spec, module = ROWS.spec(), ROWS.module("products")
    assert spec.closing is not None
    for profile in spec.profiles.values():
        for text in profile.values["policy"]:
            assert text in spec.closing.order
            policy = module.found_policy(text)
            assert policy.name != "custom" or Path(policy.source).is_file()


def test_quantised_weights_are_the_originals_formula() -> None:
    """127 over the largest magnitude, rounded half to even, clipped, divided."""
    torch.manual_seed(0)
    model = ManualNet()
    with torch.no_grad():
        model.fc_2.bias.copy_(torch.tensor([127.0, 0.5, 1.5, -0.5, -127.0, 2.5, 0, 3, 4, 5]))

    found = ROWS.module("run").quantised(model)

    assert found.fc_2.bias.tolist() == [127, 0, 2, 0, -127, 2, 0, 3, 4, 5]
    for ours, values in zip(found.parameters(), model.parameters()):
        scale = 127 / values.abs().max()
        formula = (values * scale).round().clamp(-127, 127) / scale
        assert torch.allclose(ours, formula, rtol=1e-6, atol=0)
        assert not ours.requires_grad or ours is not values


def test_layers_that_compute_something_else_are_found(feed: Feed) -> None:
    checks, policy = ROWS.module("checks"), parse_policy("mitchell")
    right, wrong = Notes(), Notes()

    checks.check_layers(right, convert(ManualNet(), policy).model, policy, feed)
    checks.check_layers(wrong, convert(ManualNet(), "exact_fp32").model, policy, feed)

    assert right.reasons == []
    assert max(right.metrics["layer_error"]) < 1e-5
    (reason,) = wrong.reasons
    assert "from the reference products" in reason


def test_paths_that_differ_are_found(feed: Feed) -> None:
    checks, policy = ROWS.module("checks"), parse_policy("lut8x8:bam-2-4-signed")
    model, notes = ManualNet().eval(), Notes()
    converted = convert(model, policy)
    logits = checks.logits_of(converted.model, feed, 7)[:, :]
    logits[4, 2] += 1e-6

    checks.check_paths(notes, model, converted, policy, feed, 7, logits)

    count = len(notes.facts["paths_compared"]["with"])
    assert count >= 1
    assert notes.metrics["path_differences"] == count
    assert "images have other logits" in notes.reasons[0]


def test_published_scores_are_of_their_weights_only() -> None:
    checks, network = ROWS.module("checks"), ROWS.module("model").NETWORKS["defensive"]
    (published,) = network.published
    exact, axfpm = (torch.tensor([each]) for each in (published.exact, published.axfpm))
    policy = parse_policy("axfpm")

    def notes(sha256: str, found: torch.Tensor) -> Notes:
        kept = Notes()
        checks.check_published(kept, network, sha256, policy, exact, found)
        return kept

    assert notes("another", exact).metrics == {}
    right, wrong = notes(published.sha256, axfpm), notes(published.sha256, exact)
    assert max(right.metrics["score_error"]) < 1e-5
    assert not right.reasons
    assert wrong.reasons
    assert float(axfpm.norm() / exact.norm()) == pytest.approx(4.02, abs=0.005)


def test_the_defensive_network_has_the_published_layers(tmp_path: Path) -> None:
    net = ROWS.module("model").DefensiveNet()

    assert sum(each.numel() for each in net.parameters()) == 648_226
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    shapes = {name: tuple(each.shape) for name, each in net.state_dict().items()}
    assert shapes["linear1.weight"] == (200, 3136)
    assert shapes["conv2.weight"] == (64, 32, 3, 3)


def test_without_a_compiler_a_functors_row_is_skipped(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise ToolchainMissingError("no g++", why="none is installed", next_step="install one")

    monkeypatch.setattr(ROWS.module("run"), "convert", missing)

    with pytest.raises(SkippedError, match="no g") as caught:
        ROWS.run(tmp_path, "policy=custom:product_bf16.h", f"weights={weights}")

    assert caught.value.next_step == "install one"


def test_bad_input_is_refused_before_training(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(UnknownNameError, match="mitchel"):
        ROWS.run(tmp_path / "a", "policy=mitchel")
    with pytest.raises(UnknownNameError, match="ama6"):
        ROWS.run(tmp_path / "b", "policy=lut8x8:ama6")
    with pytest.raises(DataCorruptError, match="weights of this DefensiveNet"):
        ROWS.run(tmp_path / "c", f"weights={weights}", "network=defensive")
    assert list(tmp_path.rglob("weights-*")) == []


def test_diverged_training_leaves_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(ctx: Any, model: ManualNet, *_: Any) -> None:
        with torch.no_grad():
            model.fc_1.bias[3] = float("nan")
        ctx.invalid("diverged")

    monkeypatch.setattr(ROWS.module("weights").training, "train", diverging)

    row = ROWS.run(tmp_path, "policy=mitchell")

    assert row.validity.reasons[0] == "diverged"
    assert row.metrics == ()
    assert list(tmp_path.glob("weights-*")) == []
