"""A vLLM engine in this process whose capture can be switched off between two calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.bench.ttft_needs import LEAST_VLLM
from tailreplay.bench.ttft_plan import Target
from tailreplay.bench.ttft_vllm import folder_of, prepare, start

if TYPE_CHECKING:
    from tailreplay.bench.capture import Timed
    from tailreplay.engines.transformers.backbone import Backbone

_TINY = [5, 6, 7]


def timed_engine(target: Target, model: Backbone, longest: int, concurrency: int, folder: Path) -> Timed:
    """Start the engine and return what times it.

    "Not capturing" is without taps in the forward, and with requests that store nothing.

    Parameters
    ----------
    model : Backbone
        The target's, on the meta device.
    longest : int
        Tokens of the longest request, its answer included.
    folder : Path
        A shape's weights are written to it.

    Raises
    ------
    TailReplayError
        If vLLM is not installed or does not take the model.
    """
    # Its blocks are padded to one size, and it keeps some for itself.
    prepare(max(LEAST_VLLM, 2 * concurrency * (model.costs.kv_bytes * longest + model.costs.state_bytes)))
    from vllm import SamplingParams

    flags = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": min(longest + 64, model.max_tokens or longest + 64),
        "max_num_batched_tokens": 2048,
    }
    llm = start(folder_of(target, "bfloat16", folder), "bfloat16", 64 << 20, flags)
    taps = _Taps()

    def timed(prompts: list[list[int]], generate: int, capturing: bool) -> float:
        def params(tokens: int, store: bool) -> Any:
            options = {"tailreplay": {"mode": "off", "store": store}}
            return SamplingParams(
                max_tokens=tokens,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": options},
            )

        return timed_call(llm, taps.install, params, prompts, generate, capturing)

    return timed


def timed_call(
    llm: Any,
    install: Callable[[bool], None],
    params: Callable[[int, bool], Any],
    prompts: list[list[int]],
    generate: int,
    capturing: bool,
) -> float:
    """Return the seconds that the prompts and one tiny request after them take.

    A request's last page is stored in the step after its last one: without another request that step would be one of the
    next call, which may be one that does not capture. Both kinds of call have it, so that only the storing differs.

    Parameters
    ----------
    install : callable
        Puts the model's taps in, or takes them out.
    params : callable
        Returns sampling parameters for a number of tokens to generate and whether to store.
    """
    install(capturing)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params(generate, capturing), use_tqdm=False)
    llm.generate([{"prompt_token_ids": _TINY}], params(1, False), use_tqdm=False)
    return time.perf_counter() - begin


class _Taps:
    """The hooks of the model in this process."""

    def __init__(self) -> None:
        from tailreplay.engines.vllm.plugin import tapped_model

        model = tapped_model()
        firsts = [model.decoder.layers[group.layers[0]] for group in model.topology.stored_groups]
        self._hooks: list[tuple[Any, dict[Any, Any]]] = [(layer, dict(layer._forward_pre_hooks)) for layer in firsts]

    def install(self, wanted: bool) -> None:
        """Put the hooks in, or take them out."""
        for layer, hooks in self._hooks:
            layer._forward_pre_hooks.clear()
            if wanted:
                layer._forward_pre_hooks.update(hooks)
