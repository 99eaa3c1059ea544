"""Models with manual layers: which layers are taken, which are not, and what the record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_kernels.errors import KernelBuildError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.layers.manual import dispatch, kernels
from narrowgauge_lab.layers.manual.convert import convert
from narrowgauge_lab.layers.manual.modules import ManualConv2d, ManualLinear
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.layers.manual.quantise import Format, Scales, calibrated
from narrowgauge_lab.layers.manual.settings import settings_of
from narrowgauge_lab.multipliers.errors import TableError, TableSourceError

CPU = torch.device("cpu")
SIGNED = Format(input_signed=True, weight_signed=True)


class OwnConv(nn.Conv2d):
    """May do something else."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, stride=2, groups=2, padding=1),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
    )


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class TestConverting:
    def test_a_copy_computes_otherwise_and_the_model_as_before(self) -> None:
        model, x = network().eval(), images()
        before = model(x)

        converted = convert(model, "lut8x8:ama5")

        assert torch.equal(model(x), before)
        assert converted.replaced == ("0", "3", "5")
        assert converted.left_alone == ()
        assert [type(converted.model[at]) for at in (0, 3, 5)] == [
            ManualConv2d, ManualConv2d, ManualLinear,
        ]  # fmt: skip
        assert not torch.allclose(converted.model(x), before, atol=1e-3)

    @pytest.mark.parametrize("policy", ["exact_fp32", "exact_int8", "lut8x8:drum-5-signed"])
    def test_state_dicts_go_both_ways(self, policy: str) -> None:
        model = network()
        converted = convert(model, policy).model

        assert list(converted.state_dict()) == list(model.state_dict())
        converted.load_state_dict(model.state_dict())
        model.load_state_dict(converted.state_dict())

    def test_exact_products_are_the_models(self) -> None:
        model, x = network().eval(), images()

        assert torch.allclose(convert(model, "exact_fp32").model(x), model(x), atol=1e-5)

    def test_hooks_training_and_shared_layers_stay(self) -> None:
        shared = nn.Linear(3, 3)
        model = nn.Sequential(shared, nn.ReLU(), shared).eval()
        seen: List[str] = []
        shared.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))

        converted = convert(model, "mitchell")
        converted.model(torch.randn(2, 3))

        assert converted.replaced == ("0",)
        assert converted.model[0] is converted.model[2]
        assert seen == ["ManualLinear", "ManualLinear"]
        assert not converted.model[0].training

    def test_manual_layers_get_another_policy(self) -> None:
        once = convert(network(), "mitchell").model

        again = convert(once, "exact_int8", gradient="local(3)")

        assert again.replaced == ("0", "3", "5")
        assert {str(each.settings.policy) for each in again.model if hasattr(each, "settings")} == {
            "exact_int8"
        }
        assert str(once[0].settings.policy) == "mitchell"

    def test_it_trains(self) -> None:
        model, x = convert(network(), "lut8x8:drum-5-signed").model, images(8)
        labels = torch.arange(8) % 5
        losses = []
        for _ in range(5):
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            losses.append(float(loss.detach()))

        assert losses[-1] < 0.8 * losses[0]


class TestLeftAlone:
    def test_what_cannot_be_taken_says_why(self) -> None:
        model = nn.ModuleDict(
            {
                "own": OwnConv(1, 1, 1),
                "one": nn.Conv1d(1, 1, 1),
                "back": nn.ConvTranspose2d(1, 1, 1),
                "wide": nn.Linear(2, 2).double(),
                "deep": nn.Linear(31_092, 1),
                "both": nn.Bilinear(2, 2, 2),
                "taken": nn.Linear(2, 2),
                "not": nn.Linear(2, 2),
            }
        )

        converted = convert(model, "lut8x8:ama5", exclude=["n*"])

        reasons = {each.name: each.reason for each in converted.left_alone}
        assert converted.replaced == ("taken",)
        assert set(reasons) == set(model) - {"taken"}
        assert "its class is not exactly" in reasons["own"] + reasons["one"] + reasons["back"]
        assert "torch.float64" in reasons["wide"]
        assert "sums 31092 products of up to 69071: 2147555532 is beyond" in reasons["deep"]
        assert reasons["not"] == "excluded"
        assert type(converted.model["own"]) is OwnConv

    def test_a_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown layer 'fc' to exclude"):
            convert(network(), "mitchell", exclude=["0", "fc"])

    @pytest.mark.parametrize("model", [nn.ReLU(), nn.Conv1d(1, 1, 1)])
    def test_a_model_without_layers(self, model: nn.Module) -> None:
        with pytest.raises(BadValueError, match="can be converted"):
            convert(model, "mitchell")


