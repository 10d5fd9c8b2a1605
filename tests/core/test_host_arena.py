"""The page layout, and the arena that keeps pages in host memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import CacheConfigError
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.tiers.host import HostArena
from tests.core.tiny import LAYOUT, PAGE

K = PartSpec("k0", (2, 3), torch.bfloat16)
V = PartSpec("v0", (2, 5), torch.float32)
H = PartSpec("h0", (7,), torch.float16)
UNEVEN = PageLayout(PAGE, ((K, V),), (H,))


def numbers(part: PartSpec, count: int, first: int = 0) -> torch.Tensor:
    """`count` tokens of `part`; token i is full of ``first + i``, exact in every dtype used here below 256."""
    ids = torch.arange(first, first + count).to(part.dtype)
    return ids.view(count, *[1] * len(part.shape)).expand(count, *part.shape)


def test_a_layout_knows_its_bytes() -> None:
    assert [part.name for part in UNEVEN.parts] == ["k0", "v0", "h0"]
    assert [part.token_bytes for part in UNEVEN.parts] == [12, 40, 14]
    assert UNEVEN.kv_bytes_per_token == 52
    assert UNEVEN.hidden_bytes_per_token == (14,)
    assert UNEVEN.page_bytes == PAGE * 66
    assert HostArena(UNEVEN, 5).nbytes == 5 * PAGE * 66
    assert K.token(torch.device("cpu")).shape == (2, 3)
    assert K.token(torch.device("cpu")).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "other",
    [
        PageLayout(32, UNEVEN.kv, UNEVEN.hidden),
        PageLayout(PAGE, ((V, K),), UNEVEN.hidden),
        PageLayout(PAGE, UNEVEN.kv, ()),
        PageLayout(PAGE, UNEVEN.kv, (PartSpec("h1", (7,), torch.float16),)),
        PageLayout(PAGE, UNEVEN.kv, (PartSpec("h0", (8,), torch.float16),)),
        PageLayout(PAGE, UNEVEN.kv, (PartSpec("h0", (7,), torch.bfloat16),)),
    ],
)
def test_every_field_makes_another_digest(other: PageLayout) -> None:
    assert other.digest != UNEVEN.digest
    assert PageLayout(PAGE, ((K, V),), (H,)).digest == UNEVEN.digest


@pytest.mark.parametrize("part", UNEVEN.parts, ids=lambda part: part.name)
@pytest.mark.parametrize("slots", [[0], [3], [0, 1, 2], [4, 1, 2], [2, 1, 0], [0, 2, 4, 1, 3]])
@pytest.mark.parametrize("short", [0, 1, PAGE - 1])
def test_pages_come_back_from_whatever_slots(part: PartSpec, slots: list[int], short: int) -> None:
    arena = HostArena(UNEVEN, 5)
    count = len(slots) * PAGE - short
    tokens = numbers(part, count)
    arena.write(part, slots, tokens)
    out = torch.empty_like(tokens)
    arena.read(part, slots, 0, count, out)
    assert torch.equal(out, tokens)


@given(slots=st.permutations(range(5)), span=st.tuples(st.integers(0, 5 * PAGE), st.integers(0, 5 * PAGE)))
def test_any_run_of_tokens_can_be_read(slots: list[int], span: tuple[int, int]) -> None:
    start, stop = sorted(span)
    arena = HostArena(UNEVEN, 5)
    arena.write(H, slots, numbers(H, 5 * PAGE))
    out = torch.empty(stop - start, *H.shape, dtype=H.dtype)
    arena.read(H, slots, start, stop, out)
    assert torch.equal(out, numbers(H, stop - start, start))


def test_a_write_touches_its_own_slots_and_part_only() -> None:
    arena = HostArena(UNEVEN, 4)
    for part in UNEVEN.parts:
        arena.write(part, range(4), numbers(part, 4 * PAGE))
    arena.write(K, [2], numbers(K, 3, first=200))
    for part in UNEVEN.parts:
        wanted = numbers(part, 4 * PAGE).clone()
        if part is K:
            wanted[2 * PAGE : 2 * PAGE + 3] = numbers(K, 3, first=200)
        out = torch.empty_like(wanted)
        arena.read(part, range(4), 0, 4 * PAGE, out)
        assert torch.equal(out, wanted)


def test_reading_and_writing_strided_tensors() -> None:
    # Engines hand out views of larger buffers, heads first.
    arena = HostArena(UNEVEN, 2)
    heads_first = numbers(V, 2 * PAGE).clone().transpose(0, 1).contiguous()
    arena.write(V, [1, 0], heads_first.transpose(0, 1))
    out = torch.zeros_like(heads_first)
    arena.read(V, [1, 0], 0, 2 * PAGE, out.transpose(0, 1))
    assert torch.equal(out, heads_first)


def test_memory_that_cannot_be_had_is_said_in_one_sentence() -> None:
    with pytest.raises(CacheConfigError, match="lower its size"):
        HostArena(LAYOUT, 2**50)


def test_a_page_that_changed_since_it_was_sealed_is_named() -> None:
    arena = HostArena(UNEVEN, 4)
    for slot in range(3):
        for part in UNEVEN.parts:
            arena.write(part, [slot], numbers(part, 5, slot))
            arena.seal(part, slot, 5)
    assert arena.damaged(K, [0, 1, 2]) == []
    arena.write(K, [1], numbers(K, 5, 100))
    assert arena.damaged(K, [0, 1, 2]) == [1]
    assert arena.damaged(V, [0, 1, 2]) == []
    assert arena.damaged(K, [3]) == [3], "a page that was never sealed"
    arena.write(H, [2], numbers(H, 6, 100)[5:])
    arena.write(H, [2], numbers(H, 5, 2))
    assert arena.damaged(H, [2]) == [], "what lies past the sealed tokens does not count"
