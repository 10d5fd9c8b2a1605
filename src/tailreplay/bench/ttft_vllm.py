"""Time to first token in vLLM, with the engine in this process."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailreplay.ablation import METHOD, Ablation
from tailreplay.bench.traffic import vllm_version
from tailreplay.bench.ttft_needs import needs_of
from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.bench.ttft_rows import Sample, rest_of
from tailreplay.errors import TailReplayError

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone

_BATCHED_TOKENS = 2048
_GIB = 1 << 30


class VllmEngine:
    """One request at a time; see `ttft_turns.Engine`. The rest of a hit's time counts as `query`."""

    def __init__(self, target: Target, model: Backbone, plan: TtftPlan) -> None:
        needs = needs_of(model, target.engine, plan)
        prepare(needs.kv)
        import torch

        from tailreplay.bench.memory_copies import copy_bandwidth
        from tailreplay.clock import clock_of
        from tailreplay.engines.vllm.inside import Inside

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.bandwidth = copy_bandwidth(device)
        self.costs = model.costs
        self.vocabulary = int(model.model.get_input_embeddings().num_embeddings)
        on_cpu = device.type == "cpu"
        longest = min(plan.longest + 256, model.max_tokens or plan.longest + 256)
        self.flags: dict[str, Any] = {
            # CUDA graphs and compiled code are what people run on a GPU; the CPU build has neither to gain from here.
            "enforce_eager": on_cpu,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": _BATCHED_TOKENS,
            "max_model_len": longest,
        }
        with tempfile.TemporaryDirectory() as folder:
            folder_or_id = folder_of(target, plan.dtype, Path(folder))
            # The paper's replay is timed, and `needs.pages` is room for pages only.
            self._llm = start(folder_or_id, plan.dtype, needs.pages, self.flags, anchor_bytes=0)
        self._inside = Inside(self._llm)
        self._clock = clock_of(device)
        self._beside = not on_cpu
        self.flags["phases"] = "host clock" if on_cpu else "CUDA events"
        self.flags["copies"] = "in line" if on_cpu else "beside replay"

    def store(self, ids: list[int]) -> None:
        self._run(ids, {"mode": "off"})
        self._run([5, 6, 7], {"mode": "off", "store": False})  # a step in which the last page lands

    def cold(self, ids: list[int]) -> Sample:
        return Sample(self._run(ids, {"mode": "off", "store": False})[0])

    def hit(self, ids: list[int], ratio: float, ablation: Ablation) -> Sample:
        self._inside.set(ablation, self._clock)
        before = self._inside.spent()
        total, report = self._run(ids, {"mode": "replay", "ratio": ratio, "store": False})
        self._inside.set(METHOD, self._clock)
        spent = self._inside.spent().since(before)
        return Sample(
            total=total,
            lookup=spent.lookup,
            copy=spent.copy,
            replay=spent.replay,
            query=rest_of(total, spent.lookup, spent.copy, spent.replay, self._beside and ablation.overlap),
            matched=report.get("matched", 0),
            replayed=report.get("replayed", 0),
        )

    def close(self) -> None:
        """End the engine."""
        del self._llm
        self._inside.close()

    def _run(self, ids: list[int], options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": {"tailreplay": options}}
        )
        self._clock.settle()
        begin = time.perf_counter()
        try:
            (out,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        except RuntimeError as error:
            raise _failed("run", error) from error
        seconds = time.perf_counter() - begin
        return seconds, (out.kv_transfer_params or {}).get("tailreplay", {})


def prepare(kv_bytes: int) -> None:
    """Set what vLLM reads when it is imported, for an engine in this process; what the caller's environment says stays.

    Raises
    ------
    TailReplayError
        If vLLM is not installed.
    """
    from tailreplay import torchvision_shim
    from tailreplay.engines.vllm.launch import environment

    vllm_version()
    torchvision_shim.install()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-kv_bytes // _GIB)))
    for name, value in environment({}).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def folder_of(target: Target, dtype: str, folder: Path) -> str:
    """Return the folder or hub id that vLLM loads: as named, or `folder`, where a shape's random weights are written to."""
    import torch

    from tailreplay.bench.shapes import random_model
    from tailreplay.loading import model_path

    if not target.is_shape:
        return model_path(target.source)
    random_model(target.source, getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def start(model: str, dtype: str, host_bytes: int, flags: dict[str, Any], **settings: Any) -> Any:
    """Return a `vllm.LLM` with the connector.

    Parameters
    ----------
    flags : dict
        More arguments of it.
    settings
        More of the connector's (see `engines.vllm.settings.Settings`).

    Raises
    ------
    TailReplayError
        If vLLM does not take the model.
    """
    from vllm import LLM

    from tailreplay.engines.vllm.launch import transfer_config

    try:
        return LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            kv_transfer_config=transfer_config({"host_bytes": host_bytes, "min_match": 1, **settings}),
            **flags,
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _failed("start", error) from error


def _failed(doing: str, error: Exception) -> TailReplayError:
    """Return what to say of a model that vLLM, or a kernel of it, does not take."""
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    return TailReplayError(f"vLLM could not {doing} this model: {reason}.")
