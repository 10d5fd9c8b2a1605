"""What came into a catalog and what left it, for those outside who keep a copy of its contents, such as routers."""

from __future__ import annotations

from dataclasses import dataclass

from tailreplay.keys import Namespace
from tailreplay.page import Page


@dataclass(frozen=True, slots=True)
class PageStored:
    """A page can be matched now.

    Attributes
    ----------
    key : bytes
        Its name in the key chain.
    parent : bytes or None
        Key of the page before it; None for the first page of a sequence.
    ids : bytes
        Its token ids (see `tailreplay.keys.token_bytes`); the last page of a sequence may hold fewer than a page's.
    namespace : Namespace
        Salt, adapter and images that a request must share to use it.
    """

    key: bytes
    parent: bytes | None
    ids: bytes
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """A page that was stored is gone."""

    key: bytes


class PageEvents:
    """Collects the net change of a catalog's contents since the last `take`. Every call is O(1) a page.

    A page that comes and goes between two calls of `take` leaves no event. So the log holds at most an event for each page
    that is there and one for each that was there at the last `take`: the catalog's slots bound it, and no event is ever
    lost, however late somebody asks. Bytes that are replaced by better ones of the same tokens are no event, nor are bytes
    found damaged: the page is there until it goes.
    """

    def __init__(self) -> None:
        # Pages under way -> where they belong: a page itself does not know its namespace.
        self._admitted: dict[Page, Namespace] = {}
        self._stored: dict[bytes, PageStored] = {}
        self._removed: dict[bytes, PageRemoved] = {}

    def __len__(self) -> int:
        """Events that `take` would return."""
        return len(self._stored) + len(self._removed)

    def admitted(self, page: Page, namespace: Namespace) -> None:
        """Note where a page that is being written belongs; `stored` or `aborted` follows."""
        self._admitted[page] = namespace

    def aborted(self, page: Page) -> None:
        """Forget a page that was never stored, or note that one that should have been written again is gone."""
        if self._admitted.pop(page, None) is None:
            self.removed(page)

    def stored(self, page: Page) -> None:
        """Note that an admitted page can be matched; nothing is new about one whose damaged bytes were written again."""
        namespace = self._admitted.pop(page, None)
        if namespace is None:
            return
        if self._removed.pop(page.key, None) is None:
            assert page.parent is not None
            parent = None if page.parent.is_root else page.parent.key
            self._stored[page.key] = PageStored(page.key, parent, page.ids, namespace)

    def removed(self, page: Page) -> None:
        """Note that a stored page is gone."""
        if self._stored.pop(page.key, None) is None:
            self._removed[page.key] = PageRemoved(page.key)

    def take(self) -> list[PageStored | PageRemoved]:
        """Return all changes since the last call: removals, children first, then what was stored, parents first."""
        taken: list[PageStored | PageRemoved] = [*self._removed.values(), *self._stored.values()]
        self._removed, self._stored = {}, {}
        return taken
