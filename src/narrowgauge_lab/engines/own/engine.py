"""`narrowgauge`, our own engine: our kernels and cuDNN's on CUDA devices, oneDNN's on CPUs."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.engines.base import Engine, Preparation, Runner
from narrowgauge_lab.engines.own.cpu import runner as cpu

__all__ = ["ENGINE", "OwnEngine"]


class OwnEngine(Engine):
    """BatchNorm folded, what follows a layer fused into it, every layer by the fastest of several
    kernels. Options: `tune_s` 0 takes the likeliest kernels unmeasured; `threads` is for CPUs,
    `search_s` for GPUs: about so many seconds may go into finding and measuring kernels."""

    name = "narrowgauge"
    options = cpu.OPTIONS

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        from narrowgauge_lab.engines.own.gpu import runner

        return runner.missing(device)

    def refuses(self, precision: str, device: torch.device) -> str:
        if device.type != "cuda":
            return cpu.refuses(precision)
        from narrowgauge_lab.engines.own.gpu import runner

        return runner.refuses(precision, device)

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        if wanted.device.type != "cuda":
            return cpu.prepare(model, example, wanted)
        from narrowgauge_lab.engines.own.gpu import runner

        options = self.chosen(wanted)
        if options["threads"]:
            raise BadValueError("threads are for CPUs", why=f"the network runs on {wanted.device}")
        return runner.prepare(model, example, wanted, options)


ENGINE = OwnEngine()
