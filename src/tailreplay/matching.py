"""Finding the longest prefix of a prompt among the pages of one namespace."""

from __future__ import annotations

from collections.abc import Mapping

from tailreplay.anchors import along
from tailreplay.decisions import Match
from tailreplay.keys import TOKEN_BYTES, page_key
from tailreplay.page import Page
from tailreplay.provenance import ANY, Terms


def longest_match(
    root: Page, pages: Mapping[bytes, Page], page_size: int, ids: bytes, limit: int, terms: Terms
) -> Match:
    """Return the longest resident prefix of `ids`, at most `limit` tokens. Changes nothing.

    Parameters
    ----------
    root : Page
        Of the prompt's namespace.
    pages : mapping
        Every page by key.
    ids : bytes
        Prompt, from `tailreplay.keys.token_bytes`.
    terms : Terms
        Stop at the first page that they do not take.
    """
    node, digest, step = root, root.key, page_size * TOKEN_BYTES
    path: list[Page] = []
    at = 0
    while at + step <= len(ids):
        part = ids[at : at + step]
        page = pages.get(page_key(node.key, digest, part))
        # The ids are compared again, so that a hash collision can never serve another prompt's page.
        if page is None or not page.ready or page.ids != part or not terms.take(page.provenance):
            break
        path.append(page)
        node, at = page, at + step
    tokens = at // TOKEN_BYTES
    stop = "end"
    if tokens < limit:
        rest = ids[at : at + step]
        last, common = node.longest_child(rest, terms)
        if last is not None:
            path.append(last)
            tokens += common
        if tokens < limit:
            stop = _why_no_more(node, rest, common, terms)
    tokens = min(tokens, limit)
    path = path[: -(-tokens // page_size)]
    return Match(tokens, tuple(path), stop, along(path, tokens, ids, page_size))


def _why_no_more(node: Page, rest: bytes, common: int, terms: Terms) -> str:
    """Say why a match ends `common` tokens into `rest`, what follows `node` (see `Match.stop`)."""
    if terms != ANY and node.longest_child(rest, ANY)[1] > common:
        return "approximate"
    return "diverged" if node.continues(rest[: common * TOKEN_BYTES]) else "unseen"
