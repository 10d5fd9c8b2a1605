"""Encoding of token ids, and the key chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import InvalidRequestError, Namespace
from tailreplay.keys import TOKEN_BYTES, common_tokens, page_key, token_bytes

ids = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)), max_size=40)
NAMESPACE = Namespace("model", "layout", 64, "salt", "adapter", ("image",))


@given(ids)
def test_ids_survive_the_encoding(tokens: list[int]) -> None:
    encoded = token_bytes(tokens)
    assert len(encoded) == TOKEN_BYTES * len(tokens)
    assert np.frombuffer(encoded, ">u4").tolist() == tokens


@given(ids)
def test_arrays_are_encoded_as_lists_are(tokens: list[int]) -> None:
    for dtype in (np.int64, np.uint64, np.dtype(">i8")):
        assert token_bytes(np.array(tokens, dtype=dtype)) == token_bytes(tokens)
    assert token_bytes(tuple(tokens)) == token_bytes(tokens)


@given(ids, ids)
def test_bytes_sort_as_tokens_do(a: list[int], b: list[int]) -> None:
    assert (token_bytes(a) < token_bytes(b)) == (a < b)


@given(ids, ids, ids)
def test_common_tokens_counts_the_common_prefix(prefix: list[int], a: list[int], b: list[int]) -> None:
    a, b = prefix + a, prefix + b
    wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(token_bytes(a), token_bytes(b)) == wanted


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        [None],
        [[1]],
        "abc",
        b"abcd",
        np.array([-1]),
        np.array([2**32]),
        np.array([1.5]),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2], [3, 4]]),
        np.array(["1"]),
    ],
)
def test_what_is_not_a_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequestError, match="integers from 0") as error:
        token_bytes(tokens)
    assert error.value.param == "prompt"


def test_no_tokens_are_no_bytes() -> None:
    assert token_bytes([]) == token_bytes(np.array([])) == b""


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, model="other"),
        replace(NAMESPACE, layout="other"),
        replace(NAMESPACE, page_size=128),
        replace(NAMESPACE, salt=""),
        replace(NAMESPACE, adapter="other"),
        replace(NAMESPACE, images=()),
        replace(NAMESPACE, images=("image", "image")),
        # The same characters, divided in another way.
        replace(NAMESPACE, model="modell", layout="ayout"),
        replace(NAMESPACE, salt="", adapter="saltadapter"),
        replace(NAMESPACE, images=('image","x',)),
    ],
)
def test_every_field_makes_another_namespace(other: Namespace) -> None:
    assert other.digest != NAMESPACE.digest
    assert page_key(NAMESPACE.digest, other.digest, b"1234") != page_key(NAMESPACE.digest, NAMESPACE.digest, b"1234")


def test_equal_namespaces_have_one_digest() -> None:
    assert replace(NAMESPACE).digest == NAMESPACE.digest
    assert len(NAMESPACE.digest) == 32


def test_a_key_names_the_whole_history() -> None:
    root = NAMESPACE.digest
    a, b, c = (token_bytes([token]) for token in (1, 2, 3))
    keys = {
        page_key(root, root, a),
        page_key(root, root, b),
        page_key(page_key(root, root, a), root, c),
        page_key(page_key(root, root, b), root, c),
        page_key(page_key(root, root, a), root, b + c),
    }
    assert len(keys) == 5
    assert page_key(root, root, a) == page_key(root, root, token_bytes([1]))
