"""Both engines keep the same share of quality: the same questions through each, on the bundled model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tailreplay.evals.measure import contained, first_line
from tailreplay.evals.methods import Method
from tailreplay.evals.plan import EvalPlan
from tailreplay.evals.workers import Measurer
from tests.vllm_live.conftest import BUNDLED, Engine

pytestmark = pytest.mark.timeout(1800)

TASKS = ("mid_question", "count", "slots")
LENGTH, DOCUMENTS = 1024, 7  # ten questions each: 210 samples
METHODS = ("full", "zero", "replay@0.05", "replay@1")
OTHER = [5, 6, 7]
Scores = dict[str, list[float]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = Engine(BUNDLED, host_bytes="256MiB", min_match=1, min_tail=1, anchor_bytes=0)
    print(f"\npages of {running.block} tokens")
    yield running
    running.close()


def options(method: Method) -> dict[str, Any]:
    """What a request says to the connector."""
    if method.reuse is None:
        return {"mode": "off"}
    ratio = method.reuse.ratio
    return {"mode": method.reuse.mode} | ({} if ratio is None else {"ratio": ratio})


def by_vllm(engine: Engine, measurer: Measurer, methods: list[Method]) -> tuple[Scores, dict[str, list[str]]]:
    """Ask everything through vLLM: each prefix is computed once, then hit by each method."""
    scores, answers = defaultdict(list), defaultdict(list)
    for task in TASKS:
        for number in range(DOCUMENTS):
            document = measurer.document((task, LENGTH, number))
            for hit in document.hits:
                prefix = [*document.ids[: hit.at], *hit.extra]
                engine.run(prefix, mode="off")
                engine.run(OTHER, mode="off", store=False)  # a step in which the last page lands
                for probe in hit.probes:
                    for method in methods:
                        prompt = [*prefix, *probe.query]
                        out = engine.run(prompt, max_tokens=probe.longest, store=False, **options(method))
                        assert out.cached == (0 if method.reuse is None else len(prefix)), method.name
                        text = measurer.lm.tokenizer.decode(out.tokens)
                        scores[method.name].append(contained(probe.answers, text))
                        answers[method.name].append(first_line(text))
    return scores, answers


def by_transformers(measurer: Measurer) -> tuple[Scores, dict[str, list[str]]]:
    scores, answers = defaultdict(list), defaultdict(list)
    for task in TASKS:
        for number in range(DOCUMENTS):
            for hit in measurer.measure((task, LENGTH, number))["hits"]:
                for probe in hit["probes"]:
                    for method in METHODS:
                        scores[method].append(probe["results"][method]["score"])
                        answers[method].append(probe["results"][method]["answer"])
    return scores, answers


def interval(scores: Scores, method: str) -> tuple[float, float]:
    """95% bootstrap interval of the retention."""
    draw = np.random.default_rng(0)
    mine, full = np.array(scores[method]), np.array(scores["full"])
    chosen = draw.integers(0, len(full), (2000, len(full)))
    low, high = np.percentile(mine[chosen].mean(1) / full[chosen].mean(1), [2.5, 97.5])
    return float(low), float(high)


def test_both_engines_keep_the_same_share(engine: Engine) -> None:
    plan = EvalPlan("bundled", TASKS, METHODS, (LENGTH,), dtype="bfloat16")
    measurer = Measurer(plan)
    methods = [method for method in plan.chosen_methods() if not method.wiped]
    vllm, vllm_answers = by_vllm(engine, measurer, methods)
    ours, our_answers = by_transformers(measurer)
    count = len(ours["full"])
    assert count == len(vllm["full"]) >= 200
    print(f"\n{count} samples of {', '.join(TASKS)} at {LENGTH} tokens")
    for method in METHODS:
        found = [np.mean(scores[method]) / np.mean(scores["full"]) for scores in (vllm, ours)]
        intervals = [interval(scores, method) for scores in (vllm, ours)]
        # A right answer is cut after the reference in one of them.
        same = np.mean(
            [a.startswith(b) or b.startswith(a) for a, b in zip(vllm_answers[method], our_answers[method], strict=True)]
        )
        print(
            f"{method:12} retention vLLM {found[0]:.3f} {intervals[0]}, transformers {found[1]:.3f} {intervals[1]}; "
            f"scores {np.mean(vllm[method]):.3f} and {np.mean(ours[method]):.3f}; the same answer {same:.1%}"
        )
        assert max(low for low, _ in intervals) <= min(high for _, high in intervals), method
    # Otherwise the above would say nothing.
    assert np.mean(ours["zero"]) < 0.8 * np.mean(ours["full"])
    assert abs(np.mean(vllm["replay@1"]) - np.mean(vllm["full"])) < 0.03
