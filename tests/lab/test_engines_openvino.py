"""OpenVINO on this CPU, where it is installed: the slow tier brings it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    CPU,
    NETWORKS,
    check_float32,
    check_int8,
    exact,
    images,
    network,
    relative_error,
)
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import engines
from narrowgauge_lab.engines import EngineCache, Preparation, openvino, registry
from narrowgauge_lab.engines.base import DTYPES


@pytest.fixture(scope="module")
def _there() -> None:
    reason = engines.missing("openvino", CPU)
    if reason:
        pytest.skip(reason)


def test_it_is_for_cpus() -> None:
    assert "runs on CPUs" in engines.missing("openvino", torch.device("cuda"))


def test_without_its_library_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    reason = engines.missing("openvino", CPU)
    assert reason == "openvino is not installed: pip install openvino"


@pytest.mark.slow
@pytest.mark.last
@pytest.mark.usefixtures("_there")
class TestRunner:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_float32_agrees_with_float64(self, name: str) -> None:
        model, runner = check_float32("openvino", name)
        layers = {n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
        products = [fact for fact in runner.layers() if fact.is_product]
        assert {fact.layer for fact in products} == layers
        assert {fact.precision for fact in products} == {"fp32"}
        assert all(fact.kernel for fact in products)

    def test_it_takes_nan_for_zero(self) -> None:
        """Its ReLU is a maximum that gives the number: so a NaN cannot be looked for behind it."""
        wanted = Preparation("fp32", CPU)
        runner = engines.prepare("openvino", network("residual"), images(3), wanted)
        x = images(3)
        before = runner(x).clone()
        x[1, 0, 8, 8] = math.nan
        got = runner(x)
        assert bool(torch.isfinite(got).all())
        assert torch.equal(got[::2], before[::2])

    @pytest.mark.parametrize("name", NETWORKS)
    def test_int8_is_what_fake_quantisation_computes(self, name: str) -> None:
        check_int8("openvino", name)

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_16_bits_run_or_are_refused(self, precision: str) -> None:
        """As the processor has them: never in float32 under another name."""
        model = network("residual")
        x = images(2).to(DTYPES[precision])
        wanted = Preparation(precision, CPU)
        reason = registry.refuses("openvino", precision, CPU)
        if reason:
            assert f"would run {precision} in float32" in reason
            with pytest.raises(NotApplicableError, match=f"does not run {precision}"):
                engines.prepare("openvino", model, x, wanted)
            return
        runner = engines.prepare("openvino", model, x, wanted)
        assert precision in {fact.precision for fact in runner.layers() if fact.is_product}
        assert relative_error(runner(x), exact(model, x)) <= 4e-2

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_a_precision_that_falls_back_is_found_out(
        self, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        """By the graph that it runs, whatever the processor and its list of capabilities say."""
        monkeypatch.setattr(openvino.OpenVinoEngine, "refuses", lambda *_: "")
        monkeypatch.setitem(openvino._TYPES, precision, "f32")
        x, wanted = images(1).to(DTYPES[precision]), Preparation(precision, CPU)
        with pytest.raises(
            NotApplicableError, match=f"ran the network in fp32, not in {precision}"
        ):
            engines.prepare("openvino", network("residual"), x, wanted)

    def test_options_and_cache(self, tmp_path: Path) -> None:
        model, x = network("residual"), images(2)
        given: Any = {"threads": 1, "hint": "throughput"}
        wanted = Preparation("fp32", CPU, options=given, cache=EngineCache(tmp_path))
        first = engines.prepare("openvino", model, x, wanted)
        again = engines.prepare("openvino", model, x, wanted)
        assert (first.from_cache, again.from_cache) == (False, True)
        compiled = again._requests[2].get_compiled_model()
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
        assert "THROUGHPUT" in str(compiled.get_property("PERFORMANCE_HINT"))
        wrong = Preparation("fp32", CPU, options={"hint": "fast"})
        with pytest.raises(BadValueError, match="hint 'fast' is none"):
            engines.prepare("openvino", model, x, wrong)
