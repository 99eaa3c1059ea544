"""ONNX files executed by ONNX Runtime on the CPU. The one module that imports onnxruntime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Optional

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.quant.qdq import operator_counts

__all__ = ["OrtModel", "onnxruntime_library"]


class OrtModel:
    """A session on the CPU provider, called like a model: float32 tensors in and out.

    `operators` counts what really runs, after ONNX Runtime merged Q/DQ nodes with what is between
    them: QLinearConv, QGemm and the like are int8; a Conv that is left runs in float.
    """

    def __init__(self, path: Path, threads: Optional[int] = None) -> None:
        ort = onnxruntime_library()
        with tempfile.TemporaryDirectory() as folder:
            merged = Path(folder) / "merged.onnx"
            options = ort.SessionOptions()
            options.optimized_model_filepath = str(merged)
            options.intra_op_num_threads = threads or torch.get_num_threads()
            # Warnings of it are about the merged file being for this machine, which it is.
            options.log_severity_level = 3
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            self.operators = operator_counts(merged)
        self._input = self._session.get_inputs()[0].name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        (result,) = self._session.run(None, {self._input: x.detach().numpy()})
        return torch.from_numpy(result)


def onnxruntime_library() -> Any:
    """onnxruntime. Raises NotApplicableError where this Python has none."""
    try:
        import onnxruntime
    except ImportError as error:
        raise NotApplicableError(
            "this Python has no ONNX Runtime", why=str(error), next_step="pip install onnxruntime"
        ) from error
    return onnxruntime