class TestChoices:
    def test_the_proof_is_in_the_record(self) -> None:
        facts = convert(network(), "lut8x8:ama5", gradient="local").choices()

        assert json.loads(json.dumps(facts)) == facts
        assert [fact["layer"] for fact in facts] == ["0", "3", "5"]
        first: Dict[str, Any] = facts[0]
        assert (first["policy"], first["gradient"]) == ("lut8x8:ama5", "local")
        assert (first["path"], first["terms"]) == ("structured", 2)
        assert first["proof"]["proved"]
        assert first["proof"]["checked_pairs"] == 65_536
        assert "proved over 65536 pairs" in first["why"]

    @pytest.mark.parametrize(
        ("policy", "path"),
        [("exact_fp32", "functor"), ("axfpm", "functor"), ("exact_int8", "exact"),
         ("lut8x8:exact", "exact"), ("lut8x8:bam-2-4", "structured"),
         ("lut8x8:drum-4-signed", "factored"), ("lut8x8:mitchell", "table")],
    )  # fmt: skip
    def test_the_path_that_costs_least(
        self, policy: str, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernels, "product_instructions", lambda: "avx512vnni")

        choice = dispatch.choose(settings_of(policy), CPU, 9)

        assert (choice.path, choice.passed_over) == (path, ())

    @pytest.mark.parametrize(
        ("policy", "path", "before"),
        [("lut8x8:ama5", "structured", None), ("lut8x8:bam-2-4", "table", "structured"),
         ("lut8x8:drum-4-signed", "table", "factored"), ("exact_int8", "exact", None)],
    )  # fmt: skip
    def test_without_products_of_bytes_the_table_costs_less_than_many(
        self, policy: str, path: str, before: Optional[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernels, "product_instructions", lambda: "avx2")

        choice = dispatch.choose(settings_of(policy), CPU, 9)

        assert choice.path == path
        assert [each for each, _ in choice.passed_over] == ([before] if before else [])
        if before:
            assert "longer than the table on a processor" in choice.passed_over[0][1]
            asked = dispatch.choose(settings_of(policy, path=before), CPU, 9)
            assert asked.path == before
            assert asked.why.startswith("asked for; ")

    def test_a_table_without_structure_says_so(self) -> None:
        (fact, *_) = convert(network(), "lut8x8:mitchell").choices()

        assert fact["why"].startswith("no sum of few exact products: of rank")
        assert fact["proof"]["kind"] == "none"
        assert not fact["proof"]["proved"]

    def test_an_old_gpu_falls_to_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 0))

        choice = dispatch.choose(settings_of("lut8x8:ama5"), cuda, 9)

        assert choice.path == "table"
        assert choice.passed_over == (
            ("structured", "a GPU of compute capability 6.0 has no products of bytes; they came "
             "with 6.1"),
        )  # fmt: skip
        with pytest.raises(NotApplicableError, match="no path 'structured' here"):
            dispatch.choose(settings_of("lut8x8:ama5", path="structured"), cuda, 9)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
        assert dispatch.choose(settings_of("lut8x8:ama5"), cuda, 9).path == "structured"

    def test_deep_sums_of_factors_fall_to_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = settings_of("lut8x8:drum-4-signed")
        monkeypatch.setattr(kernels, "product_instructions", lambda: "amx")

        assert dispatch.choose(settings, CPU, 33_025).path == "factored"
        assert dispatch.choose(settings, CPU, 33_026).path == "table"


