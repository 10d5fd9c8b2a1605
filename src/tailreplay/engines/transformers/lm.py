"""HybridLM: a causal language model with a prefix cache."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tailreplay.cache import PrefixCache
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.results import GenerationResult, ReuseReport, Timings, report_of
from tailreplay.engines.transformers.sampling import Sampler, Sampling, sampling_from
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.engines.transformers.text import TextStream
from tailreplay.errors import InvalidRequestError
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse, parse_replay
from tailreplay.plan import ReplayPlan

log = logging.getLogger("tailreplay")
BUNDLED = Path(__file__).resolve().parents[2] / "bundled"
Prompt = str | list[int]


def model_path(model: str | os.PathLike[str]) -> str:
    """Return where to load `model` from: "bundled" is the small model inside the package, else a path or a hub id."""
    return str(BUNDLED) if str(model) == "bundled" else str(model)


class HybridLM:
    """Generates text, and answers shared prefixes from a cache. Calls from several threads run one at a time.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model of a supported family, on one device.
    tokenizer : transformers tokenizer, optional
        Without one, prompts are lists of token ids and answers have no text.
    cache : PrefixCache, optional
        May be shared by models of one layout; each only sees its own pages.
    replay : float or str or Reuse
        Default of `generate`: a ratio in (0, 1], "exact", "zero" or "off".
    prefill_chunk : int
        Longest run of tokens computed at once.
    min_tail : int
        Shortest tail; a match up to this length is replayed wholly and so is exact.

    Raises
    ------
    UnsupportedModelError
        If the model's family cannot be replayed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        cache: PrefixCache | None = None,
        replay: float | str | Reuse = 0.05,
        prefill_chunk: int = 2048,
        min_tail: int = 64,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.cache = cache if cache is not None else PrefixCache()
        self.min_tail = min_tail
        self.reuse = parse_replay(replay, min_tail)
        if prefill_chunk < 1:
            raise InvalidRequestError(f"prefill_chunk must be at least 1, got {prefill_chunk}.", "prefill_chunk")
        self.prefill_chunk = prefill_chunk
        if model.device.type == "cpu":
            # Decayed states end in denormals, which are many times slower to compute with.
            torch.set_flush_denormal(True)
        self.backbone = Backbone(model, self.cache.page_size)
        self.cache.bind(self.backbone.layout, pin=self.backbone.device.type == "cuda")
        self.fingerprint = self.backbone.fingerprint()
        self._lock = threading.Lock()
        if not self.backbone.topology.is_hybrid:
            log.warning("This model has no linear layers: the cache is a plain prefix cache, and every hit is exact.")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "bundled",
        *,
        cache: PrefixCache | None = None,
        replay: float | str | Reuse = 0.05,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        prefill_chunk: int = 2048,
        min_tail: int = 64,
        **kwargs: Any,
    ) -> HybridLM:
        """Load a model and its tokenizer: a hub id, a folder, or "bundled".

        Parameters
        ----------
        device : str or torch.device, optional
            A CUDA device if there is one, else CPU.
        dtype : str or torch.dtype
            "auto" is the checkpoint's own.
        **kwargs
            Go to ``AutoModelForCausalLM.from_pretrained`` (``revision``, ``trust_remote_code`` …).
        """
        path = model_path(model)
        where = (
            torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        tokenizer = AutoTokenizer.from_pretrained(path, **{k: kwargs[k] for k in ("revision",) if k in kwargs})
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs).to(where)
        return cls(loaded, tokenizer, cache, replay, prefill_chunk, min_tail)

    # ---- prompts

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the prompt's token ids, checked against the vocabulary and the model's longest sequence.

        Raises
        ------
        InvalidRequestError
            If the prompt is empty, too long, or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("This model has no tokenizer: give token ids.", "prompt")
            ids = list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        else:
            ids = list(prompt)
        if not ids:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
            raise InvalidRequestError(f"Token ids must be integers from 0 to {vocabulary - 1}.", "prompt")
        limit = self.backbone.max_tokens
        if limit is not None and len(ids) >= limit:
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens, but the model takes at most {limit} including the answer.", "prompt"
            )
        return ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Render chat messages with the tokenizer's template and return their token ids."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequestError("This model has no chat template: use plain completions.", "messages")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)

    def sampling(self, **given: Any) -> Sampling:
        """Return sampling settings, with the model's generation config for what is not given."""
        return sampling_from(getattr(self.model, "generation_config", None), **given)

    def namespace(self, salt: str = "") -> Namespace:
        """Return the namespace of this model's pages for a tenant's `salt`."""
        return Namespace(self.fingerprint, self.backbone.layout.digest, self.cache.page_size, salt)

    # ---- generation

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        *,
        replay: float | str | Reuse | None = None,
        salt: str = "",
        store: bool = True,
        **sampling: Any,
    ) -> Any:
        """Generate an answer, or one for each prompt of a batch.

        Parameters
        ----------
        prompt : str, list of int, or a list of either
            A batch's common prefix is computed once; each prompt then goes on from an exact copy of its states.
        replay : float or str or Reuse, optional
            As in the constructor, for this call.
        salt : str
            Only requests with the same salt share pages.
        store : bool
            Whether to store this sequence's pages. Sequences of "zero" mode are never stored.
        **sampling
            ``max_new_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop``.

        Returns
        -------
        GenerationResult or list of GenerationResult
        """
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            return self._generate_batch(prompt, replay, salt, store, sampling)  # type: ignore[arg-type]
        stream = self.stream(prompt, replay=replay, salt=salt, store=store, **sampling)  # type: ignore[arg-type]
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        replay: float | str | Reuse | None = None,
        salt: str = "",
        store: bool = True,
        cancel: threading.Event | None = None,
        **sampling: Any,
    ) -> Generation:
        """Begin a generation; iterate over the result for pieces of text. Bad input is refused at once.

        Parameters
        ----------
        cancel : threading.Event, optional
            Set it to end the generation at the next step.
        """
        reuse = self.reuse if replay is None else parse_replay(replay, self.min_tail)
        ids = self.encode(prompt)
        settings = self.sampling(**sampling)
        return Generation(self, ids, reuse, self.namespace(salt), settings, store and reuse.mode != "zero", cancel)

    def _generate_batch(
        self,
        prompts: list[Prompt],
        replay: float | str | Reuse | None,
        salt: str,
        store: bool,
        sampling: dict[str, Any],
    ) -> list[GenerationResult]:
        reuse = self.reuse if replay is None else parse_replay(replay, self.min_tail)
        settings = self.sampling(**sampling)
        encoded = [self.encode(prompt) for prompt in prompts]
        if not encoded:
            raise InvalidRequestError("The batch is empty.", "prompt")
        store = store and reuse.mode != "zero"
        namespace = self.namespace(salt)
        # One token of each prompt must be left to run.
        shared = min(_common_prefix(encoded), min(map(len, encoded)) - 1)
        if len(encoded) == 1 or shared < 1:
            return [self._finish(Generation(self, ids, reuse, namespace, settings, store, None)) for ids in encoded]
        trunk = Trunk(self, encoded[0], shared, reuse, namespace, store)
        try:
            return [
                self._finish(Generation(self, ids, reuse, namespace, settings, store, None, trunk)) for ids in encoded
            ]
        finally:
            trunk.close()

    @staticmethod
    def _finish(generation: Generation) -> GenerationResult:
        for _ in generation:
            pass
        return generation.result

    # ---- used by Generation and Trunk, under the lock

    def begin(
        self,
        ids: list[int],
        reuse: Reuse,
        namespace: Namespace,
        capacity: int,
        store: bool,
        timings: Timings,
    ) -> tuple[Sequence, ReplayPlan]:
        """Look `ids` up and restore what is matched; a load that fails becomes a miss. Release the plan when loaded."""
        begin = time.perf_counter()
        plan = self.cache.lookup(ids, namespace, reuse, self.backbone.topology, self.backbone.costs)
        timings.lookup = time.perf_counter() - begin
        sequence = Sequence(self.backbone, self.cache, namespace, capacity, store)
        try:
            sequence.restore(plan, ids, self.prefill_chunk)
        except Exception:
            sequence.abandon()
            self.cache.release(plan)
            if plan.matched == 0:
                raise
            log.exception("Loading %d cached tokens failed; the prompt is computed instead.", plan.matched)
            plan = self.cache.lookup(ids, namespace, Reuse("off", None), self.backbone.topology)
            sequence = Sequence(self.backbone, self.cache, namespace, capacity, store)
            sequence.restore(plan, ids)
        timings.copy, timings.replay = sequence.copy_seconds, sequence.replay_seconds
        return sequence, plan

    @property
    def lock(self) -> threading.Lock:
        """Held while the model runs."""
        return self._lock


