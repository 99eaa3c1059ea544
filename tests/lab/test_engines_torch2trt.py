"""torch2trt, by a stand-in of its interface: the library needs TensorRT and a GPU that it knows.

What is tested is our side: what it is told, what becomes of its refusals, and that an engine that
computes something else is found out. The stand-in runs the network itself.
"""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar, Dict, List

import pytest
import torch
from engine_cases import CPU, images, network

from narrowgauge_lab.engines import EngineCache, Preparation, torch2trt
from narrowgauge_lab.engines.errors import EngineBuildError, OperatorNotTakenError
from narrowgauge_lab.engines.torch2trt import ENGINE

CUDA = torch.device("cuda")


class _Module(torch.nn.Module):
    """As TRTModule: it becomes what its state says, and says it of itself."""

    #: Engines by their bytes.
    made: ClassVar[Dict[bytes, Any]] = {}

    def __init__(self, engine: Any = None) -> None:
        super().__init__()
        self.engine = engine

    def state_dict(self) -> Dict[str, Any]:  # type: ignore[override]
        data = str(id(self.engine)).encode()
        self.made[data] = self.engine
        return {"engine": bytearray(data), "input_names": ["input_0"], "output_names": ["output_0"]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:  # type: ignore[override]
        assert state["input_names"] == ["input_0"]
        self.engine = self.made[bytes(state["engine"])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return self.engine(x)


class _Library(types.ModuleType):
    """Its keywords are those of torch2trt 0.4; like it, any other is taken and ignored."""

    def __init__(self) -> None:
        super().__init__("torch2trt")
        self.__version__ = "0.4.0"
        self.TRTModule = _Module
        self.told: List[Dict[str, Any]] = []
        self.says = ""
        self.factor = 1.0

    def torch2trt(
        self,
        module: Any,
        inputs: Any,
        max_batch_size: int = 1,
        fp16_mode: bool = False,
        max_workspace_size: int = 1 << 25,
        strict_type_constraints: bool = False,
        int8_mode: bool = False,
        int8_calib_dataset: Any = None,
        **others: Any,
    ) -> _Module:
        self.told.append(
            {
                "inputs": [tuple(each.shape) for each in inputs], "fp16": fp16_mode,
                "int8": int8_mode, "workspace": max_workspace_size, "data": int8_calib_dataset,
                "batch": max_batch_size, "others": others,
            }
        )  # fmt: skip
        if self.says:
            print(self.says)
        return _Module(lambda x: self.factor * module(x))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    there = _Library()
    monkeypatch.setitem(sys.modules, "torch2trt", there)
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    return there


def prepared(precision: str = "fp32", **wanted: Any) -> Any:
    """Directly, not through the registry: there is no GPU to be on."""
    with torch.no_grad():
        model = network("residual")
        return ENGINE.prepare(model, images(2), Preparation(precision, CPU, **wanted))


def test_it_is_told_what_is_wanted(library: _Library) -> None:
    runner = prepared(options={"workspace_mb": 64})
    (told,) = library.told
    assert told["inputs"] == [(2, 3, 17, 17)]
    assert (told["fp16"], told["int8"], told["batch"]) == (False, False, 2)
    assert told["workspace"] == 64 << 20
    assert told["others"] == {}
    x = images(2, seed=3)
    assert torch.equal(
        runner(x.transpose(2, 3).contiguous().transpose(2, 3)), network("residual")(x)
    )


def test_int8_is_calibrated_on_the_images_given(library: _Library) -> None:
    """Not on the example, which is its default."""
    batches = (images(3, 1), images(2, 2))
    prepared("int8", calibration=batches)
    data = library.told[0]["data"]
    assert len(data) == 5
    assert torch.equal(data[4][0], batches[1][1:])
    assert data[0][0].shape == (1, 3, 17, 17)


def test_an_unknown_operator_is_named(library: _Library) -> None:
    library.says = "Warning: Encountered known unsupported method torch.nn.functional.gelu"
    with pytest.raises(
        OperatorNotTakenError, match="torch2trt does not take the operator"
    ) as caught:
        prepared()
    assert caught.value.operator == "torch.nn.functional.gelu"


def test_an_engine_that_computes_something_else_is_found_out(library: _Library) -> None:
    library.factor = 0.9
    with pytest.raises(EngineBuildError, match=r"wrong by 0\.1 of the largest value") as caught:
        prepared()
    assert "becomes a constant" in caught.value.why


@pytest.mark.parametrize("error", [AttributeError("no attribute '_trt'"), AssertionError("dtype")])
def test_its_failures_are_build_errors(
    library: _Library, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, fp16_mode: bool, int8_mode: bool, max_workspace_size: int,
              strict_type_constraints: bool, max_batch_size: int) -> None:  # fmt: skip
        raise error

    monkeypatch.setattr(library, "torch2trt", fails)
    with pytest.raises(EngineBuildError, match="made no engine") as caught:
        prepared()
    assert caught.value.why == str(error)


def test_what_its_version_would_ignore_is_refused(library: _Library) -> None:
    with pytest.raises(EngineBuildError, match="does not know min_shapes, opt_shapes, max_shapes"):
        prepared(batches=(1, 2, 4))
    assert not library.told


def test_the_engine_comes_from_the_cache(library: _Library, tmp_path: Any) -> None:
    cache = EngineCache(tmp_path)
    first, again = prepared(cache=cache), prepared(cache=cache)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert len(library.told) == 1
    assert torch.equal(first(images(2)), again(images(2)))


def test_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENGINE.missing(CPU) == "TensorRT runs on GPUs of NVIDIA's"
    assert ENGINE.refuses("bf16", CUDA) == "torch2trt has no bf16"
    assert ENGINE.refuses("int8", CUDA) == ""
    monkeypatch.setattr(torch2trt.importlib.util, "find_spec", lambda _: None)
    assert ENGINE.missing(CUDA) == "tensorrt is not installed"
