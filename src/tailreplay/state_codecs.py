"""How saved states are coded: as they are, in bfloat16, or in 8 bits with a scale a head."""

from __future__ import annotations

import math

import torch

from tailreplay.errors import CacheConfigError

_WIDE = (torch.float32, torch.float16)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TOP = 127.0


class BFloat16:
    """The upper half of each float32: 8 significant bits."""

    name, lossy = "bf16", True

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if dtype not in _WIDE:
            raise CacheConfigError(f"Codec '{self.name}' codes float32 and float16, not {dtype}.")
        return 2 * math.prod(shape)

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _finite(self.name, rows)
        out.copy_(rows.to(torch.bfloat16).reshape(rows.shape[0], -1).view(torch.uint8))

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(coded.contiguous().view(torch.bfloat16).view(out.shape))


class Int8Heads:
    """Codes -127 to 127 of each head's state, laid out ``[codes][zero bytes up to four][heads float32 scales]``.

    A head whose state has decayed to almost nothing keeps its own scale, however small.
    """

    name, lossy = "int8_heads", True

    def token_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if dtype not in _FLOATS:
            raise CacheConfigError(f"Codec '{self.name}' codes float32, bfloat16 and float16, not {dtype}.")
        return _even(math.prod(shape)) + 4 * shape[0]

    def encode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _finite(self.name, rows)
        heads = rows.float().reshape(rows.shape[0], rows.shape[1], -1)
        scales = heads.abs().amax(-1) / _TOP
        codes = (heads / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().clamp_(-_TOP, _TOP)
        count = heads[0].numel()
        out.zero_()
        out[:, :count].copy_(codes.to(torch.int8).view(rows.shape[0], count).view(torch.uint8))
        out[:, _even(count) :].copy_(scales.contiguous().view(torch.uint8))

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        tokens, heads = out.shape[:2]
        count = math.prod(out.shape[1:])
        scales = coded[:, _even(count) :].contiguous().view(torch.float32)
        values = coded[:, :count].contiguous().view(torch.int8).view(tokens, heads, -1).float()
        out.copy_((values * scales[..., None]).view(out.shape))


def _even(count: int) -> int:
    return -(-count // 4) * 4


def _finite(name: str, rows: torch.Tensor) -> None:
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"Codec '{name}' holds finite numbers only.")
