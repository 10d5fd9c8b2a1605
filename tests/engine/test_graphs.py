"""Replay by recorded graphs: lengths, inputs, results, failures and bounds, with a device that records on CPU."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from tailreplay import HybridLM, PrefixCache
from tailreplay.ablation import METHOD, Ablation
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.graphs.base import Graph, GraphDevice
from tailreplay.engines.transformers.graphs.cuda import CudaGraphs
from tailreplay.engines.transformers.graphs.replay import BUCKETS, ReplayGraphs, replay_graphs
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.modes import parse_reuse
from tailreplay.storage import Storage
from tests.engine.fake_graphs import FakeDevice
from tests.engine.tiny_models import random_ids, relative, tiny_model

M = 203
FAMILIES = ("qwen3_5", "olmo_hybrid", "bamba", "lfm2")


def model(name: str = "qwen3_5", seeds: tuple[int, ...] = (0,)) -> HybridLM:
    """A model whose cache holds a sequence for each seed."""
    lm = HybridLM(tiny_model(name), cache=PrefixCache("64MiB", storage=Storage(anchor_bytes=0)))
    for seed in seeds:
        lm.generate(random_ids(M + 1, seed), max_new_tokens=1)
    return lm


def states(
    lm: HybridLM, seed: int = 0, m: int = M, graphs: ReplayGraphs | None = None, ratio: float = 0.3
) -> list[torch.Tensor]:
    """States after a hit of `m` tokens, with a tail of a bucket's length."""
    ids = random_ids(M + 1, seed)[: m + 1]
    reuse = replace(parse_reuse("replay", ratio, min_tokens=1), buckets=(64, 128, 192))
    plan = lm.cache.lookup(ids, lm.namespace(), reuse, lm.backbone.topology)
    assert plan.matched == m
    sequence = Sequence(lm.backbone, lm.cache, lm.namespace(), m, store=False)
    sequence.restore(plan, ids, graphs=graphs)
    lm.cache.release(plan)
    layers = [layer for group in lm.backbone.topology.groups for layer in group.stateful]
    return [state for layer in layers for state in compat.states(sequence.past, layer) if state is not None]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(relative(one, other) < 1e-6 for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_graph_rebuilds_what_eager_replay_does(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake refuses operations that wait for the host, so this also shows that a replay has none."""
    monkeypatch.setenv("TAILREPLAY_KERNELS", kernels)
    lm, device = model(name, seeds=(0, 1)), FakeDevice()
    tails = {k for group in lm.backbone.topology.groups for k in (group.receptive_field,) if k}
    graphs = ReplayGraphs(lm.backbone, device, buckets=tuple(sorted({64, *tails})))
    for seed in (0, 1, 0):
        assert_same(states(lm, seed, graphs=graphs), states(lm, seed))
    # Two prompts and two lengths of match, but one graph: its inputs were filled anew each time.
    assert_same(states(lm, 1, M - 9, graphs), states(lm, 1, M - 9))
    assert (len(device.graphs), device.graphs[0].replays, device.warm_ups) == (1, 4, 1)


def test_a_request_keeps_its_states_when_the_graph_runs_again() -> None:
    lm = model(seeds=(0, 1))
    graphs = ReplayGraphs(lm.backbone, FakeDevice())
    first = states(lm, 0, graphs=graphs)
    kept = [state.clone() for state in first]
    states(lm, 1, graphs=graphs)
    assert all(torch.equal(state, copy) for state, copy in zip(first, kept, strict=True))


def test_other_lengths_are_replayed_as_before() -> None:
    lm, device = model(), FakeDevice()
    graphs = ReplayGraphs(lm.backbone, device, buckets=(64, 100))
    assert_same(states(lm, graphs=graphs, ratio=0.6), states(lm, ratio=0.6))
    assert not device.graphs
    assert device.warm_ups == 0


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing"), ValueError("odd")])
def test_a_failed_recording_is_said_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    lm, device = model(), FakeDevice(error)
    graphs = ReplayGraphs(lm.backbone, device)
    for _ in range(2):
        assert_same(states(lm, graphs=graphs), states(lm))
    assert device.warm_ups == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"Replay runs without CUDA graphs, since recording one failed: {error}"
    ]


def test_experts_that_are_chosen_on_the_host_are_replayed_without() -> None:
    lm, device = model("granitemoehybrid"), FakeDevice()
    assert_same(states(lm, graphs=ReplayGraphs(lm.backbone, device)), states(lm))
    assert (device.warm_ups, len(device.graphs)) == (1, 0)


def test_the_least_recently_used_graph_goes_first() -> None:
    lm, device = model(), FakeDevice()
    graphs = ReplayGraphs(lm.backbone, device, limit=2)
    for ratio in (0.3, 0.6, 0.3, 0.9):  # tails of 64, 128, 64 and 192
        states(lm, graphs=graphs, ratio=ratio)
    assert (len(graphs), len(device.graphs), device.waits) == (2, 3, 1)
    states(lm, graphs=graphs, ratio=0.3)
    assert len(device.graphs) == 3
    states(lm, graphs=graphs, ratio=0.6)
    assert (len(graphs), len(device.graphs)) == (2, 4)


def test_streams_have_their_own_and_threads_of_one_share() -> None:
    lm, device = model(), FakeDevice()
    graphs = ReplayGraphs(lm.backbone, device)
    states(lm, graphs=graphs)
    thread = threading.Thread(target=lambda: states(lm, graphs=graphs))
    thread.start()
    thread.join()
    assert [graph.replays for graph in device.graphs] == [2]
    device.stream = 1
    states(lm, graphs=graphs)
    assert [graph.replays for graph in device.graphs] == [2, 1]


def test_tails_are_not_lengthened_where_there_can_be_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model()
    lm.graphs = ReplayGraphs(lm.backbone, FakeDevice(RuntimeError("no")))
    prompt = random_ids(M + 1)

    def replayed() -> int:
        return lm.generate(prompt, max_new_tokens=1, replay=0.4, store=False).reuse.replayed

    assert [replayed(), replayed()] == [128, 82]
    lm.graphs = ReplayGraphs(lm.backbone, FakeDevice())
    assert replayed() == 128
    lm.ablation = Ablation(skip=False)
    assert replayed() == 82
    lm.ablation = METHOD
    monkeypatch.setattr(lm.model, "_hf_peft_config_loaded", True, raising=False)
    assert lm.graphs.buckets == ()


def test_too_little_memory_now_is_not_for_ever() -> None:
    lm, device = model(), FakeDevice(torch.OutOfMemoryError("full"))
    graphs = ReplayGraphs(lm.backbone, device)
    assert_same(states(lm, graphs=graphs), states(lm))
    device.error = None
    assert_same(states(lm, graphs=graphs), states(lm))
    assert len(device.graphs) == 1


def test_a_refresh_forgets_graphs() -> None:
    lm, device = model(), FakeDevice()
    lm.graphs = ReplayGraphs(lm.backbone, device)
    states(lm, graphs=lm.graphs)
    lm.refresh()
    assert (len(lm.graphs), device.waits) == (0, 1)


def test_adapters_are_replayed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, device = model(), FakeDevice()
    graphs = ReplayGraphs(lm.backbone, device)
    monkeypatch.setattr(lm.model, "_hf_peft_config_loaded", True, raising=False)
    assert not graphs.replay(
        lm.backbone.new_cache(1), random_ids(M), (64,) * len(lm.backbone.topology.groups), lambda *_: None
    )
    assert not device.graphs


def test_generation_rounds_its_tails_and_says_so() -> None:
    lm = model()
    lm.graphs = ReplayGraphs(lm.backbone, FakeDevice())
    prompt = random_ids(M + 1)
    for ratio, replayed in ((0.05, 64), (0.4, 128), (0.96, 195)):
        report = lm.generate(prompt, max_new_tokens=1, replay=ratio, store=False).reuse
        assert (report.matched, report.replayed, report.ratio, report.short_tail) == (M, replayed, ratio, False)
    assert lm.generate(prompt, max_new_tokens=1, replay="exact", store=False).reuse.exact


def test_there_are_none_on_cpu() -> None:
    lm = model()
    assert lm.graphs is None
    assert replay_graphs(lm.backbone, 8, 2048) is None


def test_on_cuda_they_can_be_switched_off_and_keep_to_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model()
    monkeypatch.setattr(lm.backbone, "device", torch.device("cuda"))
    graphs = replay_graphs(lm.backbone, 3, 512)
    assert graphs is not None
    assert graphs.buckets == BUCKETS[:6]
    assert replay_graphs(lm.backbone, 0, 512) is None


def test_both_devices_are_of_the_protocol() -> None:
    device: GraphDevice = CudaGraphs(torch.device("cuda"))
    fake: GraphDevice = FakeDevice()
    graph: Graph = fake.record(lambda: torch.ones(1))
    assert device is not None
    assert graph is not None
