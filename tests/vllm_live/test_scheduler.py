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


def image(identifier: str, offset: int = 5) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


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
        "cache_salt": None,
        "is_finished": lambda: False,
    }
    return SimpleNamespace(**{**values, **changed})


def serve(side: SchedulerSide, asked: SimpleNamespace) -> int:
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
    idle = SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
    )
    last = side.step(idle, lambda _: blocks)
    side.update(StepReport(stored={put.tag for put in [*meta.puts, *last.puts]}), (), ())
    assert side.catalog.pinned == 0
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
    (load,) = side.step(
        SimpleNamespace(
            preempted_req_ids=(),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={},
        ),
        lambda _: ([], []),
    ).loads
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
    side.step(
        SimpleNamespace(
            preempted_req_ids=("second",),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={},
        ),
        lambda _: ([], []),
    )
    assert len(set(salts)) == 2
    assert side.match(asked, 0) == (len(IDS), True), "pages are found as before, whatever vLLM's salt"
