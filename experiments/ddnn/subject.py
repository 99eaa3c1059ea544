"""What a row of `ddnn` trains and on what: the network by its parameters, and the views."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Tuple, Union

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.job import OWN_FILE, SYNTHETIC
from narrowgauge_lab.anytime import views
from narrowgauge_lab.anytime.feeds import Splits, make_splits
from narrowgauge_lab.anytime.systems.ddnn import DDNN, Design
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.shared_weights import asked_file

__all__ = ["HERE", "Subject", "design", "variant"]

HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 1, "size": 32, "classes": 10, "train": 2000, "test": 300}
_COLUMNS, _ROWS = 3, 2
#: One set of cameras for all rows and repeats.
_CAMERA_SEED = 0


@dataclasses.dataclass(frozen=True)
class Subject:
    """The data of a row. `shape`: channels, height and width of one view; `test_images`: how many
    the set has, of which `data` may hold the first ones alone."""

    data: FlatData
    source: Union[views.Tiles, views.Packed]
    shape: Tuple[int, int, int]
    test_images: int

    @classmethod
    def of(cls, ctx: RowContext) -> Subject:
        """Read or make the row's data. Raises what `RowContext.data` and `load_mvmc` raise."""
        parameters = ctx.parameters
        if parameters["data"] == OWN_FILE:
            path = asked_file(parameters["archive"], HERE)
            if path is None:
                raise BadValueError(
                    "data=file without a file", next_step="give -p archive=MVMC.npz"
                )
            data = views.load_mvmc(path)
            shape = (3, *data.train_images.shape[2:])
            return cls(data, views.Packed(views.CAMERAS), shape, len(data.test_images))
        data = _images(ctx)
        whole = len(data.test_images)
        channels, height, width = data.train_images.shape[1:]
        if parameters["views"] == "tiles":
            shape = (channels, height // _ROWS, width // _COLUMNS)
            return cls(data, views.Tiles(_COLUMNS, _ROWS), shape, whole)
        seen = views.cameras(_limited(ctx, data), _CAMERA_SEED)
        return cls(seen, views.Packed(views.CAMERAS), (channels, height, width), whole)

    def network(self, how: Design) -> DDNN:
        """With random weights."""
        return DDNN(self.source, self.shape, len(self.data.declaration.classes), how)

    def splits(self, ctx: RowContext) -> Splits:
        """See `feeds.make_splits`; the test is whole where it has all images of the set."""
        parameters = ctx.parameters
        moved = parameters["augment"] and parameters["data"] == "cifar10"
        splits = make_splits(
            self.data,
            ctx.device,
            validation=parameters["validation"],
            train_limit=parameters["train_limit"],
            test_limit=parameters["test_limit"],
            augmentation=Augmentation(4, True) if moved else Augmentation(),
        )
        return dataclasses.replace(splits, test_whole=len(splits.test) == self.test_images)


def design(ctx: RowContext) -> Design:
    """By the row's parameters. Raises BadValueError for what does not go together."""
    parameters = ctx.parameters
    return Design(
        device=parameters["device"],
        local=parameters["local"],
        cloud=parameters["cloud"],
        bits=parameters["bits"],
        filters=parameters["filters"],
        layers=parameters["layers"],
        width=parameters["width"],
        view_dropout=parameters["view_dropout"],
    )


def variant(ctx: RowContext) -> str:
    """What a reader of the record has to know of the row's network."""
    parameters = ctx.parameters
    seen = "MVMC" if parameters["data"] == OWN_FILE else parameters["views"]
    width = parameters["width"] if parameters["device"] == "residual" else 1
    words = [
        f"{parameters['device']} devices on {seen}",
        f"{parameters['local'].upper()}-{parameters['cloud'].upper()}",
        f"{parameters['bits']}-bit uplink",
        "" if width == 1 else f"twin of width {width:g}",
        f"view dropout {parameters['view_dropout']:g}" if parameters["view_dropout"] else "",
    ]
    return ", ".join(word for word in words if word)


def _images(ctx: RowContext) -> FlatData:
    """32×32 images: those of 28×28 in a black frame of 2 pixels."""
    name = ctx.parameters["data"]
    data = ctx.synthetic(**_SYNTHETIC) if name == SYNTHETIC else ctx.data(name)
    size = data.train_images.shape[2]
    return views.padded(data, (32 - size) // 2) if size < 32 else data


def _limited(ctx: RowContext, data: FlatData) -> FlatData:
    """No more than will be used: six views take the room of eight images. So of a limited set the
    validation images are of its first ones."""
    parameters = ctx.parameters
    limit, tested = parameters["train_limit"], parameters["test_limit"]
    train = limit + parameters["validation"] if limit else len(data.train_images)
    test = tested or len(data.test_images)
    return dataclasses.replace(
        data,
        train_images=data.train_images[:train],
        train_labels=data.train_labels[:train],
        test_images=data.test_images[:test],
        test_labels=data.test_labels[:test],
    )
