"""Repair: what stands behind an approximate hit becomes exact, and makes room at once when somebody waits."""

from __future__ import annotations

import json

import pytest

from tailreplay import HybridLM, PrefixCache
from tailreplay.cli import main
from tailreplay.modes import parse_reuse
from tailreplay.provenance import Start
from tailreplay.storage import Storage
from tests.engine.test_anchors import EXACTLY, floor, restore, state_errors
from tests.engine.tiny_models import CONFIGS, random_ids, tiny_model

DOCUMENT = random_ids(190, seed=4)
PROMPT = [*DOCUMENT[:173], *random_ids(60, seed=5)]


def approximate(name: str = "qwen3_5") -> tuple[HybridLM, list[int]]:
    """A model that has answered `PROMPT` after an approximate hit; and all tokens of that sequence but the last."""
    lm = HybridLM(tiny_model(name), cache=PrefixCache("32MiB", 16), prefill_chunk=48, min_tail=8)
    lm.generate(DOCUMENT, max_new_tokens=1)
    result = lm.generate(PROMPT, max_new_tokens=9)
    assert result.reuse.matched == 173
    return lm, [*PROMPT, *result.tokens[:-1]]


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"lfm2"}))
def test_what_was_approximate_is_exact_after_repair(name: str) -> None:
    lm, ids = approximate(name)
    _, before = restore(lm, [*ids, 3], EXACTLY)
    assert (before.matched, before.stop) == (173, "approximate")
    assert lm.repair() == len(ids) - 173
    sequence, after = restore(lm, [*ids, 3], EXACTLY)
    # All of it, with the states saved at its end.
    assert (after.matched, after.replayed, after.exact) == (len(ids), 0, True)
    true, noise = floor(lm, ids)
    assert max(state_errors(lm, sequence, true)) <= 4 * noise
    assert lm.repair() == 0


def test_the_branch_point_gets_exact_states() -> None:
    lm, _ = approximate()
    lm.repair()
    _, plan = restore(lm, [*DOCUMENT[:173], 44, 45], parse_reuse("replay", 0.05, 8))
    assert (plan.matched, plan.replayed, plan.start, plan.exact) == (173, 0, Start.COMPLETE, True)


def test_repair_makes_room_and_goes_on_later() -> None:
    lm, ids = approximate()
    asked = []

    def waits(after: int) -> bool:
        asked.append(after)
        return len(asked) > after

    # Interrupted in the replay.
    assert lm.repair(lambda: waits(1)) == 0
    assert (len(asked), len(lm.repairs), lm.cache.stats().pinned) == (3, 1, 0), "the last was whether to go on"
    asked.clear()
    # Between two chunks: what was stored by then is kept.
    stored_groups = len(lm.backbone.topology.stored_groups)
    assert lm.repair(lambda: waits(stored_groups + 2)) == 0
    assert len(lm.repairs) == 1
    _, plan = restore(lm, [*ids, 3], EXACTLY)
    assert 173 < plan.matched < len(ids)
    assert lm.repair() == len(ids) - plan.matched
    assert restore(lm, [*ids, 3], EXACTLY)[1].matched == len(ids)


def test_a_repair_ends_where_the_cache_is_full() -> None:
    page = approximate()[0].backbone.layout.page_bytes
    cache = PrefixCache(6 * page, 16, storage=Storage(anchor_bytes=0))
    lm = HybridLM(tiny_model("qwen3_5"), cache=cache, prefill_chunk=48, min_tail=8)
    lm.generate(DOCUMENT[:80], max_new_tokens=1)
    assert lm.generate([*DOCUMENT[:70], *random_ids(160, seed=3)], max_new_tokens=1).reuse.depth == 1
    assert 0 < lm.repair() <= 48 + 48
    assert (len(lm.repairs), cache.stats().pinned) == (0, 0)


def test_weights_that_have_changed_meanwhile_are_not_used_for_it() -> None:
    lm, _ = approximate()
    lm.fingerprint = "other"
    assert lm.repair() == 0
    assert len(lm.repairs) == 0
    assert lm.cache.stats().pinned == 0


def test_what_is_not_stored_or_exact_is_not_repaired() -> None:
    lm = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB", 16), prefill_chunk=48, min_tail=8)
    lm.generate(DOCUMENT, max_new_tokens=1)
    lm.generate(PROMPT, max_new_tokens=1, store=False)
    lm.generate(PROMPT, max_new_tokens=1, replay="exact")
    assert len(lm.repairs) == 0


def test_predicted_times_come_from_what_was_seen() -> None:
    lm, _ = approximate()
    times = lm.generate([*DOCUMENT[:120], 3, 4, 5], max_new_tokens=1, store=False).timings
    assert times.predicted > 0


def test_policies_are_compared_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--length", "250", "--turns", "3", "--tokens", "24", "--documents", "1", "--chunk", "128", "--json"]
    assert main(["bench", "policies", *arguments, "--ratio", "0.3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    of = {(row["policy"], row["turn"]): row for row in rows}
    assert [of["zero, always", turn]["depth"] for turn in (1, 2, 3)] == [1, 2, 3]
    assert [of["zero, 1", turn]["depth"] for turn in (1, 2, 3)] == [1, 2, 2]
    assert [of["zero, never", turn]["computed"] for turn in (1, 2, 3)] == [24, 48, 72]
    assert [of["carried, always", turn]["depth"] for turn in (1, 2, 3)] == [1, 1, 1]
    assert of["mixed, always", 1]["start"] == "mixed"
    assert [of["mixed, always, repair", turn]["exact"] for turn in (1, 2, 3)] == [False, True, True]
    for turn in (1, 2, 3):
        assert of["exact", turn]["exact"]
        assert of["exact", turn]["kl"] < 1e-8 <= of["off", turn]["kl"] + 1e-8
        assert of["zero, always", turn]["kl"] > 1e-7
    assert main(["bench", "policies", "--turns", "0"]) == 2
    assert main(["bench", "policies", "--tokens", "1"]) == 2
    capsys.readouterr()
    assert main(["bench", "policies", "--length", "8000", "--documents", "1"]) == 2
    assert "8,960 tokens are asked for, but the model takes at most 8,192" in capsys.readouterr().err


def test_a_prompt_that_is_sent_again_and_again_becomes_exact() -> None:
    lm = HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("32MiB", 16), prefill_chunk=48, min_tail=8)
    lm.generate(DOCUMENT, max_new_tokens=3)
    again = lm.generate(DOCUMENT, max_new_tokens=3)
    assert (again.reuse.matched, again.reuse.depth) == (189, 1), "the states at its end have seen a token too many"
    lm.repair()
    third = lm.generate(DOCUMENT, max_new_tokens=3)
    assert (third.reuse.exact, third.reuse.replayed, third.reuse.anchor) == (True, 0, 189)
