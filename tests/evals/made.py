"""Records made by hand or at random, for tests of statistics and reports."""

from __future__ import annotations

import random
from typing import Any

from tailreplay.evals.info import TaskInfo

TASKS = {
    info.name: info
    for info in (
        TaskInfo("retrieval", "Retrieval at a boundary", discriminates=False, retrieval=True),
        TaskInfo("count", "Running count", discriminates=True),
        TaskInfo("text", "Plain text", discriminates=True),
        TaskInfo("chat", "Chat", discriminates=True),
    )
}
REPLAYS = {"replay@0.2": 0.2, "replay@0.05": 0.05, "replay@0.01": 0.01}


def result(score: float | None = None, nll: float | None = None, first_nll: float | None = None) -> dict[str, Any]:
    """Return a method's result at a probe."""
    return {"score": score, "nll": nll, "first_nll": first_nll, "tokens": 5}


def probe(evidence: int | None = None, **results: dict[str, Any]) -> dict[str, Any]:
    """Return a probe; `kv_wiped` and `replay_5` stand for names that are no identifiers."""
    names = {"kv_wiped": "kv-wiped", "replay_5": "replay@0.05"}
    return {"evidence": evidence, "results": {names.get(name, name): value for name, value in results.items()}}


def record(task: str, document: int, *probes: dict[str, Any], length: int = 1000, **hit: Any) -> dict[str, Any]:
    """Return a record of one hit of 900 tokens."""
    tails = {"zero": 0, "replay@0.05": 45}
    hit = {"matched": 900, "turn": None, "tails": tails, "state_error": {}, "probes": list(probes)} | hit
    return {"task": task, "length": length, "document": document, "hits": [hit]}


def random_records(documents: int = 6, lengths: tuple[int, ...] = (1024, 4096), seed: int = 0) -> list[dict[str, Any]]:
    """Return records that look like a run's: replay loses little, zero states lose much where they matter."""
    rng = random.Random(seed)
    makers = {"count": _scored, "retrieval": _scored, "text": _text, "chat": _chat}
    return [
        {"task": task, "length": length, "document": document, "hits": make(rng, task, length)}
        for document in range(documents)
        for length in lengths
        for task, make in makers.items()
    ]


def _scored(rng: random.Random, task: str, length: int) -> list[dict[str, Any]]:
    matched = length - rng.randrange(50, 100)
    chances = _chances(0.95 if task == "retrieval" else 0.1) | {"kv-wiped": 0.9 if task == "count" else 0.0}
    probes = []
    for _ in range(4):
        results = {
            method: result(float(rng.random() < chance), 1.5 - chance + rng.uniform(0, 0.2))
            for method, chance in chances.items()
        }
        probes.append({"evidence": rng.randrange(matched // 2, matched), "results": results})
    return [_hit(rng, matched, None, probes, list(chances))]


def _text(rng: random.Random, task: str, length: int) -> list[dict[str, Any]]:
    nlls = {method: 3 - chance + rng.uniform(0, 0.05) for method, chance in _chances(0.2).items()}
    results = {method: result(None, nll, nll + 0.5) for method, nll in nlls.items()}
    return [_hit(rng, length - 64, None, [{"evidence": None, "results": results}], list(nlls))]


def _chat(rng: random.Random, task: str, length: int) -> list[dict[str, Any]]:
    hits = []
    for turn in range(10):
        results = {
            method: result(float(rng.random() < chance * 0.98**turn)) for method, chance in _chances(0.3).items()
        }
        hits.append(_hit(rng, length // 10 * (turn + 1), turn, [{"evidence": None, "results": results}], []))
    return hits


def _chances(zero: float) -> dict[str, float]:
    return {
        "full": 0.98,
        "exact": 0.98,
        "replay@0.2": 0.97,
        "replay@0.05": 0.93,
        "replay@0.01": 0.4 + zero / 2,
        "zero": zero,
    }


def _hit(
    rng: random.Random, matched: int, turn: int | None, probes: list[dict[str, Any]], methods: list[str]
) -> dict[str, Any]:
    tails = {"zero": 0, "exact": matched} | {method: round(share * matched) for method, share in REPLAYS.items()}
    shares = {"zero": 0.0, **REPLAYS, "exact": 1.0}
    errors = {
        method: [round((1 - share) ** (2 * layer + 4) + rng.uniform(0, 0.01), 4) for layer in range(6)]
        for method, share in shares.items()
        if method in methods
    }
    return {"matched": matched, "turn": turn, "tails": tails, "state_error": errors, "probes": probes}
