"""How one part of a page is coded in the cache: as it is, or in 8 bits a channel with a scale a block.

A coded token is a row of bytes of its own, so coded rows can be cut by token. A lossy codec lays a token out as
``[d bytes][a zero byte if d is odd][ceil(d / 128) float16 scales]``: the token's shape is flattened to ``d`` channels,
each block of 128 (the last may be shorter) has one scale, and a token has an even number of bytes, so that scales are
aligned wherever the first token is.

A block holds ``code * scale``. With s its largest magnitude over the largest code, its scale is a float16 from s to
``1.001 * s + 2**-24``: never below s, so that no quotient exceeds the largest code and nothing has to be clamped.
What such a scale cannot hold is refused, never stored as something else: see `Codec.encode`. Zero may lose its sign.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Protocol

import torch

from tailreplay.codec_room import Room, blocks_of, rooms
from tailreplay.errors import CacheConfigError
from tailreplay.state_codecs import BFloat16, Int8Heads

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Ratios of a block's largest magnitude to the largest code for which the scale below is a float16 that is not far off.
_SCALE_MIN, _SCALE_MAX = 2.0**-24, 65472.0
_HALF_UNIT = torch.tensor(2.0**-25 + 2.0**-40)  # of float16's smallest numbers


class Codec(Protocol):
    """Encoding of one part. Has no state: may be used by several threads."""

    @property
    def name(self) -> str:
        """As `codec_of` knows it."""

    @property
    def lossy(self) -> bool:
        """Whether what is decoded may differ from what was encoded."""

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of one coded token.

        Raises
        ------
        CacheConfigError
            If parts of this dtype cannot be coded.
        """

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Code tokens. Mutates `out` only.

        Parameters
        ----------
        rows : torch.Tensor
            Shape ``(n, *shape)``, of any strides.
        out : torch.Tensor
            Shape ``(n, token_bytes)``, uint8, on the same device. Rows may lie apart; the bytes of each are contiguous.

        Raises
        ------
        ValueError
            If `out` has another shape or dtype, or the codec is lossy and a value is not finite or a block's largest
            magnitude lies outside its scale's range (a block of zeros is fine). What `out` holds then means nothing.
        """

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        """Undo `encode`, in the dtype that was encoded. Mutates `out` only.

        Parameters
        ----------
        coded : torch.Tensor
            Shape ``(n, token_bytes)``, uint8.
        out : torch.Tensor
            Shape ``(n, *shape)``, of any strides, on the same device.
        """


class _Bytes:
    """The bytes as they are, of any dtype."""

    name, lossy = "none", False

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, rows, out)
        out.copy_(_bytes(rows.contiguous()))

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, coded)
        # Bytes are copied, not viewed as the dtype: coded rows need not be aligned for it.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _bytes(whole).copy_(coded)
        if whole is not out:
            out.copy_(whole)


class _Blocks(ABC):
    """Codes of one byte, times a scale a block; how a code is made of a quotient differs by subclass."""

    name: str
    lossy = True
    top: float
    """Largest code."""

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if dtype not in _FLOATS:
            raise CacheConfigError(f"Codec '{self.name}' codes float32, bfloat16 and float16, not {dtype}.")
        channels = math.prod(shape)
        return channels + channels % 2 + 2 * blocks_of(channels)

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, rows, out)
        for begin, end, room in rooms(rows):
            room.inner.copy_(rows[begin:end])
            torch.abs(room.values, out=room.spare)
            # As integers: a NaN is above infinity there, and denormals count even where the CPU flushes them to zero.
            torch.amax(room.spare_bits, -1, out=room.peak_bits)
            self._refuse(room.peak_bits)
            self._scale(room)
            room.values.mul_(room.factors)
            self._narrow(room, out[begin:end, : room.channels])
            out[begin:end, room.even :].copy_(room.stored_bytes)
            if room.even > room.channels:
                out[begin:end, room.channels].zero_()

    @torch.no_grad()
    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, coded)
        for begin, end, room in rooms(out):
            # Copied as bytes: coded rows need not be aligned.
            room.stored_bytes.copy_(coded[begin:end, room.even :])
            room.scale.copy_(room.stored)
            self._widen(room, coded[begin:end, : room.channels])
            room.values.mul_(room.factors)
            if out.dtype is torch.float16:
                # The scale was rounded up: the largest code may lie just above the largest float16.
                room.values.clamp_(-65504.0, 65504.0)
            out[begin:end].copy_(room.inner)

    def _scale(self, room: Room) -> None:
        """Write each block's scale as `stored`, and its inverse as `scale`."""
        # Half a unit in the last place more, so that rounding to the nearest float16 never goes below.
        torch.add(_HALF_UNIT, room.peaks, alpha=(1 + 2.0**-11 + 2.0**-20) / self.top, out=room.scale)
        room.stored.copy_(room.scale)
        room.scale.copy_(room.stored).reciprocal_()

    def _refuse(self, peaks: torch.Tensor) -> None:
        low, high = (int(bits) for bits in torch.aminmax(peaks))  # on CUDA this waits, for what must not be stored
        least, most = _bits(self.top * _SCALE_MIN), _bits(self.top * _SCALE_MAX)
        if high > most or (low < least and bool(((peaks > 0) & (peaks < least)).any())):
            raise ValueError(
                f"Codec '{self.name}' holds blocks of zeros and blocks whose largest magnitude is "
                f"{self.top * _SCALE_MIN:.3g} to {self.top * _SCALE_MAX:.3g}, but some value is not finite or outside."
            )

    @abstractmethod
    def _narrow(self, room: Room, out: torch.Tensor) -> None:
        """Write the quotients in `room` as codes ``(n, d)``, uint8. May mutate them."""

    @abstractmethod
    def _widen(self, room: Room, codes: torch.Tensor) -> None:
        """Write codes ``(n, d)``, uint8, as values in `room`."""


