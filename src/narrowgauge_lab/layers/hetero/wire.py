"""What a tensor looks like while it travels, on either side of the bus.

| wire       | travels                                               | made by the sender by |
|------------|-------------------------------------------------------|-----------------------|
| fp32       | the tensor                                            | nothing               |
| fp16, bf16 | the tensor in that type                               | a cast                |
| int8       | scales (float32, per channel) and values, in one copy | the kernels' packing  |

A tensor goes up in pieces of its batch. Its int8 scales are of the whole of it, since a product
over the batch needs one scale per channel; a gradient's are all the same, since the product by the
input is over its channels too. What comes down is quantised piece by piece.
Where the kernels are not built for a device, int8 is made by their reference in torch's operators:
the same bits, slowly; `Codec.name` says which.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels import wire
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.host import HostMemory, channels_last, elements, like
from narrowgauge_lab.layers.passes import Operand, Quantised

__all__ = [
    "DTYPES",
    "WIRE_BYTES",
    "Codec",
    "Codecs",
    "Incoming",
    "Outgoing",
    "byte_count",
    "images",
]

DTYPES: Dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
#: Per value; int8's scales come on top.
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
#: (destination, source) of one copy over the bus.
Copy = Tuple[torch.Tensor, torch.Tensor]
#: int8 values begin this far apart, in bytes, whatever the scales take: kernels read 16 at a time.
_ALIGNMENT = 16
#: In place of a host tensor that is not held.
_NOTHING = torch.empty(0)


class Codec:
    """int8 on one device: by the compiled kernels where they are built for it."""

    def __init__(self, device: torch.device) -> None:
        self.compiled = has_kernels(device.type)
        self.name = "kernels" if self.compiled else "torch reference"

    def pack(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        x: torch.Tensor,
        seed: Optional[int],
        first: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        """Write `x` into `values` (int8, its strides) and `scale` (float32 [C]). `first`: how many
        elements of the whole come before `x`, for which way they are rounded; `whole`: by one scale
        for all channels."""
        if whole and x.numel():
            self.pack(_one_channel(values), scale[:1], _one_channel(x), seed, first)
            scale[1:].copy_(scale[:1].expand(scale.shape[0] - 1))
        elif self.compiled:
            wire.pack_int8_into(values, scale, x, seed, first)
        else:
            made, scales = wire.pack_int8_ref(x, seed, first)
            values.copy_(made)
            scale.copy_(scales)

    def unpack(self, out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
        """Write what `values` and `scale` stand for into `out`, which has their strides."""
        if self.compiled:
            wire.unpack_int8_into(out, values, scale)
        else:
            out.copy_(wire.unpack_int8_ref(values, scale, out.dtype))


def _one_channel(x: torch.Tensor) -> torch.Tensor:
    """[B, 1, …] of a dense tensor [B, C, …], in the order of its memory."""
    rows = x.permute(0, 2, 3, 1) if x.dim() == 4 and not x.is_contiguous() else x
    return rows.reshape(x.shape[0], 1, x.numel() // x.shape[0])


@dataclasses.dataclass(frozen=True)
class Codecs:
    """Those of the host and of the device."""

    near: Codec
    far: Codec


class _Parcel:
    """An int8 tensor and its scales, in one buffer where torch can look at one as both."""

    def __init__(self, x: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
        """`buffers`: as `sizes` lists them."""
        count, channels = x.numel(), x.shape[1]
        self.flat: Optional[torch.Tensor] = None
        if len(buffers) == 1:
            self.flat = buffers[0]
            self.head = _head(channels)
            self.scale = self.flat[: 4 * channels].view(torch.float32)
            self.line = self.flat[self.head : self.head + count]
        else:
            self.head = 0
            self.line, self.scale = buffers[0][:count], buffers[1][:channels]
        self.values = like(self.line, x)

    @staticmethod
    def sizes(x: torch.Tensor) -> List[Tuple[int, torch.dtype]]:
        """(elements, type) of the buffers."""
        count, channels = x.numel(), x.shape[1]
        if torch_compat.reinterprets():
            return [(_head(channels) + count, torch.int8)]
        return [(count, torch.int8), (channels, torch.float32)]

    def parts(self, first: int, last: int) -> List[torch.Tensor]:
        """What travels with the elements from `first` to `last`; the scales go with the first."""
        if self.flat is not None:
            begin = self.head + first if first else 0
            return [self.flat[begin : self.head + last]]
        line = self.line[first:last]
        return [line] if first else [self.scale, line]


def _head(channels: int) -> int:
    return -(-4 * channels // _ALIGNMENT) * _ALIGNMENT


class Outgoing:
    """A dense host tensor on its way to the device, and after it, by `take`, others of its form.

    `direct`: the device may read `x` itself; otherwise it reads staging memory. `whole`: int8 has
    one scale for all channels. The buffers on the
    device belong to the stream that is current when this is made.
    """

    def __init__(
        self,
        x: torch.Tensor,
        form: str,
        name: str,
        device: torch.device,
        host: HostMemory,
        codecs: Codecs,
        seed: Optional[int],
        direct: bool,
        whole: bool = False,
    ) -> None:
        self._form, self._name, self._host, self._codec = form, name, host, codecs.near
        self._one_scale = whole
        self._batch = x.shape[0]
        self._row = x.numel() // max(1, self._batch)
        #: The stage of what `fill` does.
        self.stage = "reshape" if form == "fp32" else "quantise"
        self._near: Optional[_Parcel] = None
        self._aside: Optional[torch.Tensor] = None
        if form == "int8":
            sizes = _Parcel.sizes(x)
            self._near = _Parcel(x, [host.staging(name, *each) for each in sizes])
            far = _Parcel(x, [torch.empty(n, dtype=t, device=device) for n, t in sizes])
            self._far = far
            self.whole: Operand = Quantised(far.values, far.scale)
        else:
            self.whole = self._into = torch.empty_like(x, dtype=DTYPES[form], device=device)
        self.take(x, seed, direct)

    def take(self, x: torch.Tensor, seed: Optional[int], direct: bool) -> None:
        """Send `x` next, which has the shape and the order of memory of the one before it. Whoever
        calls has waited for what still reads the buffers, on either side."""
        self._x, self._seed = x, seed
        #: Whether `fill` has anything to do.
        self.fills = not (self._form == "fp32" and direct)
        self._staged = x
        if self.fills and self._near is None:
            if self._aside is None:
                flat = self._host.staging(self._name, x.numel(), DTYPES[self._form])
                self._aside = like(flat, x)
            self._staged = self._aside

    def let_go(self) -> None:
        """Of the host tensor, which has arrived."""
        self._x = self._staged = _NOTHING

    def fill(self, low: int, high: int) -> None:
        """The host's work before images `low` to `high` may go; pieces go in their order."""
        if self._near is None:
            self._staged[low:high].copy_(self._x[low:high])
        elif low == 0:
            near = self._near
            self._codec.pack(near.values, near.scale, self._x, self._seed, whole=self._one_scale)

    def copies(self, low: int, high: int) -> List[Copy]:
        """What has to be copied for images `low` to `high`."""
        if self._near is not None:
            first, last = low * self._row, high * self._row
            return list(zip(self._far.parts(first, last), self._near.parts(first, last)))
        if high - low == self._batch:
            return [(self._into, self._staged)]
        return [(self._into[low:high], self._staged[low:high])]

    def piece(self, low: int, high: int) -> Operand:
        """Images `low` to `high` on the device."""
        return images(self.whole, low, high)


