"""Which states are saved, and what hits begin with: decisions of the scheduler's side, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailreplay.anchor import Anchor
from tailreplay.engines.vllm.anchor_store import anchor_room
from tailreplay.engines.vllm.anchoring import LEAST_GAP, warn_of_chunks
from tailreplay.engines.vllm.messages import Load, Save, StepMetadata, StepReport
from tailreplay.engines.vllm.scheduler import SchedulerSide
from tailreplay.engines.vllm.settings import Settings, parse_settings
from tailreplay.engines.vllm.stats import GAUGES, SERIES, TailReplayStats
from tailreplay.pages import PartSpec
from tailreplay.storage import Storage
from tests.vllm_live.test_scheduler import IDLE, geometry, preempting, request

STATE = PartSpec("state0", (2, 4, 4), torch.float32)
BLOCKS = (list(range(10, 40)), [3])
EXACT = {"kv_transfer_params": {"tailreplay": {"mode": "exact"}}}
IDS = [3 + 7 * i % 900 for i in range(1400)]


def make(ranks: int = 1, **settings: Any) -> SchedulerSide:
    shape = geometry(state_parts=(STATE,), tensor_ranks=ranks)
    return SchedulerSide(Settings(**{"host_bytes": 1 << 20, "min_match": 1, **settings}), shape, "model")


def scheduled(asked: SimpleNamespace, start: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=[SimpleNamespace(req_id=asked.request_id, num_computed_tokens=start)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={asked.request_id: count},
    )


class Run:
    """One request, step by step, on a worker that does all it is told at once."""

    def __init__(self, side: SchedulerSide, asked: SimpleNamespace) -> None:
        self.side, self.asked = side, asked
        self.load: Load | None = None
        self.saves: list[Save] = []
        self.matched = side.match(asked, 0)[0] or 0
        side.allocated(asked, BLOCKS, self.matched)
        if self.matched:
            (self.load,) = self._obey(side.step(IDLE, lambda _: BLOCKS), (asked.request_id,)).loads
        asked.num_computed_tokens = self.matched

    def compute(self, count: int) -> list[Save]:
        """Compute the next tokens in one step; returns the saves of it."""
        step = scheduled(self.asked, self.asked.num_computed_tokens, count)
        self.asked.num_computed_tokens += count
        return self._obey(self.side.step(step, lambda _: BLOCKS)).saves

    def answer(self, *tokens: int) -> None:
        """Decode: each token is sampled, and the one before it computed."""
        for token in tokens:
            self.asked.all_token_ids.append(token)
            self.asked.num_tokens += 1
            self.compute(1)

    def finish(self) -> list[Save]:
        """End it; returns the saves of its end."""
        self.side.finished(self.asked, BLOCKS)
        return self._obey(self.side.step(IDLE, lambda _: BLOCKS)).saves

    def _obey(self, meta: StepMetadata, received: tuple[str, ...] = ()) -> StepMetadata:
        self.saves += meta.saves
        tags = [save.tag for save in meta.saves]
        tags += [load.save.tag for load in meta.loads if load.save is not None]
        report = StepReport(stored={put.tag for put in meta.puts}, saved=dict.fromkeys(tags, (1, 0)))
        self.side.update(report, received, ())
        return meta


def whole(side: SchedulerSide, asked: SimpleNamespace) -> Run:
    run = Run(side, asked)
    run.compute(asked.num_tokens - asked.num_computed_tokens)
    run.finish()
    assert side.catalog.pinned == 0
    assert all(not anchor.pins for anchor in anchors(side))
    return run


def anchors(side: SchedulerSide) -> list[Anchor]:
    pages = [*side.catalog.resident(), *side.catalog._roots.values()]
    return sorted((a for page in pages for a in page.anchors or ()), key=lambda anchor: anchor.position)


def positions(side: SchedulerSide) -> list[int]:
    return [anchor.position for anchor in anchors(side) if anchor.ready]


def test_a_prompts_end_and_its_answers_end_are_saved_and_the_next_turn_replays_nothing() -> None:
    side = make()
    turn = Run(side, request("first", IDS[:300]))
    assert [save.states for save in turn.compute(300)] == [{1: 3}]
    turn.answer(7, 8, 9)
    assert len(turn.saves) == 1, "not while it decodes"
    turn.asked.all_token_ids.append(10)
    turn.asked.num_tokens += 1
    assert len(turn.finish()) == 1
    assert positions(side) == [300, 303]
    asked = request("second", [*turn.asked.all_token_ids, 5, 6], **EXACT)
    run = Run(side, asked)
    assert run.matched == 303, "the last sampled token was never computed"
    assert run.load is not None
    assert (run.load.tail, run.load.tail_ids) == (0, ())
    assert run.load.anchor == anchors(side)[1].slot
    assert side._requests["second"].report["anchor"] == 303
    assert side._requests["second"].report["start"] == "complete"


def test_steps_under_way_at_an_answers_end_are_counted_or_nothing_is_saved() -> None:
    """vLLM may have begun the step after a stop token before it knew: the states have seen that token, too."""
    side = make()
    turn = Run(side, request("first", IDS[:300]))
    turn.compute(300)
    turn.answer(7, 8)
    assert turn.asked.num_computed_tokens == turn.asked.num_tokens
    turn.finish()
    assert positions(side) == [300, 302]
    assert Run(side, request("second", [*turn.asked.all_token_ids, 5], **EXACT)).matched == 302
    for steps in (1, 2):  # a token that nobody has seen; and one that was not scheduled through us
        turn = Run(side, request(f"late {steps}", IDS[20:320]))
        turn.compute(300 - turn.matched)
        if steps == 1:
            turn.compute(1)
        else:
            turn.asked.num_computed_tokens -= 1
        assert turn.finish() == []


def test_chunks_that_are_worth_it_are_saved() -> None:
    side = make()
    turn = Run(side, request("first", IDS))
    for count in (LEAST_GAP, 16, LEAST_GAP, 700, len(IDS) - 2 * LEAST_GAP - 716):
        turn.compute(count)
    assert positions(side) == [LEAST_GAP, 2 * LEAST_GAP + 16, 2 * LEAST_GAP + 716, len(IDS)]
    side = make(anchor_interval=16)
    turn = Run(side, request("first", IDS))
    for count in (16, 8, 8):
        turn.compute(count)
    assert positions(side) == [16, 32]


def test_a_branch_is_saved_once_it_was_replayed() -> None:
    side = make()
    whole(side, request("first", IDS[:900]))
    second = whole(side, request("second", [*IDS[:500], *IDS[1000:1200]], **EXACT))
    assert second.load is not None
    assert (second.load.tail, second.load.anchor) == (500, -1)
    assert second.load.save is not None
    assert positions(side) == [500, 700, 900]
    third = whole(side, request("third", [*IDS[:500], *IDS[1200:1300]], **EXACT))
    assert third.load is not None
    assert (third.load.tail, third.load.save) == (0, None)
    approximate = {"kv_transfer_params": {"tailreplay": {"mode": "replay", "ratio": 0.1, "start": "zero"}}}
    fourth = whole(side, request("fourth", [*IDS[:700], 5, 6], **approximate))
    assert fourth.load is not None
    assert fourth.load.tail == 70
    assert fourth.load.save is None, "approximate states are nobody's starting point"


def test_a_stale_state_is_carried_or_not_as_the_request_says() -> None:
    side = make()
    turn = Run(side, request("first", IDS))
    turn.compute(600)
    turn.compute(800)
    turn.finish()
    for start, tail, anchor, complete in (
        ("carried", 70, 600, "carried"),
        ("anchor", 70, None, "zero"),
        ("zero", 70, None, "zero"),
    ):
        given = {"mode": "replay", "ratio": 0.05, "start": start, "store": False}
        asked = request(f"{start}", [*IDS[:1390], 5, 6], kv_transfer_params={"tailreplay": given})
        run = Run(side, asked)
        report = side._requests[start].report
        assert run.load is not None
        assert (run.load.tail, report["anchor"], report["start"]) == (tail, anchor, complete)
        assert (run.load.anchor >= 0) == (anchor is not None)
        run.finish()


@pytest.mark.parametrize("good", [True, False])
def test_an_anchor_counts_once_every_rank_has_it_and_keeps_its_slot_until_then(good: bool) -> None:
    side = make(ranks=2)
    asked = request("first", IDS[:300])
    side.match(asked, 0)
    side.allocated(asked, BLOCKS, 0)
    meta = side.step(scheduled(asked, 0, 300), lambda _: BLOCKS)
    (save,) = meta.saves
    puts = {put.tag for put in meta.puts}
    one = StepReport(stored=puts, saved={save.tag: (1, int(not good))})
    side.update(one, (), ())
    assert positions(side) == []
    assert side.catalog.anchors.used == 1
    side.update(StepReport(saved={save.tag: (1, 0)}), (), ())
    assert positions(side) == ([300] if good else [])
    assert side.catalog.anchors.used == int(good)
    both = one.aggregate(StepReport(saved={save.tag: (1, 0)}))
    assert both.saved == {save.tag: (2, int(not good))}


def test_a_page_that_cannot_be_stored_takes_the_anchor_after_it_along() -> None:
    side = make()
    asked = request("first", IDS[:300])
    side.match(asked, 0)
    side.allocated(asked, BLOCKS, 0)
    meta = side.step(scheduled(asked, 0, 300), lambda _: BLOCKS)
    failed = {put.tag for put in meta.puts}
    side.update(StepReport(failed=failed, saved={save.tag: (1, 0) for save in meta.saves}), (), ())
    assert side.catalog.pages == side.catalog.anchors.used == 0
    assert side.catalog.pinned == 0


def test_a_damaged_anchor_is_forgotten_and_keeps_its_slot_until_its_readers_have_ended() -> None:
    side = make()
    whole(side, request("first", IDS[:300]))
    (anchor,) = anchors(side)
    asked = request("second", [*IDS[:300], 5], **EXACT)
    extra, _ = side.match(asked, 0)
    side.allocated(asked, BLOCKS, extra or 0)
    assert anchor.pins == 1
    side.step(IDLE, lambda _: BLOCKS)
    side.update(StepReport(damaged_anchors={anchor.slot}), (), ())
    assert side.catalog.anchors.used == 1
    side.update(StepReport(), ("second",), ("second",))
    assert side.catalog.anchors.used == 0
    assert side.counts["damaged_anchors"] == 1
    third = Run(side, request("third", [*IDS[:300], 6], **EXACT))
    assert third.load is not None
    assert (third.load.tail, third.load.anchor) == (300, -1)


def test_a_preempted_request_finds_what_it_saved() -> None:
    side = make()
    turn = Run(side, request("first", IDS, **EXACT))
    turn.compute(512)
    turn.compute(300)
    side.step(preempting("first"), lambda _: BLOCKS)
    assert positions(side) == [512, 812]
    again = Run(side, turn.asked)
    assert again.load is not None
    # What was stored are whole pages; the anchor before their end is near.
    assert (again.matched, again.load.tail) == (768, 256)
    again.compute(len(IDS) - 768)
    assert again.finish() == []
    assert side.catalog.pinned == 0


def test_a_hit_inside_a_page_without_hiddens_is_one_and_stores_nothing() -> None:
    side = make(storage=Storage(hidden_share=0.02))
    whole(side, request("first", IDS[:300]))
    whole(side, request("others", [5, *IDS]))
    run = Run(side, request("second", [*IDS[:300], *IDS[600:700]], **EXACT))
    assert run.load is not None
    assert (run.matched, run.load.tail, run.load.hidden_slots[-1]) == (300, 0, -1)
    assert run.compute(100) == []
    assert run.finish() == []
    assert side.counts["refused:no_hiddens"] == 1
    assert side.catalog.pinned == 0


def test_requests_that_store_nothing_save_nothing() -> None:
    side = make()
    turn = whole(side, request("first", IDS[:300], kv_transfer_params={"tailreplay": {"store": False}}))
    assert turn.saves == []


def test_metrics_and_the_log_tell_of_anchors() -> None:
    side = make()
    whole(side, request("first", IDS[:300]))
    whole(side, request("second", [*IDS[:300], 5], **EXACT))
    stats = TailReplayStats(side.take_stats())
    counts, sizes = stats.data["counts"], stats.data["sizes"]
    assert (counts["anchors_stored"], counts["anchor_hits"], counts["start:complete"]) == (2, 1, 1)
    assert sizes["anchors"] == 2
    assert sizes["bytes_used"] == side.catalog.bytes_used + 2 * side.anchor_bytes <= sizes["bytes_limit"]
    assert {name.partition(":")[0] for name in counts} <= set(SERIES)
    assert set(sizes) == set(GAUGES)
    assert stats.reduce()["exact_hit_share"] == 1.0


def test_chunks_that_are_longer_than_asked_for_get_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for interval in (0, 2048, 512):
        warn_of_chunks(interval, 2048)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "up to 2048 tokens apart, not 512" in said


def test_both_sides_have_room_for_as_many() -> None:
    for given in ({}, {"anchor_bytes": "64KiB"}, {"anchor_bytes": 0}, {"anchor_codec": "int8"}):
        settings = parse_settings({"host_bytes": "1MiB", **given})
        shape = geometry(state_parts=(STATE,))
        side = SchedulerSide(settings, shape, "model")
        slots, nbytes = anchor_room(settings, shape)
        assert side.catalog.anchors.slots == slots
        assert nbytes == slots * side.anchor_bytes
        assert nbytes + side.catalog.slots * shape.page_bytes()[0] <= 1 << 20
        assert (slots == 0) == (given == {"anchor_bytes": 0})
