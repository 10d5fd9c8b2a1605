"""Pages in and out of vLLM's blocks: cut by token where the layout allows, whole blocks where it is opaque."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailreplay.engines.vllm.compat import Geometry, TensorRanks
from tailreplay.engines.vllm.kv_blocks import OpaqueBlocks, TokenBlocks
from tailreplay.engines.vllm.messages import Load, Put
from tailreplay.engines.vllm.runs import run_of, runs
from tailreplay.engines.vllm.settings import Settings
from tailreplay.engines.vllm.store import PageStore
from tailreplay.errors import CacheConfigError
from tailreplay.pages import PageLayout
from tailreplay.tiers.host import HostArena
from tailreplay.topology import Topology

BLOCK, BLOCKS, HEADS, CONTENT, D_MODEL = 528, 12, 2, 6, 8
TOPOLOGY = Topology.from_layer_types(["linear_attention", "full_attention", "linear_attention"])


def geometry(page: int, ranks: int = 1) -> Geometry:
    return Geometry(
        block_size=BLOCK,
        page_size=page,
        attention_group=0,
        attention_layers=("attention",),
        state_groups={1: ("state",)},
        aligned_states=False,
        kv_token_bytes=HEADS * CONTENT * 4,
        d_model=D_MODEL,
        dtype=torch.float32,
        stages=(TOPOLOGY,),
        stage=0,
        tensor_ranks=ranks,
    )


def cache(kind: str) -> torch.Tensor:
    """A layer's cache in the shapes that vLLM's kernels have, every element another number."""
    numbers = torch.arange(BLOCKS * BLOCK * HEADS * CONTENT, dtype=torch.float32)
    if kind == "one head, 48-token kernel blocks":
        return numbers.view(BLOCKS * 11, 48, HEADS * CONTENT).clone()
    if kind == "token-major in memory":
        return numbers.view(BLOCKS, BLOCK, HEADS, CONTENT).clone().movedim(1, 2)
    return numbers.view(BLOCKS * 33, HEADS, 16, CONTENT).clone()


def by_token(tensor: torch.Tensor) -> torch.Tensor:
    """The same with a row a slot."""
    rows = tensor.movedim(2, 1) if tensor.dim() == 4 else tensor
    return rows.reshape(BLOCKS * BLOCK, -1)


def slots_of(blocks: list[int], start: int, stop: int) -> list[int]:
    return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, stop)]


KINDS = ["one head, 48-token kernel blocks", "token-major in memory", "16-token kernel blocks"]


@pytest.mark.parametrize("kind", KINDS)
@given(start=st.integers(0, 1500), count=st.integers(1, 200), draw=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_run_of_tokens_is_gathered(kind: str, start: int, count: int, draw: Any) -> None:
    blocks = draw.sample(range(BLOCKS), 4)
    layer = TokenBlocks("kv", cache(kind), BLOCKS, BLOCK)
    arena = HostArena(PageLayout(64, ((layer.part,),), ()), 4)
    layer.store(blocks[start // BLOCK :], start, count, arena, [2, 3, 0, 1])
    rows = torch.empty(count, *layer.part.shape)
    arena.read(layer.part, [2, 3, 0, 1], 0, count, rows)
    assert torch.equal(rows.reshape(count, -1), by_token(cache(kind))[slots_of(blocks, start, start + count)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("present", "matched"), [(0, 1), (0, 63), (0, 64), (0, 700), (528, 700), (1056, 1300)])
@pytest.mark.parametrize("apart", [False, True])
def test_pages_of_64_tokens_come_back_in_other_blocks(kind: str, present: int, matched: int, apart: bool) -> None:
    """Pages straddle blocks of 528 tokens; what is there already, and what lies past the match, stays as it is."""
    total = 1300
    store = PageStore(Settings(host_bytes=1 << 20), geometry(64), TensorRanks(), {"attention": cache(kind)}, BLOCKS)
    hiddens = torch.randn(total, D_MODEL)
    source, slots = [7, 2, 9], list(range(20, -1, -1)) if apart else list(range(21))
    puts: list[Put] = []
    for page, start in enumerate(range(0, total, 64)):
        count = min(64, total - start)
        blocks = tuple(source[start // BLOCK : -(-(start + count) // BLOCK)])
        puts.append(Put(0, "r", slots[page], blocks, start, count, page))
    for run in [run_of([put], BLOCK) for put in puts] if apart else runs(puts, 64, BLOCK):
        store.put(run, hiddens[None, run.start : run.start + run.count])
    target = [4, 0, 11]
    pages = tuple(slots[: -(-matched // 64)])
    blocks = tuple(target[: -(-matched // BLOCK)])
    load = Load("r", pages, tuple(range(len(pages))), blocks, present, matched, min(matched, 40), (), {})
    assert store.damaged(load) == set()
    live = store_cache(store)
    before = by_token(live).clone()
    store.fill(load)
    after = by_token(live)
    filled = slots_of(target, present, matched)
    assert torch.equal(after[filled], before[slots_of(source, present, matched)])
    untouched = torch.ones(len(after), dtype=torch.bool)
    untouched[filled] = False
    assert torch.equal(after[untouched], before[untouched])
    assert torch.equal(store.hidden(load, 0, 0, matched), hiddens[:matched])


def store_cache(store: PageStore) -> torch.Tensor:
    """The tensor that a store fills, in vLLM's order of dimensions."""
    (layer,) = store._layers
    tensor = layer._cache  # type: ignore[attr-defined]
    return tensor.movedim(2, 1) if tensor.dim() == 4 else tensor


