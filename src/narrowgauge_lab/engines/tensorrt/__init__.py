"""NVIDIA TensorRT 8.0 to 11, whichever is installed, told apart by its features.

`ENGINE.prepare` builds networks by way of ONNX, `ENGINE.prepare_convolution` one convolution with
weights to refit. A runner is for one thread at a time, on whatever stream is current there; another
thread gets its `twin`.
"""

from narrowgauge_lab.engines.tensorrt.engine import TensorRTEngine
from narrowgauge_lab.engines.tensorrt.network import ConvolutionSpec
from narrowgauge_lab.engines.tensorrt.runner import TensorRTRunner

__all__ = ["ENGINE", "ConvolutionSpec", "TensorRTEngine", "TensorRTRunner"]

# No library that is obtainable knows the GPUs at hand. The 8.4.1 libraries, the bindings of 8.6 to
# 11.4 and the builder of TensorRT-RTX check all up to the built engine.
# unverified: TensorRT engines on a GPU | no library for it obtainable | run engines on a board
# unverified: TensorRT engines on a DLA, 16 loadables | no board | run throughput on a Xavier
# unverified: TensorRT refits, streams, inspector | needs a GPU | nox -s gpu in a TensorRT image
# unverified: TensorRT 8.0 and 8.2 | no bindings obtainable | nox -s gpu in tensorrt:21.07-py3
ENGINE = TensorRTEngine()
