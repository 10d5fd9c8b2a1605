"""Where a running sequence stores its next page."""

from __future__ import annotations

from dataclasses import dataclass

from tailreplay.keys import Namespace
from tailreplay.page import Page


@dataclass
class Chain:
    """Where a sequence's next page goes. Made by `PrefixCache.open`, advanced by `insert`, ended by `close`.

    Attributes
    ----------
    tokens : int
        Stored so far, a multiple of the page size until the last, partial page.
    stopped : str
        Why no more is stored ("full", "covered", "busy", "partial", "failed", "ended"); "" while it goes on.
    """

    namespace: Namespace
    page: Page
    tokens: int
    stopped: str = ""
