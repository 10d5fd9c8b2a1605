"""Cold runs and hits in turn, the same way for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any, Protocol

from tailreplay.ablation import ABLATIONS, Ablation
from tailreplay.bench.ttft_plan import TtftPlan
from tailreplay.bench.ttft_rows import Sample, row_of
from tailreplay.costs import CostModel
from tailreplay.errors import TailReplayError


class Engine(Protocol):
    """A loaded model with a cache.

    Attributes
    ----------
    vocabulary : int
        Token ids are below it.
    bandwidth : float
        Bytes a second of a plain copy from where pages lie to where the engine reads them.
    flags : dict
        How the engine was set up, for the report.
    """

    costs: CostModel
    vocabulary: int
    bandwidth: float
    flags: dict[str, Any]

    def store(self, ids: list[int]) -> None:
        """Compute a prefix and cache it; what was cached before may go."""

    def cold(self, ids: list[int]) -> Sample:
        """Compute the prompt without reuse and store nothing."""

    def hit(self, ids: list[int], ratio: float, ablation: Ablation) -> Sample:
        """Answer the prompt from the cache and store nothing."""


def measured(engine: Engine, plan: TtftPlan, say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one length after the other.

    The run that stores a prefix is a full prefill too, and counts as one of its warm-ups.

    Parameters
    ----------
    say : callable
        Is told what is being done.
    """
    for length in plan.lengths:
        random = Random(length)
        ids = [random.randrange(3, engine.vocabulary) for _ in range(length + plan.query)]
        say(f"{length:,} tokens: storing the prefix")
        engine.store(ids[:length])
        full: list[Sample] = []
        hits: dict[tuple[float, str], list[Sample]] = {kind: [] for kind in product(plan.ratios, plan.ablations)}
        for turn in range(-plan.warmup, plan.repeats):
            if turn in plan.cold_turns() or -plan.warmup < turn < 0:
                say(f"{length:,} tokens: full prefill {max(turn + 1, 0)}")
                run = engine.cold(ids)
                full += [run] if turn >= 0 else []
            say(f"{length:,} tokens: hits {max(turn + 1, 0)} of {plan.repeats}")
            for (ratio, ablation), runs in hits.items():
                run = engine.hit(ids, ratio, ABLATIONS[ablation])
                if run.matched != length:
                    raise TailReplayError(f"A hit of {length:,} tokens was expected, and {run.matched:,} were matched.")
                runs += [run] if turn >= 0 else []
        yield [
            row_of(engine.costs, length, plan.query, ratio, ablation, full, runs, engine.bandwidth)
            for (ratio, ablation), runs in hits.items()
        ]