def test_opaque_blocks_go_whole() -> None:
    tensor = cache("16-token kernel blocks")
    store = PageStore(Settings(host_bytes=1 << 20), geometry(BLOCK), TensorRanks(), {"attention": tensor}, BLOCKS)
    before = tensor.view(BLOCKS, -1).clone()
    store.put(run_of([Put(0, "r", 1, (3,), 0, BLOCK, 0)], BLOCK), torch.zeros(1, BLOCK, D_MODEL))
    store.put(run_of([Put(1, "r", 0, (5,), BLOCK, 20, -1)], BLOCK), torch.zeros(1, 20, D_MODEL))
    store.fill(Load("r", (1, 0), (0, -1), (8, 9), 0, BLOCK + 10, 5, (), {}))
    after = tensor.view(BLOCKS, -1)
    assert torch.equal(after[[8, 9]], before[[3, 5]])
    assert OpaqueBlocks("kv", tensor, BLOCKS, BLOCK).part.shape == (HEADS * CONTENT,)


def test_ranks_store_shares_and_gather_them() -> None:
    hiddens = torch.randn(BLOCK, D_MODEL)
    shares = []
    for rank in range(2):
        ranks = TensorRanks(2, rank)
        store = PageStore(
            Settings(host_bytes=1 << 20), geometry(BLOCK, ranks=2), ranks, {"attention": cache("")}, BLOCKS
        )
        store.put(run_of([Put(0, "r", 0, (3,), 0, BLOCK, 1)], BLOCK), ranks.share(hiddens)[None])
        shares.append(store.hidden_shares(Load("r", (0,), (1,), (1,), 0, 100, 100, (), {}), 10, 90)[0])
    assert [share.shape for share in shares] == [(80, D_MODEL // 2)] * 2
    assert torch.equal(torch.cat(shares, dim=-1), hiddens[10:90])


@pytest.mark.parametrize("part", ["keys and values", "hidden of the tail", "hidden before the tail"])
def test_damage_is_found_where_it_matters(part: str) -> None:
    store = PageStore(Settings(host_bytes=1 << 20), geometry(64), TensorRanks(), {"attention": cache("")}, BLOCKS)
    for page in range(4):
        store.put(run_of([Put(0, "r", page, (2,), page * 64, 64, 3 - page)], BLOCK), torch.randn(1, 64, D_MODEL))
    (layer,), (hidden,) = store._layers, store._hidden
    load = Load("r", (0, 1, 2, 3), (3, 2, 1, 0), (1,), 0, 250, 100, (), {})
    broken = {
        "keys and values": (layer.part, 1, 1),
        "hidden of the tail": (hidden, 0, 3),
        "hidden before the tail": (hidden, 2, 1),
    }
    where, slot, page = broken[part]
    store.arena.write(where, [slot], torch.ones(1, *where.shape))
    # Hiddens before the tail are not used, so they may be what they like.
    assert store.damaged(load) == (set() if part == "hidden before the tail" else {page})


def test_a_cache_of_unknown_shape_is_refused() -> None:
    with pytest.raises(CacheConfigError, match="does not know the shape"):
        TokenBlocks("kv", torch.zeros(2, BLOCKS, BLOCK, HEADS, CONTENT), BLOCKS, BLOCK)


def test_hiddens_that_are_gone_are_never_read() -> None:
    store = PageStore(Settings(host_bytes=1 << 20), geometry(64), TensorRanks(), {"attention": cache("")}, BLOCKS)
    load = Load("r", (0, 1), (-1, 0), (1,), 0, 128, 64, (), {})
    with pytest.raises(LookupError, match="not all in host memory"):
        store.hidden(load, 0, 60, 128)
