"""`narrowgauge image-bin …`: pictures to the sparse-convolution artefact's files and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgauge.cli.options import note
from narrowgauge_contract.image_bin import ORDERS, PREPROCESSING

__all__ = ["register"]

_Order = Annotated[
    str,
    typer.Option(
        "--order", metavar="ORDER", help=f"Which colour comes first: {', '.join(ORDERS)}."
    ),
]
_Preprocessing = Annotated[
    str,
    typer.Option(
        "--preprocessing",
        metavar="NAME",
        help=f"What the values are: {', '.join(PREPROCESSING)}.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Pictures to float32 224×224×3 files of the sparse-convolution artefact, and back.",
    )
    group.command("pack")(pack)
    group.command("unpack")(unpack)
    app.add_typer(group, name="image-bin")


def pack(
    pictures: Annotated[
        list[Path], typer.Argument(metavar="PICTURE...", help="Pictures, one batch in this order.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.bin", help="The file to write.")],
    order: _Order = "bgr",
    preprocessing: _Preprocessing = "raw",
    fit: Annotated[
        str,
        typer.Option(
            "--fit",
            metavar="HOW",
            help="How a picture becomes a square: pad, crop (its middle) or stretch.",
        ),
    ] = "pad",
    force: Annotated[bool, typer.Option("--force", help="Write over FILE.bin.")] = False,
) -> None:
    """Write pictures into one file, a batch.

    The defaults are what the artefact's own files are: blue first, values from 0 to 255, the longer
    side scaled to 224 and zeros below or to the right. torchvision's networks want --order rgb
    --preprocessing torchvision --fit crop.
    """
    from narrowgauge import image_bin
    from narrowgauge.errors import UsageError

    if out.exists() and not force:
        raise UsageError(f"{out} is there already", next_step="another name, or --force")
    how = image_bin.Format(order, preprocessing)
    written = image_bin.pack(pictures, out, how, fit)
    note(f"written: {out}, {len(pictures)} images, {written} bytes, {order}, {preprocessing}")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE.bin", help="A file of images.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the pictures are written.")
    ] = Path(),
    order: _Order = "bgr",
    preprocessing: _Preprocessing = "raw",
) -> None:
    """Write each image of a file as a PNG.

    --order and --preprocessing say what the file was made with: it does not say so itself. What was
    not between 0 and 255 is clipped.
    """
    from narrowgauge import image_bin
    from narrowgauge.errors import UsageError

    if not out.is_dir():
        raise UsageError(f"{out} is no folder to write to")
    for path in image_bin.unpack(file, out, image_bin.Format(order, preprocessing)):
        print(path)