class Trunk:
    """The common prefix of a batch: computed at first use, then forked for each prompt."""

    def __init__(
        self, lm: HybridLM, ids: list[int], shared: int, reuse: Reuse, namespace: Namespace, store: bool
    ) -> None:
        self._lm = lm
        self._ids = ids
        self.shared = shared
        self._reuse, self._namespace, self._store = reuse, namespace, store
        self._sequence: Sequence | None = None
        self._report: ReuseReport | None = None

    def fork(self, prompt_tokens: int, capacity: int, timings: Timings) -> tuple[Sequence, ReuseReport]:
        """Return a sequence that holds the common prefix, and how it came by it."""
        first = self._sequence is None
        if self._sequence is None or self._report is None:
            # One token more than is shared, so that a match may cover the whole prefix.
            ids = self._ids[: self.shared + 1]
            self._sequence, plan = self._lm.begin(ids, self._reuse, self._namespace, self.shared, self._store, timings)
            self._report = report_of(plan)
            _prefill(self._lm, self._sequence, ids[: self.shared], None)
            self._sequence.wait_loaded()
            self._lm.cache.release(plan)
        report = self._report.with_shared(prompt_tokens, 0 if first else self.shared)
        return self._sequence.fork(capacity), report

    def close(self) -> None:
        """Store what is left of the prefix."""
        if self._sequence is not None:
            self._sequence.finish()


