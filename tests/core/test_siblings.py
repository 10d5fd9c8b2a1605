"""Siblings against brute force."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tailreplay.keys import token_bytes
from tailreplay.siblings import Siblings
from tests.core.catalog_model import common

tokens = st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), min_size=1, max_size=8).map(tuple)
pages = st.lists(tokens, max_size=30, unique=True)


@dataclass(frozen=True, eq=False)
class Run:
    tokens: tuple[int, ...]

    @property
    def ids(self) -> bytes:
        return token_bytes(self.tokens)


def siblings_of(pages: list[tuple[int, ...]]) -> Siblings[Run]:
    siblings: Siblings[Run] = Siblings()
    for page in pages:
        siblings.add(Run(page))
    return siblings


def starts(tokens: tuple[int, ...], prefix: tuple[int, ...]) -> bool:
    return tokens[: len(prefix)] == prefix


@given(pages, st.data())
def test_they_stay_sorted_and_discard_takes_the_page_itself(pages: list[tuple[int, ...]], data: st.DataObject) -> None:
    siblings = siblings_of(pages)
    gone = data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []
    for page in gone:
        siblings.discard(next(run for run in siblings if run.tokens == page))
    assert [run.tokens for run in siblings] == sorted(set(pages) - set(gone))


@given(pages, tokens)
def test_longest_shares_most_tokens(pages: list[tuple[int, ...]], query: tuple[int, ...]) -> None:
    found, length = siblings_of(pages).longest(token_bytes(query))
    assert length == max((common(page, query) for page in pages), default=0)
    assert common(found.tokens, query) == length if found else length == 0


@given(pages, tokens)
def test_prefixes_of_finds_every_shorter_one(pages: list[tuple[int, ...]], query: tuple[int, ...]) -> None:
    found = [run.tokens for run in siblings_of(pages).prefixes_of(token_bytes(query))]
    shorter = [page for page in pages if starts(query, page) and page != query]
    assert found == sorted(shorter, key=len, reverse=True)


@given(pages, tokens)
def test_continuing_finds_every_longer_one(pages: list[tuple[int, ...]], query: tuple[int, ...]) -> None:
    found = [run.tokens for run in siblings_of(pages).continuing(token_bytes(query))]
    assert found == sorted(page for page in pages if starts(page, query) and page != query)


def test_every_page_goes_on_after_no_tokens() -> None:
    siblings = siblings_of([(1,), (2, 3)])
    assert [run.tokens for run in siblings.continuing(b"")] == [(1,), (2, 3)]
    assert siblings.longest(b"") == (None, 0)
