"""What `tailreplay bench ttft` is asked to measure."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

from tailreplay.errors import InvalidRequestError

TARGET = 1.25
"""A hit's time over that of its operations at the engine's own prefill rate: at most this."""

_LENGTH = re.compile(r"(\d+)(k?)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """One model in one engine.

    Attributes
    ----------
    source : str
        Name of a shape, else "bundled", a folder or a hub id.
    """

    source: str
    is_shape: bool
    engine: str

    @property
    def name(self) -> str:
        """The model's name in reports."""
        return f"{self.source} shape, random weights" if self.is_shape else self.source


@dataclass(frozen=True)
class TtftPlan:
    """The measurements of each target: every length with every ratio and ablation.

    Attributes
    ----------
    cold_repeats : int
        Full prefills a length, at most `repeats`; all ratios and ablations are compared with them.
    host_bytes : str or None
        Limit of the cache; what the longest prefix needs if None.
    """

    targets: tuple[Target, ...]
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    ablations: tuple[str, ...]
    dtype: str = "bfloat16"
    query: int = 64
    repeats: int = 5
    cold_repeats: int = 5
    warmup: int = 1
    host_bytes: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequestError` for what cannot be measured; one sentence."""
        for name, value in (("query", self.query), ("repeats", self.repeats), ("cold-repeats", self.cold_repeats)):
            if value < 1:
                raise InvalidRequestError(f"--{name} must be at least 1, got {value}.")
        if self.warmup < 0:
            raise InvalidRequestError(f"--warmup must be at least 0, got {self.warmup}.")
        if self.cold_repeats > self.repeats:
            raise InvalidRequestError("--cold-repeats must not be more than --repeats: they take turns.")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its one answer token included."""
        return max(self.lengths) + self.query + 1

    def cold_turns(self) -> frozenset[int]:
        """Return the turns in which a full prefill runs: spread evenly, so that drift of the machine meets both."""
        return frozenset(index * self.repeats // self.cold_repeats for index in range(self.cold_repeats))


def parse_length(text: str) -> int:
    """Turn ``8192`` or ``8K`` into a number of tokens."""
    found = _LENGTH.fullmatch(text.strip())
    length = int(found[1]) * (1024 if found[2] else 1) if found else 0
    if length < 1:
        raise ArgumentTypeError(f"'{text}' is not a length: write 8192 or 8K.")
    return length


def parse_ratio(text: str) -> float:
    """Turn ``5%`` or ``0.05`` into a share."""
    try:
        ratio = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ArgumentTypeError(f"'{text}' is not a share of the prefix: write 5% or 0.05, up to 100% or 1.0.")
    return ratio
