"""Byte sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import CacheConfigError
from tailreplay.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, 123),
        ("123", 123),
        ("1B", 1),
        ("8GiB", 8 * 2**30),
        ("512 MB", 512 * 10**6),
        (" 1.5 kib ", 1536),
        ("0.5TiB", 2**39),
        ("2tb", 2 * 10**12),
        ("1KB", 1000),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8G", "8 parsecs", "8ib", "-1GiB", "1e3", "1,5GiB", "0", "0.1B", 0, -1, 1.5, True, None, [1]]
)
def test_what_is_not_a_size_is_refused(text: Any) -> None:
    with pytest.raises(CacheConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (49.5 * 2**20, "49.5 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_shown(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**55))
def test_what_is_shown_is_read_back_as_nearly_the_same(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)
