"""`narrowgauge kernels generate`, `tune`: runs of the experiment `sparse-kernels`, as text.

The generator is the kernels' and needs torch's side, so a command is a Job like any other:
recorded, in a container or natively. What it prints is a side file of its row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.cli.options import (
    ExecutorName,
    Json,
    LabPython,
    On,
    Project,
    Results,
    world_of,
)
from narrowgauge.cli.text_jobs import How, run_row, text_of

__all__ = ["register"]

_EXPERIMENT = "sparse-kernels"
_Shape = Annotated[
    str,
    typer.Argument(
        metavar="SHAPE",
        help="BATCH,CHANNELS,HEIGHT,WIDTH,FILTERS such as 1,128,28,28,32; ,k1s2p0 behind it where "
        "kernel, stride and padding are not 3, 1 and 1.",
    ),
]
_Precision = Annotated[
    str, typer.Option("--precision", metavar="fp32|tf32|fp16", help="Of operands; sums are fp32.")
]
_Accumulation = Annotated[
    str,
    typer.Option(
        "--accumulation",
        metavar="deterministic|atomic",
        help="How partial sums of several blocks are added.",
    ),
]
_Granularity = Annotated[
    str,
    typer.Option(
        "--granularity",
        metavar="element|tensor-core",
        help="What is skipped: each zero, or a channel of 2x4 pixels that are all zero.",
    ),
]
_Layout = Annotated[
    str, typer.Option("--layout", metavar="nchw|nhwc", help="Of map and result in memory.")
]
_Path = Annotated[
    str,
    typer.Option(
        "--path",
        metavar="fused|window|dense|lists|switched",
        help="One launch, with lists, jumping over zeros, or over none; lists first; or lists and "
        "a dense kernel, one of which the device runs.",
    ),
]
_Bias = Annotated[bool, typer.Option("--bias", help="Add a bias.")]
_ReluOutput = Annotated[bool, typer.Option("--relu-output", help="A ReLU behind the convolution.")]


def register(app: typer.Typer) -> None:
    """Add the `kernels` commands to the program."""
    kernels = typer.Typer(
        no_args_is_help=True,
        help="Generated CUDA kernels of convolutions that skip the zeros of their map.",
    )
    kernels.command("generate")(generate)
    kernels.command("tune")(tune)
    app.add_typer(kernels, name="kernels")


def generate(
    shape: _Shape,
    tile: Annotated[
        str,
        typer.Option(
            "--tile",
            metavar="TILE",
            help="ROWSxCOLUMNSxCHANNELS such as 4x7x8. auto: the stored one, else an estimate's.",
        ),
    ] = "auto",
    arch: Annotated[
        str, typer.Option("--arch", metavar="X.Y", help="auto: the capability of the GPU here.")
    ] = "auto",
    precision: _Precision = "fp32",
    accumulation: _Accumulation = "deterministic",
    granularity: _Granularity = "element",
    layout: _Layout = "nchw",
    path: _Path = "fused",
    bias: _Bias = False,
    relu_output: _ReluOutput = False,
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """Print the CUDA source of a shape's convolution.

    No GPU is needed where --arch names a compute capability.
    """
    variant = _variant(precision, accumulation, granularity, layout, path, bias, relu_output)
    words = (f"tile={tile}", f"arch={arch}", *variant)
    how = How(on, executor, results, lab_python)
    text = _run(project, how, ("action=generate", _shape(shape), *words), "source.cu")
    print(text, end="")


def tune(
    shape: Annotated[
        str,
        typer.Argument(
            metavar="SHAPE|NETWORK",
            help="As of generate; or densenet121, densenet169, densenet201, resnet50, resnet101, "
            "resnet152, vgg16, vgg19: the shapes of its 3x3 convolutions.",
        ),
    ],
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Of a network's shapes.")] = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="To search for each shape.")
    ] = 60.0,
    precision: _Precision = "fp32",
    accumulation: _Accumulation = "deterministic",
    granularity: _Granularity = "element",
    layout: _Layout = "nchw",
    path: _Path = "fused",
    bias: _Bias = False,
    relu_output: _ReluOutput = False,
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """Search the fastest tile on the GPU here, and store it.

    The published tiles are tried first. Generated convolutions take what is stored.
    """
    variant = _variant(precision, accumulation, granularity, layout, path, bias, relu_output)
    words = (f"batch={batch}", f"seconds={seconds}", *variant)
    how = How(on, executor, results, lab_python)
    name = "tune.json" if as_json else "tune.txt"
    text = _run(project, how, ("action=tune", _shape(shape), *words), name)
    print(text, end="")


def _shape(text: str) -> str:
    """As a word of the command line of a run, where a comma would begin another row."""
    return f"shape={text.replace(',', 'x')}"


def _variant(
    precision: str,
    accumulation: str,
    granularity: str,
    layout: str,
    path: str,
    bias: bool,
    relu_output: bool,
) -> tuple[str, ...]:
    from narrowgauge.errors import BadValueError

    words = {
        "precision": precision,
        "accumulation": accumulation,
        "granularity": granularity,
        "layout": layout,
        "path": path,
        "bias": str(bias).lower(),
        "relu_output": str(relu_output).lower(),
    }
    for name, word in words.items():
        if "," in word:
            raise BadValueError(f"{name}={word} is more than one", next_step="one at a time")
    return tuple(f"{name}={word}" for name, word in words.items())


def _run(project: Path | None, how: How, words: tuple[str, ...], name: str) -> str:
    """The side file of one row of the experiment. Raises what `run_row` and `text_of` raise."""
    folder, record = run_row(world_of(project), how, _EXPERIMENT, words)
    return text_of(folder, record, name)
