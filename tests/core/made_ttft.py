"""Rows of `bench ttft` without measuring."""

from __future__ import annotations

from itertools import product
from typing import Any

from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.ttft_rows import Sample, row_of

COSTS = qwen35_4b()


def samples(*totals: float, matched: int = 0, replayed: int = 0) -> list[Sample]:
    """Return runs of these seconds, each with the same shares of phases."""
    return [Sample(t, 0.01 * t, 0.0, 0.04 * t, 0.5 * t, 0.45 * t, matched, replayed) for t in totals]


def row(length: int = 1024, ratio: float = 0.05, ablation: str = "both") -> dict[str, Any]:
    """Return a row whose full prefill took a millisecond a token."""
    full = samples(*(length / 1000 * factor for factor in (1.0, 1.1, 0.9)))
    took = (length * ratio + 64) / 1000
    hits = samples(took, 1.3 * took, 0.8 * took, matched=length, replayed=int(length * ratio))
    return row_of(COSTS, length, 64, ratio, ablation, full, hits, bandwidth=1e10)


def record(engine: str = "transformers", **of_row: Any) -> dict[str, Any]:
    """Return what is saved of a row."""
    run = {
        "model": "a <model>",
        "engine": engine,
        "dtype": "bfloat16",
        "device": "cpu",
        "machine": "a machine",
        "threads": 2,
        "date": "2026-11-30T12:00:00+00:00",
        "versions": {"python": "3.11", engine: "1"},
        "query": 64,
        "repeats": 3,
        "copy_gb_s": 10.0,
        "flags": {"phases": "host clock", "copies": "in line"},
    }
    return {"run": run, "row": {"model": run["model"], "engine": engine, "dtype": run["dtype"], **row(**of_row)}}


def records() -> list[dict[str, Any]]:
    """Return what two engines, three lengths, two ratios and two ablations give."""
    kinds = product(("transformers", "vllm"), (1024, 4096, 32768), (0.05, 0.1), ("none", "both"))
    return [record(engine, length=length, ratio=ratio, ablation=ablation) for engine, length, ratio, ablation in kinds]
