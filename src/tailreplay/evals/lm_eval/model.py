"""The model that lm-evaluation-harness runs: HybridLM with one method of reuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

# Registers the harness' own models, which it does by itself only as long as no other is registered.
import lm_eval.models  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from tailreplay.cache import PrefixCache
from tailreplay.engines.transformers import HybridLM
from tailreplay.engines.transformers.results import ReuseReport
from tailreplay.errors import InvalidRequestError, UnsupportedModelError
from tailreplay.evals.lm_eval.methods import parse_method
from tailreplay.evals.lm_eval.prompts import Prompt, PromptCutter
from tailreplay.evals.lm_eval.requests import DEFAULT_ANSWER_TOKENS, answering, by_context, query_offset
from tailreplay.evals.lm_eval.runner import Runner
from tailreplay.evals.lm_eval.sizing import check_hybrid, longest_sequence, size_up
from tailreplay.evals.lm_eval.tally import Tally
from tailreplay.storage import Storage

log = logging.getLogger("tailreplay")


@register_model("tailreplay")
class TailReplayLM(TemplateLM):
    """A hybrid model whose contexts are cached and whose questions are answered after a hit.

    Parameters
    ----------
    pretrained : str or HybridLM
        A hub id, a folder or "bundled"; or a loaded model, whose cache must have room for a context.
    method : {"full", "zero", "replay", "exact"}
    ratio : float, optional
        Share of the context to replay, for "replay" only; 0.05 if not given.
    min_tail : int
        Shortest tail of "replay". The paper's rule has none.
    query_tokens : int
        Length of the query of tasks without a rule of their own (`tailreplay.evals.lm_eval.splits`).
    max_length : int, optional
        Longest sequence in tokens, the answer included; the model's limit if not given. Prompts are cut from the left.
    max_gen_toks : int
        Longest answer of tasks that do not say.
    host_bytes : int or str, optional
        Size of the cache; room for one context of `max_length` tokens (at most 16 GiB) if not given.
    device, dtype, prefill_chunk
        As in `HybridLM.from_pretrained`.
    enable_thinking : bool, optional
        Goes to the chat template.
    trust_remote_code : bool
        Whether the model may bring code.
    batch_size, max_batch_size
        Accepted because the harness sends them; requests run one at a time.

    Attributes
    ----------
    tallies : dict of str to Tally
        What was reused, by task.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be replayed or has no linear layers.
    InvalidRequestError
        If an argument is not valid.
    """

    def __init__(
        self,
        pretrained: str | HybridLM = "bundled",
        method: str = "replay",
        ratio: float | None = None,
        min_tail: int = 0,
        query_tokens: int = 64,
        max_length: int | None = None,
        max_gen_toks: int = DEFAULT_ANSWER_TOKENS,
        host_bytes: int | str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        prefill_chunk: int = 2048,
        enable_thinking: bool | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if query_tokens < 1:
            raise InvalidRequestError(f"query_tokens must be at least 1, got {query_tokens}.", "query_tokens")
        chosen = parse_method(method, ratio, min_tail)
        if isinstance(pretrained, HybridLM):
            lm = pretrained
            check_hybrid(lm.backbone)
            self.max_length = longest_sequence(lm.backbone, max_length)
        else:
            remote = {"trust_remote_code": True} if trust_remote_code else {}
            sizing = size_up(pretrained, max_length, host_bytes, dtype, **remote)
            lm = HybridLM.from_pretrained(
                pretrained,
                cache=PrefixCache(sizing.host_bytes, storage=Storage(anchor_bytes=0)),
                device=device,
                dtype=dtype,
                prefill_chunk=prefill_chunk,
                cuda_graphs=0,  # they would lengthen tails
                **remote,
            )
            self.max_length = sizing.max_length
        if lm.tokenizer is None:
            raise UnsupportedModelError("The model has no tokenizer, and the harness asks in texts.")
        if str(batch_size) not in ("1", "auto"):
            log.warning("Requests run one at a time: batch_size %s is ignored.", batch_size)
        self.max_gen_toks = max_gen_toks
        self.tokenizer = lm.tokenizer
        self.tallies: dict[str, Tally] = {}
        self._device = lm.backbone.device
        self._template_arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._cutter = PromptCutter(lm.tokenizer, query_tokens)
        self._runner = Runner(lm, chosen)
        self._warned = False

    # ---- tokens and texts

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness' caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text."""
        return self._cutter.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat with the tokenizer's template."""
        if not self.tokenizer.chat_template:
            raise InvalidRequestError("This model has no chat template: evaluate it without.")
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_arguments,
        )
        return text

    def get_model_info(self) -> dict[str, Any]:
        """Return what identifies this run, for the harness' reports."""
        lm, method = self._runner.lm, self._runner.method
        return {
            "model_name": str(getattr(lm.model.config, "_name_or_path", "")),
            "model_dtype": str(lm.model.dtype),
            "method": method.name,
            "ratio": method.reuse.ratio,
            "max_length": self.max_length,
        }

    # ---- requests

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts greedily; sampled answers are refused before anything is run."""
        wanted = [answering(each.task_name, each.args[1], self.max_gen_toks, self.max_length) for each in requests]
        answers = [""] * len(requests)
        for index in self._progress(by_context(requests), "answering", disable_tqdm):
            request, how = requests[index], wanted[index]
            text = request.args[0]
            prompt = self._fit(self._cutter.cut(text, query_offset(request, text)), self.max_length - how.max_tokens)
            contexts = self._runner.contexts
            result = self._runner.generate(prompt, how.max_tokens, how.stop)
            self._count(request.task_name, result.reuse, contexts)
            answers[index] = result.text
            self.cache_hook.add_partial("generate_until", request.args, result.text)
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations of contexts; each context is cut like a prompt of its task."""
        scores = [(0.0, False)] * len(requests)
        for index in self._progress(by_context(requests), "scoring", disable_tqdm):
            request = requests[index]
            scores[index] = self._score(request.task_name, *self._pair(request))
            self.cache_hook.add_partial("loglikelihood", request.args, scores[index])
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts of no known task: the last tokens of each context are the query."""
        return [
            self._score(None, self._cutter.cut_last(context), continuation)
            for _, context, continuation in self._progress(requests, "scoring", disable_tqdm)
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in windows. The first half of each window is its context: see `Runner.score_window`."""
        totals = []
        for request in self._progress(requests, "scoring", disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            total = 0.0
            for context, continuation in map(make_disjoint_window, windows):
                contexts = self._runner.contexts
                score, report = self._runner.score_window(context + continuation, len(context))
                self._count(request.task_name, report, contexts)
                total += score.logprob
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _pair(self, request: Instance) -> tuple[Prompt, list[int]]:
        """Return a request's context, cut, and its continuation's token ids."""
        context, continuation = request.args
        if not context.strip():
            ids = self.tok_encode(context + continuation, add_special_tokens=False)
            # A text that begins with the token that would stand before it has it once.
            known = ids[:1] == [self.prefix_token_id]
            return Prompt([self.prefix_token_id], 0), ids[1:] if known else ids
        context_ids, continuation_ids = self._encode_pair(context, continuation)
        cut = self._cutter.cut(context.rstrip(), query_offset(request, context))
        return Prompt(context_ids, min(cut.cached, len(context_ids) - 1)), continuation_ids

    def _score(self, task: str | None, prompt: Prompt, continuation: list[int]) -> tuple[float, bool]:
        # The last token is predicted and not run, so one more fits.
        room = self.max_length + 1 - len(continuation)
        if not continuation or room < 1:
            raise InvalidRequestError(
                f"A continuation of {len(continuation)} tokens cannot be scored: 1 to {self.max_length} can."
            )
        contexts = self._runner.contexts
        score, report = self._runner.score(self._fit(prompt, room), continuation)
        self._count(task, report, contexts)
        return score.logprob, score.greedy

    def _fit(self, prompt: Prompt, tokens: int) -> Prompt:
        """Cut a prompt from the left, as the harness does."""
        if len(prompt.ids) > tokens and not self._warned:
            self._warned = True
            log.warning(
                "A prompt of %d tokens is longer than the %d that there is room for: it and all such prompts lose their "
                "beginning.",
                len(prompt.ids),
                tokens,
            )
        return prompt.last(tokens)

    def _count(self, task: str | None, report: ReuseReport, contexts_before: int) -> None:
        tally = self.tallies.setdefault(task or "", Tally())
        tally.add(report, self._runner.contexts - contexts_before)

    def _progress(self, items: Any, what: str, disabled: bool) -> Iterator[Any]:
        yield from tqdm(items, desc=f"{what} ({self._runner.method.label})", disable=disabled or None)