class TestTablesOfTheUser:
    def test_from_a_file(self, tmp_path: Path) -> None:
        side = np.arange(-128, 128)
        np.save(tmp_path / "mine.npy", np.multiply.outer(side, side).astype(np.int32))
        model, x = network().eval(), images()

        mine = convert(model, f"lut8x8:{tmp_path}/mine.npy,signed")

        assert torch.equal(mine.model(x), convert(model, "exact_int8").model(x))
        assert mine.choices()[0]["path"] == "exact"

    @pytest.mark.parametrize(
        "values",
        [np.zeros((255, 256), np.int32), np.zeros((256, 256)), np.full((256, 256), 2**40)],
    )
    def test_a_bad_one_is_refused_before_anything_runs(
        self, values: np.ndarray, tmp_path: Path
    ) -> None:
        np.save(tmp_path / "bad.npy", values)

        with pytest.raises(TableError):
            convert(network(), f"lut8x8:{tmp_path}/bad.npy")

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(TableSourceError, match="is not there"):
            convert(network(), f"lut8x8:{tmp_path}/none.npy")
        with pytest.raises(UnknownNameError) as caught:
            convert(network(), "lut8x8:amma5")
        assert caught.value.nearest == "ama5"


@pytest.mark.slow
class TestFunctorsOfTheUser:
    """They are compiled, which takes seconds."""

    def _file(self, folder: Path, body: str) -> str:
        path = folder / "mine.h"
        path.write_text(
            "struct Multiply { MAC_INLINE float operator()(float a, float b) const {\n"
            f"  {body}\n}} }};\n",
            encoding="utf-8",
        )
        return f"custom:{path}"

    def test_a_model_runs_by_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        model, x = network().eval(), images().requires_grad_(True)
        policy = self._file(tmp_path, "return a * b * 2.0f;")

        twice = convert(model, policy, gradient="local")

        bias = model[0].bias.reshape(1, -1, 1, 1)
        expected = 2 * (model[0](x) - bias) + bias
        assert torch.allclose(twice.model[0](x), expected, atol=1e-5)
        (ours,) = torch.autograd.grad(twice.model[0](x).sum(), [x])
        (theirs,) = torch.autograd.grad(expected.sum(), [x])
        assert torch.allclose(ours, theirs, atol=1e-4)
        assert {fact["path"] for fact in twice.choices()} == {"functor"}

    def test_one_that_does_not_compile_is_told_before_anything_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        with pytest.raises(KernelBuildError, match="does not compile") as caught:
            convert(network(), self._file(tmp_path, "return a * c;"))

        assert "mine.h:2" in caught.value.why


class TestCalibrated:
    def test_scales_of_batches_hold_for_others(self) -> None:
        model = network().eval()
        scales = calibrated(model, SIGNED, [images(8)])

        converted = convert(model, "exact_int8", scales=scales).model

        x = images(8)
        assert torch.allclose(converted(x), model(x), atol=0.05)
        # One image has the range of all, and not its own.
        assert torch.allclose(converted(x[:1]), converted(x)[:1], atol=1e-6)
        free = convert(model, "exact_int8").model
        assert not torch.allclose(free(x[:1]), free(x)[:1], atol=1e-6)

    def test_fixed_weights_are_those_of_the_moment_until_they_move(self) -> None:
        model, x = network().eval(), images()
        free = convert(model, "exact_int8", scales=calibrated(model, SIGNED, [x])).model
        fixed = convert(
            model, "exact_int8", scales=calibrated(model, SIGNED, [x], weights=True)
        ).model

        assert torch.equal(free(x), fixed(x))
        with torch.no_grad():
            for each in (free, fixed):
                each[5].weight.mul_(4)
        assert not torch.equal(free(x), fixed(x))

    def test_affine_scales_are_of_unsigned_tables(self) -> None:
        model, x = network().eval(), images()
        form = multiplier_of(parse_policy("lut8x8:exact")).form(True)
        scales = calibrated(model, form, [x], observer="mse")

        found = convert(model, "lut8x8:exact", scales=scales)

        assert torch.allclose(found.model(x), model(x), atol=0.05)
        assert found.model[0].scales.input_zero == int(scales["0"].input.zero_point) > 0
        with pytest.raises(UsageError, match="takes input codes of 8 bits, signed"):
            convert(model, "exact_int8", scales=scales)

    def test_scales_of_no_layer_and_of_no_codes(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown layer 'fc'"):
            convert(network(), "exact_int8", scales={"fc": Scales()})
        with pytest.raises(BadValueError, match="which computes in float32"):
            convert(network(), "mitchell", scales={"0": Scales()})

    def test_no_data(self) -> None:
        with pytest.raises(CalibrationError):
            calibrated(network(), SIGNED, [])
