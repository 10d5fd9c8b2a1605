"""Decisions of the scheduler's side that need no engine: who may share pages with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailreplay.engines.vllm.compat import Geometry
from tailreplay.engines.vllm.messages import StepReport
from tailreplay.engines.vllm.namespaces import namespace_of
from tailreplay.engines.vllm.scheduler import SchedulerSide
from tailreplay.engines.vllm.settings import Settings
from tailreplay.topology import Topology
from tests.tiers.memory_tier import MemoryTier

BLOCK = 64
TOPOLOGY = Topology.from_layer_types(["linear_attention", "full_attention", "linear_attention"])
IDS = [3 + i % 900 for i in range(200)]


def geometry(**changed: Any) -> Geometry:
    values: dict[str, Any] = {
        "block_size": BLOCK,
        "page_size": BLOCK,
        "attention_group": 0,
        "attention_layers": ("attention",),
        "state_groups": {1: ("state",)},
        "aligned_states": False,
        "kv_token_bytes": 16,
        "d_model": 8,
        "dtype": torch.float32,
        "stages": (TOPOLOGY,),
        "stage": 0,
        "tensor_ranks": 1,
    }
    return Geometry(**{**values, **changed})


def lora(name: str = "pirate", number: int = 1, path: str = "a/pirate") -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


def image(identifier: str, offset: int = 5, length: int = 10) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def request(name: str, ids: list[int] = IDS, **changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(ids),
        "num_tokens": len(ids),
        "num_prompt_tokens": len(ids),
        "num_computed_tokens": 0,
        "kv_transfer_params": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "is_finished": lambda: False,
    }
    return SimpleNamespace(**{**values, **changed})


IDLE = SimpleNamespace(
    preempted_req_ids=(),
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={},
)


def preempting(*names: str) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(IDLE), "preempted_req_ids": names})


def serve(side: SchedulerSide, asked: SimpleNamespace) -> int:
    """Do what `compute` does, and see that nothing stays pinned."""
    pinned = side.catalog.pinned
    matched = compute(side, asked)
    assert side.catalog.pinned == pinned
    return matched


def compute(side: SchedulerSide, asked: SimpleNamespace) -> int:
    """Look a request up, compute all of it in one step, end it; returns how many tokens were reused."""
    matched, _ = side.match(asked, 0)
    assert matched is not None
    blocks = (list(range(10, 10 + 5)), [3])
    side.allocated(asked, blocks, matched)
    name = asked.request_id
    loads: tuple[str, ...] = ()
    if matched:
        loads = (name,)
        side.update(StepReport(), loads, ())
    scheduled = SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=matched)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={name: asked.num_tokens - matched},
    )
    meta = side.step(scheduled, lambda _: blocks)
    asked.num_computed_tokens = asked.num_tokens
    side.finished(asked, blocks)
    last = side.step(IDLE, lambda _: blocks)
    side.update(StepReport(stored={put.tag for put in [*meta.puts, *last.puts]}), (), ())
    return matched


def make(model: str = "model", **changed: Any) -> SchedulerSide:
    return SchedulerSide(Settings(host_bytes=1 << 20, min_match=1), geometry(**changed), model)


SPACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"cache_salt": "tenant"},
    "another salt": {"cache_salt": "tenant 2"},
    "adapter": {"lora_request": lora()},
    "adapter of another number": {"lora_request": lora(number=2)},
    "adapter from another path": {"lora_request": lora(path="b/pirate")},
    "image": {"mm_features": [image("cat")]},
    "another image": {"mm_features": [image("dog")]},
    "the image elsewhere": {"mm_features": [image("cat", 6)]},
    "two images": {"mm_features": [image("cat"), image("dog", 40)]},
    "adapter and salt": {"lora_request": lora(), "cache_salt": "tenant"},
}


@pytest.mark.parametrize("space", SPACES)
def test_any_difference_is_a_miss(space: str) -> None:
    side = make()
    for other in SPACES:
        if other != space:
            serve(side, request(f"{other} 1", **SPACES[other]))
    assert serve(side, request("first", **SPACES[space])) == 0
    assert serve(side, request("second", **SPACES[space])) == len(IDS) - 1


def test_models_and_layouts_have_names_of_their_own() -> None:
    asked = request("r")
    digests = {
        namespace_of(asked, model, geometry(**changed)).digest
        for model, changed in (
            ("model", {}),
            ("another", {}),
            ("model", {"dtype": torch.bfloat16}),
            ("model", {"tensor_ranks": 2}),
            ("model", {"page_size": 32}),
        )
    }
    assert len(digests) == 5


def test_what_lies_in_the_engines_own_cache_is_not_loaded() -> None:
    side = make(aligned_states=True)
    serve(side, request("first"))
    asked = request("second", [*IDS, 9, 9], kv_transfer_params={"tailreplay": {"mode": "replay", "ratio": 0.05}})
    extra, waits = side.match(asked, BLOCK)
    assert (extra, waits) == (len(IDS) - BLOCK, True)
    isolated = []
    asked.update_block_hashes = lambda: isolated.append(asked.cache_salt)
    side.allocated(asked, ([1, 2, 3, 4], [0, 0, 0, 7]), extra)
    (load,) = side.step(IDLE, lambda _: ([], [])).loads
    assert (load.present, load.matched, load.states) == (BLOCK, len(IDS), {1: 7})
    assert len(isolated) == 1, "an approximate request publishes nothing in vLLM's own cache"


def test_a_preempted_approximate_request_cannot_find_its_own_blocks() -> None:
    side = make(aligned_states=True)
    serve(side, request("first"))
    asked = request("second", [*IDS, 9, 9], kv_transfer_params={"tailreplay": {"mode": "replay", "ratio": 0.05}})
    extra, _ = side.match(asked, 0)
    salts: list[str] = []
    asked.update_block_hashes = lambda: salts.append(asked.cache_salt)
    side.allocated(asked, ([1, 2, 3, 4], [0, 0, 0, 7]), extra or 0)
    side.update(StepReport(), ("second",), ())
    side.step(preempting("second"), lambda _: ([], []))
    assert len(set(salts)) == 2
    assert side.match(asked, 0) == (len(IDS), True), "pages are found as before, whatever vLLM's salt"


def test_a_prompt_of_embeddings_is_neither_reused_nor_stored() -> None:
    side = make()
    for name in ("first", "second"):
        assert serve(side, request(name, [0] * 200, prompt_embeds=torch.zeros(200, 8))) == 0
    assert side.catalog.pages == 0


def test_a_tail_that_holds_an_image_is_a_miss() -> None:
    """Layers before the first attention layer know their input as token ids only."""
    side = make()
    early, late = [image("cat", 5, 10)], [image("cat", 150, 30)]
    for name, images in (("early 1", early), ("late 1", late)):
        assert serve(side, request(name, mm_features=images)) == 0
    replay = {"kv_transfer_params": {"tailreplay": {"mode": "replay", "ratio": 0.05}}}
    assert serve(side, request("early 2", mm_features=early, **replay)) == len(IDS) - 1
    assert serve(side, request("late 2", mm_features=late, **replay)) == 0
    exact = {"kv_transfer_params": {"tailreplay": {"mode": "exact"}}}
    assert serve(side, request("early 3", mm_features=early, **exact)) == 0
    assert side.counts["miss:image_in_tail"] == 2


def test_hiddens_of_before_are_dropped_when_a_request_begins_again() -> None:
    """A load that failed on one rank may have gone well on others, which hold what it brought."""
    side = make()
    serve(side, request("first"))
    asked = request("second", [*IDS, 9, 9])
    extra, _ = side.match(asked, 0)
    blocks = (list(range(10, 15)), [3])
    side.allocated(asked, blocks, extra or 0)
    side.update(StepReport(), ("second",), ("second",))
    assert side.match(asked, 0) == (0, False), "what failed once is not tried again"
    assert side.step(IDLE, lambda _: blocks).restarts == ["second"]
    assert side.step(preempting("second"), lambda _: blocks).restarts == ["second"]
    assert side.step(IDLE, lambda _: blocks).restarts == []


def test_a_reset_matches_nothing_of_before() -> None:
    side = make()
    serve(side, request("first"))
    running = request("running", [*IDS, 9, 9])
    extra, _ = side.match(running, 0)
    blocks = (list(range(10, 15)), [3])
    side.allocated(running, blocks, extra or 0)
    side.reset()
    assert serve(side, request("second")) == 0, "the weights may have changed"
    assert serve(side, request("third")) == len(IDS) - 1
    side.update(StepReport(), ("running",), ())
    running.num_computed_tokens = running.num_tokens
    keeps_blocks, _ = side.finished(running, blocks)
    assert not keeps_blocks, "nothing of it is stored"
    assert side.catalog.pinned == 0


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_left_of_a_request_that_ends_while_it_loads(waits: bool) -> None:
    side = SchedulerSide(Settings(host_bytes=1 << 20, min_match=1, async_loads=not waits), geometry(), "model")
    serve(side, request("first"))
    blocks = (list(range(10, 15)), [3])
    asked = request("second", [*IDS, 9, 9], is_finished=lambda: True)
    extra, _ = side.match(asked, 0)
    side.allocated(asked, blocks, extra or 0)
    side.step(IDLE, lambda _: blocks)
    side.finished(asked, blocks)
    side.update(StepReport(loaded={"second"} if waits else set()), () if waits else ("second",), ())
    assert side.catalog.pinned == 0
    assert side.step(IDLE, lambda _: blocks).forgets == ["second"], "the workers let go of it too"


def test_a_request_that_begins_again_in_the_step_of_its_preemption_keeps_its_pins_right() -> None:
    side = make()
    serve(side, request("first"))
    asked = request("second", [*IDS, 9, 9])
    extra, _ = side.match(asked, 0)
    blocks = (list(range(10, 15)), [3])
    side.allocated(asked, blocks, extra or 0)
    side.update(StepReport(), ("second",), ())
    # vLLM resets its running requests outside a step and takes them up again in the next.
    extra, _ = side.match(asked, 0)
    side.allocated(asked, blocks, extra or 0)
    side.step(preempting("second"), lambda _: blocks)
    side.update(StepReport(), ("second",), ())
    asked.num_computed_tokens = len(IDS)
    side.finished(asked, blocks)
    assert side.catalog.pinned == 0


def test_a_request_that_waits_is_not_looked_up_anew_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    side = make()
    first, second = request("first"), request("second")
    side.match(first, 0)
    side.allocated(first, (list(range(10, 15)), [3]), 0)
    assert side.match(second, 0) == (None, False)
    looked_up = []
    monkeypatch.setattr(side.catalog, "match", lambda *args, **kwargs: looked_up.append(args))
    for _ in range(5):
        assert side.match(second, 0) == (None, False)
    assert not looked_up


def test_workers_forget_a_request_of_which_nothing_more_is_stored() -> None:
    """It runs on, and what they held of it would stay in memory as long; unless it begins again before they hear of it."""
    side = make()
    blocks = (list(range(10, 15)), [3])
    for name in ("first", "second"):
        asked = request(name)
        side.match(asked, 0)
        side.allocated(asked, blocks, 0)
    side.reset()
    assert side.step(IDLE, lambda _: blocks).forgets == ["first", "second"]
    assert side.step(IDLE, lambda _: blocks).forgets == []
    serve(side, request("third"))
    asked = request("fourth", [*IDS, 9, 9])
    extra, _ = side.match(asked, 0)
    side.allocated(asked, blocks, extra or 0)
    side.reset()
    side.update(
        StepReport(), ("fourth",), ("fourth",)
    )  # its load failed: it is computed, and stored, from its first token
    meta = side.step(IDLE, lambda _: blocks)
    assert meta.restarts == ["fourth"]
    assert meta.forgets == ["first", "second"]


def test_what_vllms_own_cache_gives_unseen_leaves_a_gap() -> None:
    side = make()
    asked = request("first")
    side.match(asked, 0)
    blocks = (list(range(10, 15)), [3])
    side.allocated(asked, blocks, 0)
    started = SimpleNamespace(
        **{
            **vars(IDLE),
            "scheduled_new_reqs": [SimpleNamespace(req_id="first", num_computed_tokens=32)],
            "num_scheduled_tokens": {"first": len(IDS) - 32},
        }
    )
    assert not side.step(started, lambda _: blocks).puts
    assert side.counts["refused:gap"] == 1
    assert side.catalog.pinned == 0


def test_pages_that_wait_to_be_written_keep_the_engine_going() -> None:
    """Without requests the engine makes no steps, and nothing would be written until the next one comes."""
    shape = geometry()
    settings = Settings(host_bytes=4 * shape.page_bytes("none")[0])
    side = SchedulerSide(settings, shape, "model", tiers=[MemoryTier(1 << 20)])
    assert not side.has_orders
    compute(side, request("a", kv_transfer_params={"tailreplay": {"mode": "off"}}))
    assert side.has_orders
    assert side._lower is not None
    assert side._lower._waiting
    steps = 0
    while side.has_orders:
        steps += 1
        assert steps < 20
        side.step(IDLE, None)
        side.update(StepReport(moved=dict.fromkeys(side._lower._spilling, (1, 0))), (), ())
    # What was ordered last is being written; the next request's steps will tell.
    side.update(StepReport(moved=dict.fromkeys(side._lower._spilling, (1, 0))), (), ())
    assert side.counts["written_pages"] == 4
    assert side.catalog.pinned == 0
    side.close()


CALIBRATES = {"kv_transfer_params": {"tailreplay": {"calibrate": True}}}
REPLAYS = {"kv_transfer_params": {"tailreplay": {"mode": "replay", "ratio": 0.05, "store": False}}}


def test_a_mean_state_is_ordered_from_the_first_token_on_and_used_once_every_rank_has_it() -> None:
    side = make()
    assert compute(side, request("first", **CALIBRATES)) == 0
    assert not side.catalog.anchors.used
    asked = request("second", **CALIBRATES)
    extra, _ = side.match(asked, 0)
    side.allocated(asked, (list(range(10, 15)), [3]), extra or 0)
    (load,) = side.step(IDLE, lambda _: ([], [])).loads
    assert (load.matched, load.tail, load.anchor, load.calibrates) == (len(IDS) - 1, len(IDS) - 1, -1, 1)
    side.update(StepReport(mean=1).aggregate(StepReport()), ("second",), ())
    assert start_of(side) == "zero", "one rank has none"
    side.update(StepReport(mean=1).aggregate(StepReport(mean=1)), (), ())
    assert start_of(side) == "mean"
    side.update(StepReport(mean=1), (), ())
    stats = side.take_stats()
    assert (stats["sizes"]["mean_state"], stats["counts"]["calibrations"]) == (1, 1)
    side.reset()
    side.update(StepReport(mean=1), (), ())  # of a step from before
    assert side.step(IDLE, lambda _: ([], [])).void == 1
    serve(side, request("third"))
    assert start_of(side) == "zero"


def start_of(side: SchedulerSide) -> str:
    before = dict(side.counts)
    assert serve(side, request("asks", [*IDS[:190], 9, 9], **REPLAYS)) == 190
    (found,) = (name for name in side.counts if name.startswith("start:") and side.counts[name] != before.get(name, 0))
    return str(found.removeprefix("start:"))
