"""Names of cached pages: a hash chain over token ids, inside a namespace.

``key(page) = blake3(key(parent) || namespace digest || token ids)``, so a key names a page's whole history, and two
models, layouts, salts, adapters or images never share one.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from tailreplay.errors import InvalidRequestError

TOKEN_BYTES = 4
TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Namespace:
    """All that must agree before two requests may share pages.

    Attributes
    ----------
    model : str
        Fingerprint of architecture and weights.
    layout : str
        Digest of the page layout (shapes and dtypes of every part).
    page_size : int
        Tokens a page.
    salt : str
        Secret of a tenant: requests with different salts never share.
    adapter : str
        Name and revision of a LoRA adapter, or "".
    images : tuple of str
        Content hashes of the images behind the prompt's placeholder tokens.
    """

    model: str
    layout: str
    page_size: int
    salt: str = ""
    adapter: str = ""
    images: tuple[str, ...] = ()

    @cached_property
    def tenant(self) -> bytes:
        """8 bytes that stand for the salt, which itself is a secret; all zero without one."""
        return tenant_of(self.salt)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all fields."""
        # JSON of a list keeps field borders: ("ab", "c") and ("a", "bc") differ.
        fields = json.dumps(list(asdict(self).values()), separators=(",", ":"))
        return blake3(fields.encode()).digest()


def tenant_of(salt: str) -> bytes:
    """Return the 8 bytes that stand for a tenant's salt; all zero for none."""
    return blake3(b"tenant:" + salt.encode()).digest(length=8) if salt else bytes(8)


def token_bytes(tokens: TokenIds) -> bytes:
    """Encode token ids as big-endian 32-bit words, so that bytes sort as token sequences do.

    Raises
    ------
    InvalidRequestError
        If an id is negative, too large or not an integer.
    """
    try:
        if isinstance(tokens, np.ndarray):
            return _array_bytes(tokens)
        if isinstance(tokens, (bytes, bytearray)):
            raise TypeError  # `array` would read them as machine words
        words = array("I", tokens)
    except (OverflowError, TypeError):
        raise InvalidRequestError("Token ids must be integers from 0 to 2^32 - 1.", "prompt") from None
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _array_bytes(tokens: np.ndarray) -> bytes:
    if tokens.size == 0:
        return b""
    # A cast would cut fractions off, and flatten a batch, without a word.
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError
    if int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 32:
        raise OverflowError
    return tokens.astype(">u4").tobytes()


def token_list(ids: bytes) -> list[int]:
    """Undo `token_bytes`."""
    tokens: list[int] = np.frombuffer(ids, dtype=">u4").tolist()
    return tokens


def page_key(parent: bytes, namespace: bytes, ids: bytes) -> bytes:
    """Key of the page that holds `ids` (see `token_bytes`) after the page named `parent`."""
    digest: bytes = blake3(parent + namespace + ids).digest()
    return digest


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two encoded token runs."""
    size = min(len(a), len(b))
    # The first differing byte is the highest set byte of the difference: one C operation, no loop over tokens.
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
