"""What a router hears of a server's cache, on vLLM's own publisher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from transformers import AutoTokenizer

from tailreplay.engines.vllm import compat
from tailreplay.events import PageRemoved, PageStored
from tailreplay.keys import Namespace, token_bytes
from tests.server.texts import branch, ids_of
from tests.vllm_live.conftest import BUNDLED, REPLAY, Server
from tests.vllm_live.test_server import Caller

SECONDS = 20


class Router:
    """Asks the publisher for everything since the start, which needs no subscription in time."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 1000 * SECONDS)
        self._socket.connect(address)

    def events(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        self._socket.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[dict[str, Any]] = []
        while True:
            *_, sequence, payload = self._socket.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) < 0:
                return found
            batch = msgspec.msgpack.decode(payload)
            found += batch["events"] if isinstance(batch, dict) else batch[1]

    def wait_for(self, wanted: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return what `wanted` picks of the events, as soon as it picks any."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if found := wanted(self.events()):
                return found
        pytest.fail("the events did not come")

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def router(server: Server) -> Iterator[Router]:
    asking = Router(f"ipc://{server.log.parent}/{REPLAY}")
    yield asking
    asking.close()


def chain(events: list[dict[str, Any]], ids: list[int]) -> list[dict[str, Any]]:
    """The stored blocks that make up `ids`, as far as they are there: nothing unless they reach the end."""
    found: list[dict[str, Any]] = []
    parent, at = None, 0
    while at < len(ids):
        block = next(
            (
                event
                for event in events
                if event["type"] == "BlockStored"
                and event["parent_block_hash"] == parent
                and event["token_ids"] == ids[at : at + event["block_size"]]
            ),
            None,
        )
        if block is None:
            return []
        found.append(block)
        parent, at = block["block_hashes"][0], at + block["block_size"]
    return found


def test_a_prompts_pages_are_told_once_they_can_be_matched(server: Server, router: Router) -> None:
    caller = Caller(server, "events")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    ids = ids_of(tokenizer, 80, 1000)
    caller.ask(ids, max_tokens=3)
    blocks = router.wait_for(lambda events: chain(events, ids))
    assert sum(block["block_size"] for block in blocks) == 1000
    assert {block["block_size"] for block in blocks[:-1]} == {blocks[0]["block_size"]}
    for block in blocks:
        assert block["medium"] == "CPU"
        assert block["lora_name"] is None
        assert [list(keys) for keys in block["extra_keys"]] == [["events"]]
    # What another prompt shares is told once.
    other = branch(ids, 900, ids_of(tokenizer, 81, 1100))
    caller.ask(other)
    assert router.wait_for(lambda events: chain(events, other))[0] == blocks[0]
    told = [block for event in router.events() if event["type"] == "BlockStored" for block in event["block_hashes"]]
    assert told.count(blocks[0]["block_hashes"][0]) == 1


def test_the_answers_first_page_end_is_removed_when_a_longer_page_comes(server: Server, router: Router) -> None:
    caller = Caller(server, "longer")
    ids = ids_of(AutoTokenizer.from_pretrained(BUNDLED), 82, 200)
    caller.ask(ids, max_tokens=8)

    def removed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        short = chain(events, ids)
        gone = {block for event in events if event["type"] == "BlockRemoved" for block in event["block_hashes"]}
        return [block for block in short if block["block_hashes"][0] in gone]

    (block,) = router.wait_for(removed)
    assert block["block_size"] == 200


def test_events_carry_the_adapter() -> None:
    ids = token_bytes([1, 2, 3])
    stored = PageStored(b"key", b"parent", ids, Namespace("m", "l", 16, salt="s", adapter="me:too:7:/a:b"))
    block, removed = compat.kv_events([stored, PageRemoved(b"old")])
    assert (block.block_hashes, block.parent_block_hash, block.token_ids) == ([b"key"], b"parent", [1, 2, 3])
    assert (block.lora_name, block.lora_id, block.extra_keys) == ("me:too", 7, [("me:too", "s")])
    assert (removed.block_hashes, removed.medium) == ([b"old"], "CPU")


@pytest.mark.parametrize(("enabled", "expected"), [(None, False), (False, False), (True, True)])
def test_events_are_off_unless_asked_for(enabled: bool | None, expected: bool) -> None:
    config = None if enabled is None else SimpleNamespace(enable_kv_cache_events=enabled)
    assert compat.publishes_events(SimpleNamespace(kv_events_config=config)) is expected
