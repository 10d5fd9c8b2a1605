"""vLLM's own prefix cache left on: it never hands out an approximate state, and both caches work together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm_live.conftest import Engine, error
from tests.vllm_live.test_mean import mean_error

DRAW = random.Random(4)
OTHER = [5, 6, 7]


def tokens(count: int) -> list[int]:
    return [DRAW.randrange(3, 1000) for _ in range(count)]


@pytest.fixture(scope="module")
def both(slow_model: Path) -> Iterator[Engine]:
    """An engine with both caches."""
    running = Engine(slow_model, {"enable_prefix_caching": True}, host_bytes="64MiB", min_match=1)
    assert running.geometry.aligned_states
    yield running
    running.close()


def store(engine: Engine, ids: list[int]) -> None:
    engine.run(ids, mode="off")
    engine.run(OTHER, mode="off", store=False)


def forget_own(engine: Engine) -> None:
    """Empty vLLM's own prefix cache."""
    assert engine.llm.reset_prefix_cache()


@pytest.mark.parametrize("name", ["33", "B-1", "B", "B+1", "777", "2B"])
def test_an_exact_hit_has_the_states_of_a_cold_run(both: Engine, name: str) -> None:
    block = both.block
    m = {"B-1": block - 1, "B": block, "B+1": block + 1, "2B": 2 * block}.get(name) or int(name)
    base = tokens(1200)
    both.run(base, chunk=400, mode="off")
    both.run(OTHER, mode="off", store=False)
    prompt = [*base[:m], 3 + (base[m] - 2) % 997, 9, 9]
    forget_own(both)
    cold = both.run(prompt, mode="off", store=False)
    forget_own(both)
    other = both.run(prompt, chunk=max(16, m // 3), mode="off", store=False)
    forget_own(both)
    hit = both.run(prompt, mode="exact", store=False)
    assert hit.report["matched"] == m
    assert hit.report["replayed"] == m - (hit.report["anchor"] or 0)
    # In this mode vLLM ends a prompt's chunks where its blocks end.
    assert hit.report["anchor"] == (m // block * block or None)
    assert error(hit, cold) < max(2 * error(other, cold), 0.02)


@pytest.mark.parametrize("aligned", [True, False])
def test_approximate_states_are_never_handed_out(both: Engine, aligned: bool) -> None:
    """A hit at a block's end, then plain requests over the same tokens: what they get is exact."""
    block = both.block
    m = 2 * block if aligned else 2 * block + 5
    base = tokens(m + 10)
    store(both, base)
    longer = [*base[:m], *tokens(2 * block)]
    forget_own(both)
    cold = both.run([*longer, 4], mode="off", store=False)
    forget_own(both)
    hit = both.run(longer, mode="replay", ratio=0.05, start="zero", store=False)
    assert not hit.report["exact"]
    for _ in range(3):
        plain = both.run([*longer, 4], mode="off", store=False)
    assert plain.cached >= block, "vLLM's own cache is used by plain requests"
    assert error(plain, cold) < 0.05
    assert error(hit, cold) > 0.1, "the hit itself is far off, so that handing it out would show"


def test_exact_hits_are_published_rightly(both: Engine) -> None:
    block = both.block
    base = tokens(2 * block + 50)
    store(both, base)
    forget_own(both)
    prompt = [*base[: 2 * block], 8, 8, 8]
    cold = both.run(prompt, mode="off", store=False)
    forget_own(both)
    assert both.run(prompt, mode="exact", store=False).report["exact"]
    again = both.run([*prompt, 5], mode="off", store=False)
    assert again.cached >= block
    same = both.run([*prompt, 5], mode="off", store=False)
    assert error(again, same) < 0.05
    assert cold.report["matched"] == 0


def test_a_nearby_exact_state_of_vllms_own_is_taken(both: Engine) -> None:
    """Where vLLM has an exact state a few tokens before the match, computing those is as cheap as a replay."""
    block = both.block
    base = tokens(2 * block + 30)
    for _ in range(3):
        store(both, base)
    hit = both.run([*base, 9, 9], mode="replay", ratio=0.05, start="zero")
    assert hit.report["source"] == "engine"
    assert hit.report["matched"] == hit.cached == 2 * block
    assert hit.report["exact"]
    # What was computed after it is stored again without a gap.
    both.run(OTHER, mode="off", store=False)
    forget_own(both)
    assert both.run([*base, 9, 9, 4], mode="exact", store=False).report["matched"] == len(base) + 2


@pytest.mark.parametrize("extra", [0, 70])
def test_states_are_saved_from_the_block_where_they_lie(both: Engine, extra: int) -> None:
    """Here that is the block of the last token, and vLLM publishes what a hit writes there."""
    block = both.block
    base = tokens(2 * block + extra)
    store(both, base)
    longer = [*base, *tokens(block)]
    forget_own(both)
    cold = both.run(longer, mode="off", store=False)
    forget_own(both)
    hit = both.run(longer, mode="exact", max_tokens=4)
    assert (hit.report["matched"], hit.report["anchor"], hit.report["replayed"]) == (len(base), len(base), 0)
    again = both.run([*longer, 4], mode="off", store=False)
    assert again.cached >= block, "vLLM's own cache has what the hit left"
    both.run(OTHER, mode="off", store=False)
    forget_own(both)
    turn = both.run([*longer, *hit.tokens, 8], mode="exact", store=False)
    assert turn.report["anchor"] == turn.report["matched"] == len(longer) + 3
    forget_own(both)
    plain = both.run([*longer, 4], mode="off", store=False)
    assert error(again, plain) < 0.05
    forget_own(both)
    assert error(turn, both.run([*longer, *hit.tokens, 8], mode="off", store=False)) < 0.05
    assert error(both.run(longer, mode="exact", store=False), cold) < 0.05


def test_the_mean_state_is_made_though_both_caches_have_the_text(both: Engine) -> None:
    base, text = tokens(600), tokens(400)
    store(both, base)
    both.run(text, chunk=64, mode="off")  # it is in vLLM's own cache, too
    for _ in range(2):
        both.run(text, calibrate=True)
    try:
        assert mean_error(both, text) < 0.03
        forget_own(both)
        prompt = [*base[: both.block - 5], 9, 9]
        assert both.run(prompt, mode="replay", ratio=0.25, store=False).report["start"] == "mean"
    finally:
        both.deciding.reset()
