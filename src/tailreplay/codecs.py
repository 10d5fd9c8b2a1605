"""How one part of a page is coded in the cache: as it is, or in 8 bits a channel with a scale a block.

A coded token is a row of bytes of its own, so coded rows can be cut by token. A lossy codec lays a token out as
``[d bytes][a zero byte if d is odd][ceil(d / 128) float16 scales]``: the token's shape is flattened to ``d`` channels,
each block of 128 (the last may be shorter) has one scale, and a token has an even number of bytes, so that scales are
aligned wherever the first token is.

A block holds ``code * scale``. Its scale is its largest magnitude over the largest code, rounded *up* to float16: no
quotient exceeds the largest code, so nothing has to be clamped. What such a scale cannot hold is refused, never stored
as something else: see `Codec.encode`. Zero keeps no sign.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from tailreplay.errors import CacheConfigError

BLOCK = 128

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_MIN, _SCALE_MAX = 2.0**-24, 65504.0
# Channels coded at once. On a CPU the two float32 copies of them stay in a core's L2 cache, and the cost of a dozen
# calls stays small beside the work; on other devices it only limits memory.
_AT_ONCE_CPU, _AT_ONCE = 1 << 16, 1 << 24


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
        out.copy_(_flat(rows.contiguous()).view(torch.uint8))

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, coded)
        # Bytes are copied, not viewed as the dtype: coded rows need not be aligned for it.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _flat(whole).view(torch.uint8).copy_(coded)
        if whole is not out:
            out.copy_(whole)


class _Blocks:
    """Codes of one byte, times a scale a block; how a code is made of a quotient differs by subclass."""

    name: str
    lossy = True
    top: float
    """Largest code."""

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if dtype not in _FLOATS:
            raise CacheConfigError(f"Codec '{self.name}' codes float32, bfloat16 and float16, not {dtype}.")
        channels = math.prod(shape)
        return channels + channels % 2 + 2 * _blocks(channels)

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, rows, out)
        tokens, channels = rows.shape[0], math.prod(rows.shape[1:])
        blocks = _blocks(channels)
        step = _step(rows.device, blocks)
        values = _buffer(min(step, tokens), blocks, rows.device)
        magnitudes = torch.empty_like(values, dtype=torch.int32)
        peaks = torch.empty(tokens, blocks, dtype=torch.int32, device=rows.device)
        scales = torch.empty(tokens, blocks, dtype=torch.float16, device=rows.device)
        for at in range(0, tokens, step):
            end = min(at + step, tokens)
            some, quotients = magnitudes[: end - at], values[: end - at]
            inner = _flat(quotients)[:, :channels]
            inner.view(end - at, *rows.shape[1:]).copy_(rows[at:end])
            # As integers: a NaN is above infinity there, and denormals count even where the CPU flushes them to zero.
            torch.bitwise_and(quotients.view(torch.int32), 0x7FFFFFFF, out=some)
            torch.amax(some, -1, out=peaks[at:end])
            scale = scales[at:end]
            self._scale(peaks[at:end].view(torch.float32), scale)
            quotients.mul_(scale.float().reciprocal_()[..., None])
            self._narrow(inner, out[at:end, :channels])
        out[:, channels : channels + channels % 2].zero_()
        out[:, channels + channels % 2 :].copy_(scales.view(torch.uint8))
        self._refuse(peaks)

    @torch.no_grad()
    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, coded)
        tokens, channels = out.shape[0], math.prod(out.shape[1:])
        blocks = _blocks(channels)
        step = _step(out.device, blocks)
        values = _buffer(min(step, tokens), blocks, out.device)
        scales = coded[:, channels + channels % 2 :].contiguous().view(torch.float16).float()[..., None]
        for at in range(0, tokens, step):
            end = min(at + step, tokens)
            some = values[: end - at]
            inner = _flat(some)[:, :channels]
            self._widen(coded[at:end, :channels], inner)
            some.mul_(scales[at:end])
            if out.dtype is torch.float16:
                # The scale was rounded up: the largest code may lie just above the largest float16.
                some.clamp_(-65504.0, 65504.0)
            out[at:end].copy_(inner.view(end - at, *out.shape[1:]))

    def _scale(self, peaks: torch.Tensor, out: torch.Tensor) -> None:
        """Write the scale of each block's largest magnitude, rounded up. Blocks of zeros get the smallest one."""
        peaks = peaks.clamp(min=self.top * _SCALE_MIN)
        out.copy_(peaks / self.top)
        # Exact in float32: a scale has 11 significant bits, and the largest code at most 7.
        out.view(torch.int16).add_(out.float().mul_(self.top) < peaks)

    def _refuse(self, peaks: torch.Tensor) -> None:
        least, most = (torch.tensor(self.top * scale).view(torch.int32).item() for scale in (_SCALE_MIN, _SCALE_MAX))
        outside = (peaks > most) | ((peaks > 0) & (peaks < least))
        # On CUDA this waits for the device, once a call: what must not be stored has to be known before it is.
        if bool(outside.any()):
            raise ValueError(
                f"Codec '{self.name}' holds blocks of zeros and blocks whose largest magnitude is "
                f"{self.top * _SCALE_MIN:.3g} to {self.top * _SCALE_MAX:.3g}, but some value is not finite or outside."
            )

    def _narrow(self, quotients: torch.Tensor, out: torch.Tensor) -> None:
        """Write float32 quotients ``(n, d)`` as codes, uint8. May mutate both."""
        raise NotImplementedError

    def _widen(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write uint8 codes ``(n, d)`` as float32."""
        raise NotImplementedError


class _Int8(_Blocks):
    """Codes -127 to 127, the nearest one (ties to even)."""

    name, top = "int8", 127.0

    def _narrow(self, quotients: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.int8).copy_(quotients.round_())

    def _widen(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.view(torch.int8))


class _Float8(_Blocks):
    """Codes in float8_e4m3fn: 4 significant bits whatever the size, down to 2**-6 of 448."""

    name, top = "fp8_e4m3", 448.0

    def _narrow(self, quotients: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.float8_e4m3fn).copy_(quotients)

    def _widen(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        if codes.device.type != "cpu":
            out.copy_(codes.view(torch.float8_e4m3fn))
            return
        # torch's own conversion is some ten times slower on a CPU. A code's exponent and mantissa, moved into those of
        # a float16, are that value times 2**-8; a float16 holds all of them, with or without an implicit bit.
        bits = codes.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(bits.view(torch.float16)).mul_(256.0)


_KNOWN: dict[str, Codec] = {codec.name: codec for codec in (_Bytes(), _Int8(), _Float8())}
CODECS = tuple(_KNOWN)


def codec_of(name: str) -> Codec:
    """Return the codec called `name`.

    Raises
    ------
    CacheConfigError
        If there is none.
    """
    if name not in _KNOWN:
        raise CacheConfigError(f"Unknown codec {name!r}; known are {', '.join(CODECS)}.")
    return _KNOWN[name]


def _check(codec: Codec, rows: torch.Tensor, coded: torch.Tensor) -> None:
    expected = rows.shape[0], codec.token_bytes(tuple(rows.shape[1:]), rows.dtype)
    if coded.shape != expected or coded.dtype != torch.uint8:
        raise ValueError(
            f"Coded by '{codec.name}', {tuple(rows.shape)} of {rows.dtype} is {expected} of torch.uint8, "
            f"not {tuple(coded.shape)} of {coded.dtype}."
        )


def _blocks(channels: int) -> int:
    return -(-channels // BLOCK)


def _step(device: torch.device, blocks: int) -> int:
    """Tokens to code at once."""
    return max(1, (_AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE) // (blocks * BLOCK))


def _buffer(tokens: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Float32 ``(tokens, blocks, BLOCK)``. Zero, since a block that is not full takes part as a whole."""
    return torch.zeros(tokens, blocks, BLOCK, dtype=torch.float32, device=device)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(rows.shape[0], math.prod(rows.shape[1:]))
