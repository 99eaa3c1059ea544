"""Pictures to the artefact's `.bin` files of images and back; see `narrowgauge_contract.image_bin`.

Nothing here guesses: how a picture is fitted, in which order its colours stand and what is done to
their values are arguments, and whoever reads a file back says the same again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from narrowgauge.errors import BadValueError, UsageError, disk_full
from narrowgauge_contract.errors import DataCorruptError, NarrowgaugeError
from narrowgauge_contract.image_bin import (
    CHANNELS,
    IMAGE_BYTES,
    ORDERS,
    PREPROCESSING,
    SIDE,
    count_of,
)

__all__ = ["FITS", "Format", "pack", "pixels_of", "unpack"]

#: How a picture becomes a square; `pad` is the artefact's.
FITS = ("pad", "crop", "stretch")
#: Before the middle is cropped, the shorter side is this: what networks of ImageNet are tried on.
_SHORTER = 256
_STORED = np.dtype("<f4")


@dataclass(frozen=True)
class Format:
    """What a file does not say of itself. Raises BadValueError for what there is not."""

    order: str = "bgr"
    preprocessing: str = "raw"

    def __post_init__(self) -> None:
        for what, name, known in (
            ("order of colours", self.order, ORDERS),
            ("preprocessing", self.preprocessing, tuple(PREPROCESSING)),
        ):
            if name not in known:
                raise BadValueError(
                    f"'{name}' is no {what}", next_step=f"one of {', '.join(known)}"
                )

    def encoded(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [224, 224, 3], red first, as float32 of this format."""
        how = PREPROCESSING[self.preprocessing]
        values = (pixels.astype(np.float64) - how.mean) / how.std
        return self._ordered(values).astype(_STORED)

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """The reverse: rounded and clipped to uint8, red first."""
        how = PREPROCESSING[self.preprocessing]
        pixels = self._ordered(values).astype(np.float64) * how.std + how.mean
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)

    def _ordered(self, values: np.ndarray) -> np.ndarray:
        return values[..., ::-1] if self.order == "bgr" else values


def pixels_of(path: Path, fit: str) -> np.ndarray:
    """A picture as uint8 [224, 224, 3], red first.

    `pad`: its longer side becomes 224, zeros fill what is below or right of it. `crop`: its shorter
    side becomes 256, and the middle is taken. `stretch`: both sides become 224. Bilinear over all
    pixels that fall into one. Raises UsageError, BadValueError, DataCorruptError.
    """
    if fit not in FITS:
        raise BadValueError(f"'{fit}' is no way to fit a picture", next_step=f"{', '.join(FITS)}")
    try:
        with Image.open(path) as picture:
            coloured = picture.convert("RGB")
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not there") from error
    except (UnidentifiedImageError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataCorruptError(f"{path} is no picture that Pillow reads", why=str(error)) from error
    except OSError as error:
        # The library's own has no number: a stream that breaks off.
        raise DataCorruptError(f"{path} cannot be read", why=str(error)) from error
    return np.asarray(_fitted(coloured, fit))


def _fitted(picture: Image.Image, fit: str) -> Image.Image:
    bilinear = Image.Resampling.BILINEAR
    if fit == "stretch":
        return picture.resize((SIDE, SIDE), bilinear)
    width, height = picture.size
    scale = SIDE / max(width, height) if fit == "pad" else _SHORTER / min(width, height)
    scaled = picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), bilinear)
    if fit == "crop":
        left, top = ((extent - SIDE) // 2 for extent in scaled.size)
        return scaled.crop((left, top, left + SIDE, top + SIDE))
    square = Image.new("RGB", (SIDE, SIDE))
    square.paste(scaled, (0, 0))
    return square


def pack(pictures: Sequence[Path], out: Path, how: Format, fit: str = "pad") -> int:
    """Write the pictures one after another into `out`; the bytes written. It is complete or not
    there. Raises what `pixels_of` raises, UsageError where it cannot be written, DiskFull."""
    if not pictures:
        raise UsageError("no picture was given")
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("wb") as stream:
            for path in pictures:
                stream.write(how.encoded(pixels_of(path, fit)).tobytes())
        partial.replace(out)
    except OSError as error:
        raise _unwritten(out, error) from error
    finally:
        _remove(partial)
    return len(pictures) * IMAGE_BYTES


def unpack(file: Path, folder: Path, how: Format) -> Iterator[Path]:
    """Write each image of `file` as `<name>-<number>.png` into `folder`, and give its path.

    Raises UsageError where there is no such file, DataCorruptError for a length of no whole images
    or values that are not finite, DiskFull.
    """
    if not file.is_file():
        raise UsageError(f"{file} is not there")
    count = count_of(file.stat().st_size, str(file))
    values = np.memmap(file, _STORED, "r", shape=(count, SIDE, SIDE, CHANNELS))
    digits = len(str(count - 1))
    for number in range(count):
        image = np.asarray(values[number])
        if not np.isfinite(image).all():
            raise DataCorruptError(
                f"{file} is no file of images", why=f"image {number} has values that are not finite"
            )
        path = folder / f"{file.stem}-{number:0{digits}d}.png"
        try:
            Image.fromarray(how.decoded(image)).save(path)
        except OSError as error:
            raise _unwritten(path, error) from error
        yield path


def _unwritten(path: Path, error: OSError) -> NarrowgaugeError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path.parent, str(path), next_step="free some space, or another --out")
    return UsageError(f"cannot write {path}", why=error.strerror or str(error))


def _remove(path: Path) -> None:
    """What is not there, or in no folder, needs no removing."""
    with contextlib.suppress(OSError):
        path.unlink()