class Generation:
    """A running generation: iterate for pieces of text, then read `result`."""

    def __init__(
        self,
        lm: HybridLM,
        ids: list[int],
        reuse: Reuse,
        namespace: Namespace,
        sampling: Sampling,
        store: bool,
        cancel: threading.Event | None,
        trunk: Trunk | None = None,
    ) -> None:
        self._lm = lm
        self._ids = ids
        self._reuse = reuse
        self._namespace = namespace
        self._sampling = sampling
        self._store = store
        self._cancel = cancel
        self._trunk = trunk
        self._result: GenerationResult | None = None
        self._limit = sampling.max_new_tokens
        longest = lm.backbone.max_tokens
        if longest is not None:
            self._limit = min(self._limit, longest - len(ids))

    @property
    def result(self) -> GenerationResult:
        """The outcome, once the iteration has ended."""
        if self._result is None:
            raise RuntimeError("The generation has not ended: iterate to its end first.")
        return self._result

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        begin = time.perf_counter()
        with self._lm.lock:
            yield from self._run(begin)

    def _run(self, begin: float) -> Iterator[str]:
        lm, timings = self._lm, Timings()
        capacity = len(self._ids) + self._limit
        plan: ReplayPlan | None = None
        if self._trunk is not None:
            sequence, report = self._trunk.fork(len(self._ids), capacity, timings)
        else:
            sequence, plan = lm.begin(self._ids, self._reuse, self._namespace, capacity, self._store, timings)
            report = report_of(plan)
        try:
            yield from self._decode(sequence, report, timings, begin, plan)
            sequence.finish()
        finally:
            sequence.abandon()
            if plan is not None:
                sequence.wait_loaded()
                lm.cache.release(plan)
        timings.total = time.perf_counter() - begin

    def _decode(
        self, sequence: Sequence, report: ReuseReport, timings: Timings, begin: float, plan: ReplayPlan | None
    ) -> Iterator[str]:
        lm = self._lm
        stream = TextStream(lm.tokenizer, self._sampling.stop)
        sampler = Sampler(self._sampling, lm.backbone.device)
        ends = _end_tokens(lm.model)
        tokens: list[int] = []
        reason = "length"
        started = time.perf_counter()
        logits = _prefill(lm, sequence, self._ids, self._cancel)
        while logits is not None:
            token = sampler(logits)
            tokens.append(token)
            if len(tokens) == 1:
                timings.prefill = time.perf_counter() - started
                timings.first_token = time.perf_counter() - begin
                if plan is not None:
                    # The query has run, so every copy from the plan's pages has ended: others may evict them.
                    sequence.wait_loaded()
                    lm.cache.release(plan)
            if token in ends:
                reason = "stop"
                break
            piece = stream.push(token)
            if piece:
                yield piece
            if stream.stopped:
                reason = "stop"
                break
            if len(tokens) >= self._limit:
                break
            if self._cancel is not None and self._cancel.is_set():
                reason = "cancelled"
                break
            logits = sequence.extend([token])
        else:
            reason = "cancelled"
        rest = stream.flush()
        if rest:
            yield rest
        timings.total = time.perf_counter() - begin
        self._result = GenerationResult(stream.text, tokens, reason, report, timings)


def _prefill(lm: HybridLM, sequence: Sequence, ids: list[int], cancel: threading.Event | None) -> torch.Tensor | None:
    """Run what is left of `ids` in chunks; None if cancelled meanwhile."""
    logits = None
    for start in range(len(sequence.tokens), len(ids), lm.prefill_chunk):
        if cancel is not None and cancel.is_set():
            return None
        logits = sequence.extend(ids[start : start + lm.prefill_chunk])
    return logits


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)


def _common_prefix(sequences: list[list[int]]) -> int:
    first, *others = sequences
    for index, token in enumerate(first):
        if any(index >= len(other) or other[index] != token for other in others):
            return index
    return len(first)
