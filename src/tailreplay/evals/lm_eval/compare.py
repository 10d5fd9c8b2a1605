"""Runs several methods over one loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_eval import simple_evaluate

from tailreplay.engines.transformers import HybridLM
from tailreplay.evals.lm_eval.methods import Method
from tailreplay.evals.lm_eval.model import TailReplayLM
from tailreplay.evals.lm_eval.report import Outcome
from tailreplay.evals.lm_eval.tasks import LoadedTasks

# Only for metrics without a formula for their standard error; the harness' own 100,000 take minutes.
_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class Options:
    """How tasks are run; see `TailReplayLM` and ``lm_eval.simple_evaluate``."""

    max_length: int
    query_tokens: int = 64
    limit: float | None = None
    num_fewshot: int | None = None
    gen_kwargs: dict[str, Any] | None = None
    apply_chat_template: bool = False
    enable_thinking: bool | None = None
    log_samples: bool = False


def evaluate(lm: HybridLM, method: Method, tasks: LoadedTasks, options: Options) -> Outcome:
    """Run one method over all tasks."""
    model = TailReplayLM(
        lm,
        method=method.name,
        ratio=method.reuse.ratio,
        min_tail=lm.min_tail,
        query_tokens=options.query_tokens,
        max_length=options.max_length,
        enable_thinking=options.enable_thinking,
    )
    results = simple_evaluate(
        model=model,
        tasks=list(tasks.tasks.values()),
        task_manager=tasks.manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        gen_kwargs=options.gen_kwargs,
        apply_chat_template=options.apply_chat_template,
        log_samples=options.log_samples,
        bootstrap_iters=_BOOTSTRAPS,
    )
    return Outcome(method, dict(results or {}), model.tallies)
