"""What one page holds: shapes, dtypes and bytes of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from blake3 import blake3

from tailreplay.codecs import codec_of


@dataclass(frozen=True)
class PartSpec:
    """One tensor part of a page, token-major: shape ``(page_size, *shape)``.

    Attributes
    ----------
    name : str
        ``k3``/``v3``: keys and values of attention layer 3; ``h1``: hiddens of group 1.
    shape : tuple of int
        Of one token: ``(kv_heads, head_dim)`` or ``(d_model,)``.
    dtype : torch.dtype
        As the engine computes it.
    codec : str
        How host memory holds it (see `tailreplay.codecs`); "none" is without loss.
    whole : bool
        Whether only whole pages have a meaning, since the engine's kernels alone know how tokens lie in them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: str = "none"
    whole: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in host memory."""
        if self.codec == "none":
            return math.prod(self.shape) * self.dtype.itemsize
        return codec_of(self.codec).token_bytes(self.shape, self.dtype)

    @property
    def lossy(self) -> bool:
        """Whether host memory holds other numbers than the engine computed."""
        return codec_of(self.codec).lossy

    def token(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialised token of this part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def check(self, tensor: torch.Tensor, tokens: int) -> None:
        """Raise `ValueError` unless `tensor` holds this part of `tokens` tokens, bit by bit as it will be stored."""
        if tensor.shape != (tokens, *self.shape) or tensor.dtype != self.dtype:
            raise ValueError(
                f"Part '{self.name}' of {tokens} tokens is {(tokens, *self.shape)} of {self.dtype}, "
                f"not {tuple(tensor.shape)} of {tensor.dtype}."
            )


@dataclass(frozen=True)
class PageLayout:
    """Parts of every page of one model.

    Attributes
    ----------
    page_size : int
        Tokens a page.
    kv : tuple of tuple of PartSpec
        Keys and values, one entry per attention layer, in layer order: a part for each, or one part that holds both
        where only the engine's kernels know how they lie.
    hidden : tuple of PartSpec
        Hiddens, one per stored group, in group order.
    anchor : tuple of PartSpec
        Tensors of a saved state, each of its whole shape: not part of any page, nor of what names the layout.
    """

    page_size: int
    kv: tuple[tuple[PartSpec, ...], ...]
    hidden: tuple[PartSpec, ...]
    anchor: tuple[PartSpec, ...] = ()

    @property
    def kv_parts(self) -> tuple[PartSpec, ...]:
        """Keys and values by layer."""
        return tuple(part for pair in self.kv for part in pair)

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """All parts: keys and values by layer, then hiddens by group."""
        return self.kv_parts + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values a token."""
        return sum(part.token_bytes for pair in self.kv for part in pair)

    @property
    def hidden_bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of hiddens a token, by stored group."""
        return tuple(part.token_bytes for part in self.hidden)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hiddens of one full page."""
        return self.page_size * sum(self.hidden_bytes_per_token)

    @property
    def page_bytes(self) -> int:
        """Bytes of one full page."""
        return self.page_size * self.kv_bytes_per_token + self.hidden_bytes

    @property
    def anchor_bytes(self) -> int:
        """Bytes of one saved state."""
        return sum(part.token_bytes for part in self.anchor)

    @property
    def lossy(self) -> bool:
        """Whether host memory holds other numbers than the engine computed."""
        return any(part.lossy for part in self.parts)

    def with_codecs(self, hidden: str = "none", kv: str = "none", anchor: str = "none") -> PageLayout:
        """Return the same parts, held in these codecs.

        Raises
        ------
        CacheConfigError
            If a codec is unknown or cannot hold a part.
        """
        layout = PageLayout(
            self.page_size,
            tuple(tuple(replace(part, codec=kv) for part in pair) for pair in self.kv),
            tuple(replace(part, codec=hidden) for part in self.hidden),
            tuple(replace(part, codec=state_codec(part, anchor)) for part in self.anchor),
        )
        _ = layout.page_bytes
        return layout

    @property
    def digest(self) -> str:
        """Hex name of the layout, part of every page's namespace; however the numbers are coded, they mean the same."""
        text = ";".join(f"{part.name}:{part.shape}:{part.dtype}" for part in self.parts)
        digest: str = blake3(f"{self.page_size};{text}".encode()).hexdigest()
        return digest


def state_codec(part: PartSpec, wanted: str) -> str:
    """Return the codec of one tensor of a saved state: only recurrent ones, by head, are worth one."""
    if wanted == "none" or len(part.shape) < 3 or part.dtype.itemsize < 4:
        return "none"
    return {"int8": "int8_heads"}.get(wanted, wanted)
