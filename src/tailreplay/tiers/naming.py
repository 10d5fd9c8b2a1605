"""Names of pages outside host memory: by rank, and by their first tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3

from tailreplay.keys import TOKEN_BYTES, Namespace
from tailreplay.page import Page
from tailreplay.page_format import WHOLE, encode_gates
from tailreplay.provenance import Provenance

_HINTS_A_PAGE = 16


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What names a page wherever it is; crosses processes.

    Attributes
    ----------
    key, parent, namespace : bytes
        See `tailreplay.page_format.PageHeader`.
    tenant : bytes
        8 bytes that stand for the salt.
    start : int
        Position of its first token in the sequence.
    ids : bytes
        Encoded token ids.
    gates : str
        What its tokens forget, as in the header. No part of its name.
    """

    key: bytes
    parent: bytes
    namespace: bytes
    tenant: bytes
    start: int
    ids: bytes
    provenance: Provenance
    gates: str = field(default="", compare=False)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // TOKEN_BYTES


def record_of(page: Page, namespace: Namespace) -> PageRecord:
    """Return what names a page of the catalog."""
    assert page.parent is not None
    return PageRecord(
        page.key,
        page.parent.key,
        namespace.digest,
        page.tenant,
        page.start,
        page.ids,
        page.provenance,
        encode_gates(page.gates),
    )


def rank_key(key: bytes, rank: str) -> bytes:
    """Name of one rank's share of a page."""
    return key if rank == WHOLE else blake3(key + rank.encode()).digest()


def hint(parent: bytes, namespace: bytes, ids: bytes, rank: str = WHOLE) -> bytes:
    """Name of whatever page follows `parent` and begins with `ids`."""
    return blake3(b"hint" + parent + namespace + rank.encode() + ids).digest()


def hints_of(record: PageRecord, page_size: int, rank: str = WHOLE) -> tuple[bytes, ...]:
    """Return the names of a page's beginnings under which it is put."""
    step = _hint_step(page_size)
    lengths = range(step, record.tokens + 1, step) or (record.tokens,)
    return tuple(hint(record.parent, record.namespace, record.ids[: length * TOKEN_BYTES], rank) for length in lengths)


def hints_for(parent: bytes, namespace: bytes, rest: bytes, page_size: int, rank: str = WHOLE) -> list[bytes]:
    """Return the names under which a page that shares a beginning with `rest` may have been put, longest first.

    `rest` is what follows `parent` in a prompt. The page found by the longest name shares at least that much; what is lost
    against the best page there is less than a sixteenth of a page.
    """
    step, tokens = _hint_step(page_size), min(len(rest) // TOKEN_BYTES, page_size)
    lengths = [*range(tokens - tokens % step, 0, -step), *range(min(tokens, step - 1), 0, -1)]
    return [hint(parent, namespace, rest[: length * TOKEN_BYTES], rank) for length in lengths]


def _hint_step(page_size: int) -> int:
    return max(16, page_size // _HINTS_A_PAGE)
