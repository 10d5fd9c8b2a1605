"""A page: a fixed run of tokens of one cached sequence, the unit of identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tailreplay.anchor import Anchor
from tailreplay.keys import TOKEN_BYTES
from tailreplay.provenance import ANY, EXACT, ONLY_EXACT, Provenance, Terms
from tailreplay.siblings import Siblings

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Page:
    """Catalog entry of a page. Holds names and counts, never tensors.

    Attributes
    ----------
    key : bytes
        32-byte name in the key chain.
    ids : bytes
        Encoded token ids; empty for the root of a namespace. Only a sequence's last page may be partial.
    parent : Page or None
        The page before it; None for a root.
    start : int
        Position of its first token in the sequence.
    tenant : bytes
        Stands for the salt it is stored under (see `tailreplay.keys.Namespace.tenant`).
    slot : int
        Where the store keeps its keys and values; -1 for a root.
    hidden_slot : int
        Where the store keeps its hiddens; -1 if it has none.
    pins : int
        Readers and writers that need it; a pinned page is never evicted.
    last_used : int
        Tick of the last match, for eviction.
    hidden_used : int
        Tick of the last plan that reads its hiddens, or of their storing; 0 where neither makes them worth keeping.
    hidden_read : bool
        Whether a plan has read its hiddens, or somebody had to compute them again for want of them.
    children : int
        Pages after it, admitted ones included. A page with children is never evicted.
    ready : bool
        False between admission and commit: the bytes are still being written.
    anchors : Siblings of Anchor or None
        States saved after tokens that follow this page (and after which children of it go on).
    damaged : bool
        Whether the bytes were found to be wrong: never matched until they are written again, though it keeps its place.
    gates : ndarray or None
        What its tokens forget, shape ``(2, layers, heads)`` over layers with a state: sums of log alpha, then each head's
        share of its layer's squared state norm. None where nobody knows.
    """

    __slots__ = (
        "_exact", "_inexact", "anchors", "children", "damaged", "gates", "hidden_read", "hidden_slot", "hidden_used", "ids",
        "key", "last_used", "order", "parent", "pins", "provenance", "ready", "slot", "start", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        key: bytes,
        ids: bytes,
        parent: Page | None,
        slot: int,
        provenance: Provenance,
        order: int,
        hidden_slot: int = -1,
        tenant: bytes = b"",
    ) -> None:
        self.key = key
        self.ids = ids
        self.parent = parent
        self.start: int = parent.start + parent.tokens if parent is not None else 0
        self.tenant: bytes = tenant if parent is None else parent.tenant
        self.slot = slot
        self.hidden_slot = hidden_slot
        self.provenance = provenance
        self.order = order
        self.pins = 0
        self.last_used = self.hidden_used = 0
        self.hidden_read = False
        self.children = 0
        self.ready = False
        self.damaged = False
        self.anchors: Siblings[Anchor] | None = None
        self.gates: NDArray[Any] | None = None
        # Made when the first child comes: most pages are leaves or have one child.
        self._exact: Siblings[Page] | None = None
        self._inexact: dict[Provenance, Siblings[Page]] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def has_hidden(self) -> bool:
        """Whether its hiddens are there, too."""
        return self.hidden_slot >= 0

    @property
    def is_root(self) -> bool:
        """Whether this is a namespace's root."""
        return self.parent is None

    @property
    def is_evictable(self) -> bool:
        """Whether nothing needs the page: written, no pins, no children, not a root."""
        return (self.ready or self.damaged) and self.pins == 0 and self.children == 0 and not self.is_root

    @property
    def is_strippable(self) -> bool:
        """Whether nothing needs its hiddens just now; unlike the page itself, they may go from amid a sequence."""
        return self.ready and self.pins == 0 and self.hidden_slot >= 0

    def siblings(self, provenance: Provenance) -> Siblings[Page]:
        """Return the ready children of this provenance, to read or to change."""
        if provenance.is_exact:
            if self._exact is None:
                self._exact = Siblings()
            return self._exact
        if self._inexact is None:
            self._inexact = {}
        return self._inexact.setdefault(provenance, Siblings())

    def longest_child(self, ids: bytes, terms: Terms) -> tuple[Page | None, int]:
        """Return the ready child that shares most leading tokens with `ids`, and how many; the best origin wins a tie."""
        best: tuple[Page | None, int] = (None, 0)
        for siblings in self._children(terms):
            found = siblings.longest(ids)
            if found[1] > best[1]:
                best = found
        return best

    def continues(self, ids: bytes) -> bool:
        """Whether a ready child begins with `ids` and goes on."""
        return any(True for siblings in self._children(ANY) for _ in siblings.continuing(ids))

    def holds(self, ids: bytes) -> bool:
        """Whether a ready child begins with `ids`."""
        return any(siblings.holds(ids) for siblings in self._children(ANY))

    def covers(self, ids: bytes, provenance: Provenance) -> bool:
        """Whether a ready child begins with `ids`, goes on, and is no worse than `provenance`."""
        for siblings in self._children(ONLY_EXACT if provenance.is_exact else ANY):
            if any(child.provenance <= provenance for child in siblings.continuing(ids)):
                return True
        return False

    def prefixes_of(self, ids: bytes) -> list[Page]:
        """Return the ready children whose tokens are a proper prefix of `ids`."""
        return [shorter for siblings in self._children(ANY) for shorter in siblings.prefixes_of(ids)]

    def _children(self, terms: Terms) -> Iterator[Siblings[Page]]:
        """Yield the ready children that `terms` take, by provenance, best first."""
        if self._exact:
            yield self._exact
        if self._inexact:
            for provenance in sorted(self._inexact):
                if self._inexact[provenance] and terms.take(provenance):
                    yield self._inexact[provenance]


def root_page(key: bytes, order: int, tenant: bytes) -> Page:
    """Return the root of a namespace: no tokens, no slot, ready."""
    page = Page(key, b"", None, -1, EXACT, order, tenant=tenant)
    page.ready = True
    return page
