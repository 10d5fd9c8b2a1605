"""Hits without parts of the method, and the seconds of their phases, inside a vLLM engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tailreplay.ablation import ABLATIONS, METHOD
from tailreplay.clock import HostClock
from tailreplay.engines.vllm.inside import Inside
from tailreplay.engines.vllm.plugin import tapped_model
from tailreplay.pages import PartSpec
from tailreplay.tiers.host import HostArena
from tests.vllm_live.conftest import Engine

RANDOM = random.Random(5)
BASE = [RANDOM.randrange(3, 1000) for _ in range(700)]
PROMPT = [*BASE, 7]


@pytest.fixture(scope="module")
def inside(engine: Engine) -> Iterator[Inside]:
    engine.run(BASE, mode="off")
    engine.run([5, 6, 7], mode="off", store=False)  # a step in which the last page lands
    made = Inside(engine.llm)
    yield made
    made.set(METHOD, HostClock())


def test_the_skip_leaves_the_feed_forward_part_out_and_the_states_as_they_are(engine: Engine, inside: Inside) -> None:
    calls: Counter[int] = Counter()
    model = tapped_model()
    last = [group.layers[-1] for group in model.topology.groups]
    hooks = [
        model.decoder.layers[index].mlp.register_forward_hook(lambda *_, index=index: calls.update([index]))
        for index in last
    ]
    found = {}
    for name, ablation in ABLATIONS.items():
        inside.set(ablation, HostClock())
        calls.clear()
        found[name] = engine.run(PROMPT, mode="replay", ratio=0.5, start="zero", store=False)
        assert found[name].report["replayed"] == 350
        # The query runs them in any case.
        assert calls == dict.fromkeys(last, 1 if ablation.skip else 2)
    for hook in hooks:
        hook.remove()
    for name in ABLATIONS:
        for layer, states in found[name].states.items():
            for ours, theirs in zip(states, found["both"].states[layer], strict=True):
                assert torch.equal(ours, theirs)


def test_each_phase_of_a_hit_is_timed_and_those_of_a_miss_are_not(engine: Engine, inside: Inside) -> None:
    inside.set(METHOD, HostClock())
    before = inside.spent()
    engine.run(PROMPT, mode="replay", ratio=0.5, start="zero", store=False)
    hit = inside.spent().since(before)
    assert min(hit.lookup, hit.copy, hit.replay) > 0
    before = inside.spent()
    engine.run(PROMPT, mode="off", store=False)
    miss = inside.spent().since(before)
    assert miss.lookup > 0
    assert (miss.copy, miss.replay) == (0, 0)


def test_tails_are_read_before_keys_and_values(engine: Engine, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = HostArena.read

    def noting(arena: HostArena, part: PartSpec, *args: Any) -> None:
        reads.append(part.name[:2])
        read(arena, part, *args)

    monkeypatch.setattr(HostArena, "read", noting)
    engine.run(PROMPT, mode="replay", ratio=0.5, start="zero", store=False)
    groups = len(tapped_model().topology.stored_groups)
    # Later reads of hiddens are those of the last, partial page, which goes on being filled.
    assert reads.index("kv") == groups > 0
