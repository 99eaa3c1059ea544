"""Small convolutional networks that engines are held against float64 on, and their inputs."""

from __future__ import annotations

import copy
from typing import Any, Dict, Tuple

import torch
from torch import nn

from narrowgauge_lab import engines
from narrowgauge_lab.engines import Preparation, Runner
from narrowgauge_lab.engines.onnx_export import cpu_int8_config
from narrowgauge_lab.quant.calibration import calibrate
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.transforms import fold_batch_norm

CPU = torch.device("cpu")
SIZE = 17
CLASSES = 7


class Block(nn.Module):
    """A basic residual block that halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.down(x))


class Residual(nn.Module):
    """As ResNet: a stem, a rounded-up pooling, a residual block, an average over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.block = Block(8, 16, 2)
        self.average = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.bn(self.conv(x))))
        return self.fc(torch.flatten(self.average(self.block(x)), 1))


class Concatenated(nn.Module):
    """As DenseNet, SqueezeNet and MobileNet: concatenation, ReLU6, depthwise and grouped
    convolutions, dropout, pooling over parts of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 5, padding=2)
        self.norm = nn.BatchNorm2d(6)
        self.left = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.right = nn.Conv2d(6, 4, 3, padding=2, dilation=2, groups=2)
        self.relu6 = nn.ReLU6()
        self.pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
        self.average = nn.AdaptiveAvgPool2d((3, 3))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(90, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.cat([self.relu6(4 * self.left(x)), self.right(x)], 1)
        x = self.average(self.pool(x))
        return self.fc(self.dropout(x.flatten(1)))


NETWORKS = {"residual": Residual, "concatenated": Concatenated}


def network(name: str) -> nn.Module:
    """With normalisation that does something: a trained one's mean is not 0, nor its variance 1."""
    torch.manual_seed(3)
    model = NETWORKS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.2)
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def images(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, SIZE, SIZE, generator=generator)


def exact(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In float64, on the CPU."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.detach().cpu().double())


def differently_laid(x: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The same values with other strides."""
    wide = torch.zeros(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return {
        "contiguous": x.contiguous(),
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference in units of the largest value; NaN stays NaN."""
    difference = (got.detach().cpu().double() - wanted).abs()
    return float(difference.max() / wanted.abs().max())


class Unknown(nn.Module):
    """Has an operator between its layers that no translator of networks of this kind takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.special.i0(self.conv(x)) if hasattr(torch, "special") else torch.i0(self.conv(x))
        return self.fc(x.mean((2, 3)))


def check_float32(engine: str, name: str) -> Tuple[nn.Module, Runner]:
    """Hold an engine against float64, at several batches and layouts; the model, its runner."""
    model = network(name)
    wanted = Preparation("fp32", CPU, batches=(0, 2, 4))
    runner = engines.prepare(engine, model, images(2), wanted)
    for count in (0, 1, 3):
        x = images(count, seed=5)
        right = exact(model, x)
        for laid in differently_laid(x).values():
            got = runner(laid)
            assert got.shape == (count, CLASSES)
            assert count == 0 or relative_error(got, right) <= 2e-6
    return model, runner


def check_int8(engine: str, name: str) -> None:
    """Hold an engine's int8, and what it says of its layers, against fake quantisation."""
    model = fold_batch_norm(network(name))
    calibration = (images(16, seed=1),)
    scales = calibrate(model, calibration, cpu_int8_config())
    wanted = Preparation("int8", CPU, calibration, (1, 2, 8))
    runner = engines.prepare(engine, network(name), images(2), wanted)
    x = images(8, seed=5)
    with torch.no_grad():
        right = fake_quantized(model, scales)(x)
    step = float(scales["fc"].output.scale)
    assert float((runner(x) - right).abs().max()) <= 3.001 * step
    assert float(right.std()) > 5 * step
    products = [fact for fact in runner.layers() if fact.is_product]
    assert {fact.layer for fact in products} == set(scales)
    assert {fact.precision for fact in products} == {"int8"}
