"""Where a memory layout is not to be trained in: what torch's libraries get wrong."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = ["require_sound_channels_last"]

#: oneDNN's kernels work on so many channels at once.
_AT_ONCE = 16


def require_sound_channels_last(model: nn.Module, device: torch.device) -> None:
    """Raises BadValueError where gradients in channels_last would write beyond their memory: on a
    CPU, of 1×1 convolutions that stride over fewer than 16 channels. Seen as crashes, and under
    glibc's checked heap at 2 to 12 channels and at none from 16 on, in float32 and bfloat16, with
    torch 2.13 on a processor with AVX-512; neither torch 1.8 nor AVX2 alone did so.
    """
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or set(module.kernel_size) != {1}:
            continue
        if max(module.stride) > 1 and module.in_channels < _AT_ONCE:
            raise BadValueError(
                f"this network is not trained in nhwc on a CPU: {name} is a 1×1 convolution that"
                f" strides over {module.in_channels} channels",
                why=f"of fewer than {_AT_ONCE} channels, its gradients in oneDNN write beyond"
                " their memory",
                next_step="-p layout=nchw, or a greater width",
            )
