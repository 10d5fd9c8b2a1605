"""What the catalog answers: how far a prompt matches, and whether a page may be stored."""

from __future__ import annotations

from dataclasses import dataclass

from tailreplay.anchor import Anchor
from tailreplay.page import Page


@dataclass(frozen=True, slots=True)
class Match:
    """Longest reusable prefix of a prompt.

    Attributes
    ----------
    tokens : int
        Length m. It may end inside the last page.
    pages : tuple of Page
        ``ceil(m / page_size)`` pages, in order.
    stop : str
        Why it went no further: "end" (nothing left to match), "unseen" (the cache holds nothing after it), "diverged"
        (what it holds continues with other tokens), "approximate" (it met a page that is less exact than asked for) or
        "no_hiddens" (there is more, but not the hiddens that a replay from there needs).
    anchors : tuple of Anchor
        States saved at tokens up to m, in ascending order, of any provenance.
    """

    tokens: int
    pages: tuple[Page, ...]
    stop: str
    anchors: tuple[Anchor, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to `Catalog.admit`.

    Attributes
    ----------
    page : Page or None
        The page to go on from, pinned once; None if nothing can be stored (`reason` says why).
    fill : Page or None
        Whose slot must be written and committed: `page` itself, or a stand-in whose better bytes replace those of
        `page` at commit. None if an equally good page is there already.
    reason : str
        "", "full" (every page is pinned or an inner one), "covered" (a longer page that is no worse holds the same
        tokens) or "busy" (another writer is just writing this page).
    """

    page: Page | None
    fill: Page | None = None
    reason: str = ""