class Incoming:
    """A tensor on its way from the device, in pieces, to `result` on the host; by another `begin`
    or `renew`, the next one of its shape.

    Pieces are on the device in the dtype of the wire, or float32 where int8 travels. What travels
    as it is lands in memory that the device writes itself; else in staging memory.
    """

    def __init__(
        self,
        shape: Sequence[int],
        form: str,
        name: str,
        host: HostMemory,
        codecs: Codecs,
        device: Optional[torch.device] = None,
    ) -> None:
        """`device`: where packed pieces are made; None: where the piece is."""
        self._shape, self._wire, self._name = tuple(shape), form, name
        self._host, self._codecs, self._device = host, codecs, device
        #: The stage of what `ready` and `unpack` do.
        self.stage = "quantise" if form != "fp32" else "reshape"
        #: Whether a piece is packed before it goes, and unpacked when it is here.
        self.packs, self.unpacks = form == "int8", form != "fp32"
        self._layout = torch.contiguous_format
        self._row = elements(shape[1:])
        #: By a piece's first image: where it is packed on the device, and where it lands.
        self._far: Dict[int, _Parcel] = {}
        self._near: Dict[int, _Parcel] = {}
        self._staged: Optional[torch.Tensor] = None
        self.result = _NOTHING

    def begin(self, piece: torch.Tensor) -> None:
        """Make the host's memory, in the layout of the first piece."""
        self.adopt(piece)
        self.renew()

    def adopt(self, piece: torch.Tensor) -> None:
        """Take the layout of a piece for that of the whole."""
        self._layout = torch.channels_last if channels_last(piece) else torch.contiguous_format

    def renew(self) -> None:
        """Make the host's memory, in the layout of before."""
        if not self.unpacks:
            last = self._layout == torch.channels_last
            self.result = self._host.fresh(self._shape, torch.float32, last)
            return
        self.result = torch.empty(self._shape, memory_format=self._layout)
        if not self.packs and self._staged is None:
            flat = self._host.staging(self._name, self.result.numel(), DTYPES[self._wire])
            self._staged = like(flat, self.result)

    def ready(self, piece: torch.Tensor, low: int, seed: Optional[int]) -> List[torch.Tensor]:
        """What travels of a piece that begins with image `low`; made on the current stream."""
        piece = piece.contiguous(memory_format=self._layout)
        if not self.packs:
            return [piece]
        far = self._far.get(low)
        if far is None:
            device = self._device or piece.device
            buffers = [torch.empty(n, dtype=t, device=device) for n, t in _Parcel.sizes(piece)]
            far = self._far[low] = _Parcel(piece, buffers)
        self._codecs.far.pack(far.values, far.scale, piece, seed, low * self._row)
        return far.parts(0, piece.numel())

    def pairs(self, sources: Sequence[torch.Tensor], low: int, high: int) -> List[Copy]:
        """The copies of what is `ready`."""
        whole = high - low == self._shape[0]
        into = self.result if self._staged is None else self._staged
        into = into if whole else into[low:high]
        if not self.packs:
            return [(into, sources[0])]
        near = self._near.get(low)
        if near is None:
            name = f"{self._name} {low}"
            buffers = [self._host.staging(name, *each) for each in _Parcel.sizes(into)]
            near = self._near[low] = _Parcel(into, buffers)
        return list(zip(near.parts(0, into.numel()), sources))

    def copies(self, piece: torch.Tensor, low: int, high: int, seed: Optional[int]) -> List[Copy]:
        """What has to be copied of a piece; int8 is packed here, on the current stream."""
        return self.pairs(self.ready(piece, low, seed), low, high)

    def given(self) -> torch.Tensor:
        """The result, all of which is here; it is not kept."""
        result, self.result = self.result, _NOTHING
        return result

    def unpack(self, low: int, high: int) -> None:
        """The host's work once images `low` to `high` are here."""
        whole = high - low == self._shape[0]
        into = self.result if whole else self.result[low:high]
        if self.packs:
            near = self._near[low]
            self._codecs.near.unpack(into, near.values, near.scale)
        else:
            assert self._staged is not None
            into.copy_(self._staged if whole else self._staged[low:high])


def images(operand: Operand, low: int, high: int) -> Operand:
    """Images `low` to `high` of an operand, as a view; all of them are the operand itself."""
    if high - low == operand.shape[0]:
        return operand
    if isinstance(operand, Quantised):
        return Quantised(operand.values[low:high], operand.scale)
    return operand[low:high]


def byte_count(copies: Sequence[Copy]) -> int:
    """The bytes that copies move."""
    return sum(source.numel() * source.element_size() for _, source in copies)
