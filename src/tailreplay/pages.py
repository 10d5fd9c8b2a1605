"""What one page holds: shapes, dtypes and bytes of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from blake3 import blake3


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
        As the engine computes it: parts are stored without loss.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.shape) * self.dtype.itemsize

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
    """

    page_size: int
    kv: tuple[tuple[PartSpec, ...], ...]
    hidden: tuple[PartSpec, ...]

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """All parts: keys and values by layer, then hiddens by group."""
        return tuple(part for pair in self.kv for part in pair) + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values a token."""
        return sum(part.token_bytes for pair in self.kv for part in pair)

    @property
    def hidden_bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of hiddens a token, by stored group."""
        return tuple(part.token_bytes for part in self.hidden)

    @property
    def page_bytes(self) -> int:
        """Bytes of one full page."""
        return self.page_size * (self.kv_bytes_per_token + sum(self.hidden_bytes_per_token))

    @property
    def digest(self) -> str:
        """Hex name of the layout, part of every page's namespace."""
        text = ";".join(f"{part.name}:{part.shape}:{part.dtype}" for part in self.parts)
        digest: str = blake3(f"{self.page_size};{text}".encode()).hexdigest()
        return digest
