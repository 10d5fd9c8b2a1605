"""An anchor: recurrent and convolution states after a token, saved for replays that begin there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.keys import TOKEN_BYTES
from tailreplay.provenance import Provenance

if TYPE_CHECKING:
    from tailreplay.page import Page


class Anchor:
    """Catalog entry of saved states. Holds names and counts, never tensors.

    It is named by the tokens that lead to it, not by the page that holds the last of them: whichever page a later match
    ends in, the states are right for every sequence that begins with those tokens.

    Attributes
    ----------
    parent : Page
        Last page that lies wholly before `position`, or ends there if `ids` is a full page after it.
    ids : bytes
        Encoded ids of the tokens between `parent`'s end and `position`, at least one.
    slot : int
        Where the store keeps the states; -1 once it is gone.
    provenance : Provenance
        Of the states.
    gap : int
        Tokens that a replay would have to begin with without it: what it is worth.
    rank : float
        The lowest goes first.
    pins : int
        Readers and writers that need it.
    ready : bool
        False while the states are being written.
    listed : bool
        Whether `parent` knows it; if not, it goes when nobody needs it.
    """

    __slots__ = ("gap", "ids", "listed", "order", "parent", "pins", "provenance", "rank", "ready", "slot")

    def __init__(self, parent: Page, ids: bytes, slot: int, provenance: Provenance, order: int) -> None:
        self.parent = parent
        self.ids = ids
        self.slot = slot
        self.provenance = provenance
        self.order = order
        self.gap = 0
        self.rank = 0.0
        self.pins = 0
        self.ready = False
        self.listed = True

    @property
    def position(self) -> int:
        """How many tokens the states have seen."""
        return self.parent.start + self.parent.tokens + len(self.ids) // TOKEN_BYTES

    @property
    def tenant(self) -> bytes:
        """Stands for the salt it is stored under."""
        return self.parent.tenant
