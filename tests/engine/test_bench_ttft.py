"""`tailreplay bench ttft` with models: shapes, what fits, and the transformers engine's hits."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tailreplay import HybridLM
from tailreplay.ablation import ABLATIONS, Ablation
from tailreplay.bench import ttft_needs
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.ttft import plan_of
from tailreplay.bench.ttft_needs import described, needs_of
from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.bench.ttft_run import measure
from tailreplay.bench.ttft_transformers import graphs_of
from tailreplay.cli import main
from tailreplay.engines.transformers import compat, sequence
from tests.engine.tiny_models import random_ids

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "kv_kib", "hidden_kib", "state_mib"),
    [
        ("qwen3.5-0.8b", 12, 10, 18.84375),
        ("qwen3.5-4b", 32, 35, 49.5),
        # The transformers library's states: four columns of convolution in bfloat16. Engines that keep three in
        # float32 say 149.6 MiB.
        ("qwen3.6-27b", 64, 150, 147.75),
        ("olmo-hybrid-7b", 120, 52.5, 52.734375),
    ],
)
def test_shapes_have_the_memory_of_their_models(shape: str, kv_kib: float, hidden_kib: float, state_mib: float) -> None:
    model = described(Target(shape, True, "transformers"), "bfloat16")
    assert model.costs.kv_bytes == kv_kib * 1024
    assert sum(model.costs.hidden_bytes) == hidden_kib * 1024
    assert model.costs.state_bytes == state_mib * MIB
    assert model.costs.topology.attention_layers == tuple(range(3, len(model.layers), 4))


def test_the_large_shape_in_float32_columns_is_what_other_engines_say() -> None:
    config = described(Target("qwen3.6-27b", True, "transformers"), "bfloat16").config
    channels = (2 * config.linear_num_key_heads + config.linear_num_value_heads) * 128
    states = 48 * (config.linear_num_value_heads * 128 * 128 * 4 + channels * 3 * 4)
    assert round(states / MIB, 1) == 149.6


def test_the_shape_of_4b_costs_what_arithmetic_says() -> None:
    counted, known = described(Target("qwen3.5-4b", True, "transformers"), "bfloat16").costs, qwen35_4b()
    assert counted.layers == known.layers
    assert (counted.kv_bytes, counted.hidden_bytes, counted.state_bytes) == (
        known.kv_bytes, known.hidden_bytes, known.state_bytes,
    )  # fmt: skip


def test_olmo_is_the_library_s_default_in_all_but_the_vocabulary() -> None:
    from transformers import OlmoHybridConfig

    from tailreplay.bench.shapes import shape_config

    ours, default = shape_config("olmo-hybrid-7b").to_dict(), OlmoHybridConfig().to_dict()
    differ = {name for name in default if ours[name] != default[name]}
    assert differ == {"vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id"}


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ttft_needs, "free_host_bytes", lambda: 24 << 30)
    monkeypatch.setattr(ttft_needs, "free_device_bytes", lambda: None)
    monkeypatch.setattr("tailreplay.bench.ttft_run.measure_target", lambda *_: pytest.fail("loaded"))
    assert main(["bench", "ttft", "--shape", "tiny", "qwen3.6-27b", "--lengths", "32K"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs 57.0 GiB of memory (45.4 GiB of weights" in said
    assert "24.0 GiB are free" in said


def test_weights_must_fit_the_device_and_pages_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ttft_needs, "free_device_bytes", lambda: 40 << 30)
    assert main(["bench", "ttft", "--shape", "qwen3.6-27b", "--lengths", "1K"]) == 2
    assert "on the device" in capsys.readouterr().err
    monkeypatch.setattr(ttft_needs, "free_device_bytes", lambda: 141 << 30)
    monkeypatch.setattr(ttft_needs, "free_host_bytes", lambda: 8 << 30)
    assert main(["bench", "ttft", "--shape", "qwen3.6-27b", "--lengths", "32K"]) == 2
    assert "of cached pages), and 8.0 GiB are free" in capsys.readouterr().err


def test_the_cache_has_room_for_the_longest_prefix() -> None:
    target = Target("qwen3.5-4b", True, "transformers")
    model = described(target, "bfloat16")
    plan = TtftPlan((target,), (1024, 32768), (0.05,), ("both",))
    assert needs_of(model, "transformers", plan).pages > 32768 * 67 * 1024
    given = TtftPlan((target,), (1024, 32768), (0.05,), ("both",), host_bytes="3GiB")
    assert needs_of(model, "transformers", given).pages == 3 << 30


def test_limits_need_no_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ttft_needs, "free_host_bytes", lambda: 0)
    arguments = ["bench", "ttft", "--limits-only", "--shape", "qwen3.6-27b", "bundled", "--lengths", "32K"]
    assert main([*arguments, "--ratios", "5%", "10%", "--json"]) == 0
    large, bundled = json.loads(capsys.readouterr().out)["limits"]
    assert [row["ratio"] for row in large["rows"]] == [0.05, 0.1]
    assert large["rows"][0]["limit"] > large["rows"][0]["limit_without_skip"] > large["rows"][1]["limit"] > 10
    assert large["rows"][0]["copy_bytes"] == 2 << 30
    assert bundled["max_tokens"] == 8192
    assert main(arguments) == 0
    assert "150.0 KiB" in capsys.readouterr().out


def test_a_run_measures_saves_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("html", "png", "jsonl")}
    arguments = ["--shape", "tiny", "--dtype", "float32", "--lengths", "256", "--ratios", "5%", "1.0", "--ablations"]
    arguments += ["none", "both", "--repeats", "2", "--cold-repeats", "1", "--json", "--html", str(files["html"])]
    assert main(["bench", "ttft", *arguments, "--png", str(files["png"]), "--save", str(files["jsonl"])]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["engine"]) == ("tiny shape, random weights", "transformers")
    assert {"machine", "date", "versions", "threads", "device", "runs"} <= set(report)
    assert report["runs"][0]["flags"]["phases"] == "host clock"
    kinds = [(row["ratio"], row["ablation"], row["matched"], row["replayed"]) for row in report["rows"]]
    assert kinds == [(0.05, "none", 256, 64), (0.05, "both", 256, 64), (1.0, "none", 256, 256), (1.0, "both", 256, 256)]
    for row in report["rows"]:
        assert row["limit"] > 1
        assert row["full_ms"] > 0
        assert row["hit_ms"] > 0
        assert all(row[f"{phase}_ms"] > 0 for phase in ("lookup", "copy", "replay", "query"))
    assert [json.loads(line)["row"] for line in files["jsonl"].read_text().splitlines()] == report["rows"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["html"].read_text()


def test_the_bundled_model_is_a_shape_without_random_weights() -> None:
    parser = argparse.ArgumentParser()
    from tailreplay.bench import ttft

    ttft.add_arguments(parser)
    plan = plan_of(
        parser.parse_args(["--shape", "tiny", "bundled", "--model", "x/y", "--engine", "vllm", "transformers"])
    )
    assert [(target.source, target.is_shape, target.engine) for target in plan.targets] == [
        (source, source == "tiny", engine) for source in ("tiny", "bundled", "x/y") for engine in ("vllm", "transformers")
    ]  # fmt: skip
    assert plan_of(parser.parse_args([])).targets == (Target("qwen3.5-0.8b", True, "transformers"),)


def test_a_target_that_fails_is_said_in_a_sentence() -> None:
    plan = TtftPlan((Target("/no/such/model", False, "transformers"),), (128,), (0.5,), ("both",))
    assert measure(plan, lambda record: pytest.fail("measured")) == [
        "There is no model folder '/no/such/model' (and a hub id looks like 'owner/name')."
    ]


@pytest.fixture
def stored(tiny_without_anchors: HybridLM) -> HybridLM:
    """A model with 300 tokens in its cache."""
    tiny_without_anchors.generate(random_ids(300), max_new_tokens=1)
    return tiny_without_anchors


def test_the_skip_leaves_the_feed_forward_part_out_and_the_states_as_they_are(stored: HybridLM) -> None:
    calls: Counter[int] = Counter()
    for index, layer in enumerate(stored.backbone.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.update([index]))
    last = {group.layers[-1] for group in stored.backbone.topology.groups}
    states = {}
    for name, ablation in ABLATIONS.items():
        ids = random_ids(301)
        plan = stored.cache.lookup(ids, stored.namespace(), stored.reuse, stored.backbone.topology)
        calls.clear()
        restored = sequence.Sequence(stored.backbone, stored.cache, stored.namespace(), 301, store=False)
        restored.restore(plan, ids, ablation=ablation)
        stored.cache.release(plan)
        ran = {index for index in calls if index in last}
        assert ran == (set() if ablation.skip else last)
        assert calls.keys() - last == {
            layer for group in stored.backbone.topology.groups for layer in group.layers[:-1]
        }
        states[name] = [state for layer in sorted(calls.keys() | last) for state in compat.states(restored.past, layer)]
    for name in ABLATIONS:
        for ours, theirs in zip(states[name], states["both"], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_replay_begins_when_the_copies_have_ended(
    stored: HybridLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    order: list[str] = []

    class Stream:
        """A side stream that notes what is asked of it."""

        def __init__(self, device: torch.device) -> None:
            pass

        @contextmanager
        def copying(self) -> Iterator[None]:
            order.append("copies")
            yield

        def wait(self) -> None:
            order.append("wait")

        def mark(self, clock: Any) -> Any:
            return clock.mark()

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(sequence, "CopyStream", Stream)
    stored.backbone.layers[0].register_forward_pre_hook(lambda *_: order.append("layer"))
    stored.ablation = Ablation(overlap=overlap)
    result = stored.generate(random_ids(301), max_new_tokens=1, store=False)
    assert result.reuse.matched == 300
    # At the end a wait in either case, then the query.
    assert order == (["copies", "layer", "wait", "layer"] if overlap else ["copies", "wait", "layer", "wait", "layer"])


def test_a_clock_of_the_device_is_not_read_before_the_query_has_been_ordered(stored: HybridLM) -> None:
    """To read a mark is to wait for the device, which would then have nothing to do while the query is prepared."""
    order: list[str] = []

    class Clock:
        """Marks are numbers in order."""

        marks = 0

        def mark(self) -> int:
            self.marks += 1
            return self.marks

        def between(self, first: int, last: int) -> float:
            order.append("read")
            return float(last - first)

    stored.backbone.layers[-1].register_forward_hook(lambda *_: order.append("query"))
    stored.clock = Clock()
    times = stored.generate(random_ids(301), max_new_tokens=1, store=False).timings
    # The look-up alone, which the device has no part in, is read at once.
    assert order == ["read", "query", "read", "read", "read"]
    assert (times.lookup, times.copy, times.replay, times.prefill) == (1.0, 1.0, 1.0, 1.0)


def test_ablations_are_compared_without_graphs() -> None:
    def graphs(*ablations: str) -> int:
        return graphs_of(TtftPlan((), (128,), (0.05,), ablations))

    assert graphs("both") > 0
    assert graphs("none", "both") == graphs("skip") == 0
