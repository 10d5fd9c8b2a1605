"""HybridLM: a causal language model with a prefix cache."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, overload

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tailreplay.ablation import METHOD, Ablation
from tailreplay.budget import Adaptive, Ratio
from tailreplay.cache import PrefixCache
from tailreplay.clock import Clock, HostClock
from tailreplay.engines.transformers import resting
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.batch import generate_batch
from tailreplay.engines.transformers.devices import usable_device
from tailreplay.engines.transformers.families.registry import family_of
from tailreplay.engines.transformers.generation import Generation
from tailreplay.engines.transformers.graphs.replay import replay_graphs
from tailreplay.engines.transformers.locking import lock_of
from tailreplay.engines.transformers.prompts import Prompt, PromptEncoder
from tailreplay.engines.transformers.results import GenerationResult, Timings
from tailreplay.engines.transformers.sampling import Sampling, sampling_from
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.errors import InvalidRequestError
from tailreplay.keys import Namespace
from tailreplay.loading import load_errors, model_path
from tailreplay.modes import Reuse, check_interval, parse_replay
from tailreplay.pace import Pace
from tailreplay.plan import ReplayPlan, without_reuse
from tailreplay.repairs import Repairs

log = logging.getLogger("tailreplay")
ReplayWish = float | str | Ratio | Adaptive | Reuse
ReplayArgument = ReplayWish | None


class HybridLM:
    """Generates text, and answers shared prefixes from a cache. Calls from several threads run one at a time.

    Weights must not change behind its back: call `refresh` after changing them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model of a supported family, on one device.
    tokenizer : transformers tokenizer, optional
        Without one, prompts are lists of token ids and answers have no text.
    cache : PrefixCache, optional
        May be shared by models of one layout; each only sees its own pages.
    replay : float or str or Budget or Reuse
        Default of `generate`: a ratio in (0, 1], "exact", "zero" or "off", or a budget like ``Adaptive(error=0.05)``.
    prefill_chunk : int
        Longest run of tokens computed at once.
    min_tail : int
        Shortest tail; a match up to this length is replayed wholly and so is exact.
    anchor_interval : int
        Tokens of a prompt after which the states are saved, besides at its end and at the end of each chunk; a multiple of
        16. 0 for no more than those. Shorter than a chunk, it makes chunks shorter.
    cuda_graphs : int
        How many CUDA graphs of replays to keep; 0 replays without. Means nothing on other devices.

    Attributes
    ----------
    ablation : Ablation
        For benchmarks: what hits do without.
    clock : Clock
        Times the phases of a request; benchmarks set one of the device.
    mean : list of torch.Tensor or None
        The model's mean state; made by `make_mean_state`.

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
        replay: ReplayWish = 0.05,
        prefill_chunk: int = 2048,
        min_tail: int = 64,
        cuda_graphs: int = 8,
        anchor_interval: int = 0,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.cache = cache if cache is not None else PrefixCache()
        self.min_tail = min_tail
        self.ablation: Ablation = METHOD
        self.clock: Clock = HostClock()
        self.reuse = parse_replay(replay, min_tail)
        if prefill_chunk < 1:
            raise InvalidRequestError(f"prefill_chunk must be at least 1, got {prefill_chunk}.", "prefill_chunk")
        self.prefill_chunk = prefill_chunk
        self.anchor_interval = check_interval(anchor_interval)
        if model.device.type == "cpu":
            # Decayed states end in denormals, which are many times slower to compute with. The switch is this thread's
            # and that of threads which it starts from now on.
            torch.set_flush_denormal(True)
        self.backbone = Backbone(model, self.cache.page_size)
        self.cache.bind(self.backbone.layout, self.backbone.device.type == "cuda", model.config._name_or_path)
        self.fingerprint = self.backbone.fingerprint()
        self.graphs = replay_graphs(self.backbone, cuda_graphs, prefill_chunk)
        vocabulary = model.get_input_embeddings().num_embeddings
        self._encoder = PromptEncoder(tokenizer, vocabulary, self.backbone.max_tokens)
        self.lock = lock_of(model)
        self.repairs = Repairs()
        self.pace = Pace()
        self.mean: list[torch.Tensor] | None = None
        if not self.backbone.topology.is_hybrid:
            log.warning("This model has no linear layers: the cache is a plain prefix cache, and every hit is exact.")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "bundled",
        *,
        cache: PrefixCache | None = None,
        replay: ReplayWish = 0.05,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        prefill_chunk: int = 2048,
        min_tail: int = 64,
        cuda_graphs: int = 8,
        anchor_interval: int = 0,
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
        where = usable_device(device)
        shared = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token") if name in kwargs}
        with load_errors(model):
            # The config first: a model that cannot be replayed is refused before its weights are read.
            family_of(AutoConfig.from_pretrained(path, **shared).get_text_config(decoder=True))
            tokenizer = AutoTokenizer.from_pretrained(path, **shared)
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs).to(where)
        return cls(loaded, tokenizer, cache, replay, prefill_chunk, min_tail, cuda_graphs, anchor_interval)

    # ---- prompts

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the prompt's token ids, checked; see `PromptEncoder.encode`."""
        return self._encoder.encode(prompt, add_special_tokens)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Render chat messages with the tokenizer's template and return their token ids."""
        return self._encoder.encode_chat(messages)

    def sampling(self, **given: Any) -> Sampling:
        """Return sampling settings, with the model's generation config for what is not given."""
        return sampling_from(getattr(self.model, "generation_config", None), **given)

    def namespace(self, salt: str = "") -> Namespace:
        """Return the namespace of this model's pages for a tenant's `salt`, with the adapters that are active now."""
        adapter = ""
        if getattr(self.model, "_hf_peft_config_loaded", False):
            adapter = ",".join(self.model.active_adapters())
        return Namespace(self.fingerprint, self.backbone.layout.digest, self.cache.page_size, salt, adapter)

    def refresh(self) -> None:
        """Read the weights' fingerprint again: call it after changing weights or loading an adapter.

        Pages of the weights as they were are not matched any more.
        """
        self.fingerprint = self.backbone.fingerprint()
        self.mean = None
        if self.graphs is not None:
            # A graph reads weights from where they were when it was made.
            self.graphs.clear()

    # ---- generation

    @overload
    def generate(
        self, prompt: Prompt, *, replay: ReplayArgument = None, salt: str = "", store: bool = True, **sampling: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        replay: ReplayArgument = None,
        salt: str = "",
        store: bool = True,
        **sampling: Any,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        *,
        replay: ReplayArgument = None,
        salt: str = "",
        store: bool = True,
        **sampling: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate an answer, or one for each prompt of a batch.

        Parameters
        ----------
        prompt : str, list of int, or a list of either
            A batch's common prefix is computed once; each prompt then goes on from an exact copy of its states.
        replay : float or str or Budget or Reuse, optional
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
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            return self._generate_batch(cast(list[Prompt], prompt), replay, salt, store, sampling)
        return self.stream(cast(Prompt, prompt), replay=replay, salt=salt, store=store, **sampling).finish()

    def stream(
        self,
        prompt: Prompt,
        *,
        replay: ReplayArgument = None,
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
        ids = self.encode(prompt)
        return Generation(self, ids, *self._request(replay, salt, store, sampling), cancel)

    def _request(
        self, replay: ReplayArgument, salt: str, store: bool, sampling: dict[str, Any]
    ) -> tuple[Reuse, Namespace, Sampling, bool]:
        reuse = self.reuse if replay is None else parse_replay(replay, self.min_tail, self.reuse)
        return reuse, self.namespace(salt), self.sampling(**sampling), store and reuse.mode != "zero"

    def _generate_batch(
        self,
        prompts: list[Prompt],
        replay: ReplayArgument,
        salt: str,
        store: bool,
        sampling: dict[str, Any],
    ) -> list[GenerationResult]:
        reuse, namespace, settings, store = self._request(replay, salt, store, sampling)
        encoded = [self.encode(prompt) for prompt in prompts]
        return generate_batch(self, encoded, reuse, namespace, settings, store)

    def prefetch(self, ids: list[int], reuse: Reuse, namespace: Namespace) -> int:
        """Bring what lower tiers hold of a prompt into host memory. Returns how many pages came. Needs no lock."""
        return self.cache.prefetch(ids, namespace, reuse, self.backbone.topology)

    # ---- for times when nothing else runs

    def make_mean_state(self, text: Prompt | None = None, waits: Callable[[], bool] = lambda: False) -> bool:
        """Make the mean state that tails begin with where no anchor is near ("mixed"). Returns whether there is one now.

        Computes 2,048 tokens.

        Parameters
        ----------
        text : str or list of int, optional
            Of the kind that the model will read; English prose if not given.
        waits : callable
            Whether to give up; asked every 64 tokens.
        """
        return resting.make_mean_state(self, text, waits)

    def repair(self, waits: Callable[[], bool] = lambda: False) -> int:
        """Compute what was answered approximately again, exactly, so that later hits there are exact.

        It takes the lock for one sequence after another.

        Parameters
        ----------
        waits : callable
            Whether to stop; asked every 512 tokens.

        Returns
        -------
        int
            Tokens that were computed.
        """
        return resting.repair(self, waits)

    # ---- used by running generations, under the lock

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
        begin = self.clock.mark()
        if self.mean is not None:
            reuse = replace(reuse, mean=True)
        elif self.graphs is not None and self.ablation.skip and not self.cache.saves_states:
            # Graphs begin with zero states; lengthening other tails to theirs would be in vain.
            reuse = replace(reuse, buckets=self.graphs.buckets)
        plan = self.cache.lookup(ids, namespace, reuse, self.backbone.topology, self.backbone.costs)
        timings.lookup = self.clock.between(begin, self.clock.mark())
        if plan.estimate is not None:
            timings.predicted = self.pace.predict(plan.estimate) or 0.0
        try:
            sequence = self._restored(plan, ids, namespace, capacity, store)
        except BaseException as error:
            self.cache.release(plan)
            if plan.matched == 0 or not isinstance(error, Exception):
                raise
            log.exception("Loading %d cached tokens failed; the prompt is computed instead.", plan.matched)
            plan = without_reuse(plan, "load_failed")
            sequence = self._restored(plan, ids, namespace, capacity, store)
        return sequence, plan

    def _restored(self, plan: ReplayPlan, ids: list[int], namespace: Namespace, capacity: int, store: bool) -> Sequence:
        sequence = Sequence(self.backbone, self.cache, namespace, capacity, store)
        try:
            sequence.restore(plan, ids, self.prefill_chunk, self.graphs, self.ablation, self.clock, mean=self.mean)
        except BaseException:
            sequence.wait_loaded()
            sequence.abandon()
            raise
        return sequence
