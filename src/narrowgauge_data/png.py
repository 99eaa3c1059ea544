"""Images out of picture files. The one module that needs Pillow."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

__all__ = ["planes_of", "square_of"]

#: Pillow has moved the name of it.
_BILINEAR = 2


def planes_of(path: Path, channels: int, pixels: int) -> bytes:
    """The images of `path`, uint8 [rows, channels, pixels]; in the file pixel follows pixel.

    Raises ValueError for what is no such PNG, OSError as the file system gives it.
    """
    try:
        with Image.open(path) as picture:
            if (len(picture.getbands()), picture.width) != (channels, pixels):
                raise ValueError(f"{path.name} is not {pixels} pixels of {channels} channels wide")
            raw = picture.tobytes()
    except (UnidentifiedImageError, SyntaxError) as error:
        raise ValueError(f"{path.name} is not a PNG: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path.name}: {error}") from error  # the library's own: a broken stream
    planes = [raw[channel::channels] for channel in range(channels)]
    starts = range(0, len(planes[0]), pixels)
    return b"".join(plane[start : start + pixels] for start in starts for plane in planes)


def square_of(path: Path, side: int, shorter: int) -> bytes:
    """The picture's middle, uint8 [3, side, side]: scaled until its shorter side is `shorter`
    pixels, bilinear over all pixels that fall into one, and cropped.

    Raises ValueError for what is no picture, OSError as the file system gives it.
    """
    try:
        with Image.open(path) as picture:
            scale = shorter / min(picture.size)
            width, height = (round(extent * scale) for extent in picture.size)
            scaled = picture.convert("RGB").resize((width, height), _BILINEAR)
    except (UnidentifiedImageError, SyntaxError) as error:
        raise ValueError(f"{path.name} is not a picture: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path.name}: {error}") from error  # the library's own: a broken stream
    left, top = (width - side) // 2, (height - side) // 2
    raw = scaled.crop((left, top, left + side, top + side)).tobytes()
    return b"".join(raw[channel::3] for channel in range(3))