class _Int8(_Blocks):
    """Codes -127 to 127, the nearest one (ties to even)."""

    name, top = "int8", 127.0

    def _narrow(self, room: Room, out: torch.Tensor) -> None:
        room.values.round_()
        out.view(torch.int8).copy_(room.flat)

    def _widen(self, room: Room, codes: torch.Tensor) -> None:
        room.flat.copy_(codes.view(torch.int8))


class _Float8(_Blocks):
    """Codes in float8_e4m3fn: 4 significant bits whatever the size, down to 2**-6 of 448."""

    name, top = "fp8_e4m3", 448.0

    def _narrow(self, room: Room, out: torch.Tensor) -> None:
        out.view(torch.float8_e4m3fn).copy_(room.flat)

    def _widen(self, room: Room, codes: torch.Tensor) -> None:
        if codes.device.type != "cpu":
            room.flat.copy_(codes.view(torch.float8_e4m3fn))
            return
        # torch's own conversion is some ten times slower on a CPU. A code's exponent and mantissa, moved into those of
        # a float16, are that value times 2**-8; a float16 holds all of them, with or without an implicit bit.
        room.short_ints.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        room.flat.copy_(room.short_ints.view(torch.float16))
        room.scale.mul_(256.0)


_KNOWN: dict[str, Codec] = {codec.name: codec for codec in (_Bytes(), _Int8(), _Float8())}
CODECS = tuple(_KNOWN)
_OF_STATES: dict[str, Codec] = {codec.name: codec for codec in (BFloat16(), Int8Heads())}


def codec_of(name: str) -> Codec:
    """Return the codec called `name`.

    Raises
    ------
    CacheConfigError
        If there is none.
    """
    codec = _KNOWN.get(name) or _OF_STATES.get(name)
    if codec is None:
        raise CacheConfigError(f"Unknown codec {name!r}; known are {', '.join(CODECS)}.")
    return codec


def _check(codec: Codec, rows: torch.Tensor, coded: torch.Tensor) -> None:
    expected = rows.shape[0], codec.token_bytes(tuple(rows.shape[1:]), rows.dtype)
    if coded.shape != expected or coded.dtype != torch.uint8:
        raise ValueError(
            f"Coded by '{codec.name}', {tuple(rows.shape)} of {rows.dtype} is {expected} of torch.uint8, "
            f"not {tuple(coded.shape)} of {coded.dtype}."
        )


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)


@cache
def _bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))
