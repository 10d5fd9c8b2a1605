"""Whether a model fits where it is to be measured, from its config alone."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailreplay.bench.ttft_plan import Target, TtftPlan
from tailreplay.errors import InvalidRequestError
from tailreplay.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tailreplay.engines.transformers.backbone import Backbone

_GIB = 1 << 30
_LEAST_PAGES = 64 << 20
LEAST_VLLM = 2 * _GIB
_UNKNOWN = 1 << 62
_WORKSPACE = _GIB // 2
"""For activations of a chunk, and what the libraries take."""


@dataclass(frozen=True)
class Needs:
    """Bytes that a measurement takes.

    Attributes
    ----------
    kv : int
        Keys, values and states of the running sequence.
    pages : int
        Limit of the cache.
    """

    weights: int
    kv: int
    pages: int

    @property
    def total(self) -> int:
        """All of it, with some room to work in."""
        return self.weights + self.kv + self.pages + _WORKSPACE


def described(target: Target, dtype: str) -> Backbone:
    """Return a target's model on the meta device: shapes and costs, no memory.

    Raises
    ------
    TailReplayError
        If there is no such model, or it cannot be replayed.
    """
    import torch

    from tailreplay.bench.shapes import SHAPES, shape_config
    from tailreplay.engines.transformers.describe import describe, describe_config

    chosen = getattr(torch, dtype)
    if not target.is_shape:
        return describe(target.source, chosen)
    if target.source not in SHAPES:
        raise InvalidRequestError(f"Unknown shape '{target.source}'; known are {', '.join(SHAPES)} and bundled.")
    return describe_config(shape_config(target.source), chosen)


def needs_of(model: Backbone, engine: str, plan: TtftPlan) -> Needs:
    """Return what measuring a model takes."""
    costs = model.costs
    weights = sum(weight.numel() * weight.element_size() for weight in model.model.parameters())
    kv = costs.kv_bytes * plan.longest + costs.state_bytes
    if engine == "vllm":
        # Its blocks are padded to one size, and it keeps some for itself.
        kv = max(LEAST_VLLM, 2 * kv)
    if plan.host_bytes is not None:
        return Needs(weights, kv, parse_bytes(plan.host_bytes))
    # Pages of vLLM have up to some 2,000 tokens, and the last one is not full.
    pages = int(1.25 * costs.page_bytes_per_token * (max(plan.lengths) + 2048))
    return Needs(weights, kv, max(_LEAST_PAGES, pages))


def check_fits(target: Target, model: Backbone, plan: TtftPlan) -> None:
    """Raise `InvalidRequestError` if a target cannot be measured here: its positions, or memory, do not suffice.

    Nothing is allocated.
    """
    limit = model.max_tokens
    if limit is not None and plan.longest > limit:
        raise InvalidRequestError(
            f"The model '{target.source}' takes at most {limit:,} tokens, and a prefix of {max(plan.lengths):,} with a "
            f"query of {plan.query:,} and one answer token needs {plan.longest:,}: give shorter --lengths."
        )
    needs = needs_of(model, target.engine, plan)
    memory = (
        f"({format_bytes(needs.weights)} of weights, {format_bytes(needs.kv)} of keys, values and states, "
        f"{format_bytes(needs.pages)} of cached pages)"
    )
    advice = "take a smaller model or shorter --lengths, or see its limits with --limits-only"
    on_device = needs.total - needs.pages
    device = free_device_bytes()
    host = needs.total if device is None else needs.pages + _WORKSPACE
    if device is not None and on_device > device:
        raise InvalidRequestError(
            f"Measuring {target.name} needs {format_bytes(on_device)} on the device {memory}, and {format_bytes(device)} "
            f"are free there: {advice}."
        )
    if target.is_shape and target.engine == "vllm":
        host = max(host, needs.weights + _WORKSPACE)  # made here before vLLM reads it
        folder = Path(tempfile.gettempdir())
        room = shutil.disk_usage(folder).free
        if needs.weights > room:
            raise InvalidRequestError(
                f"vLLM reads {target.name} from a file of {format_bytes(needs.weights)}, and '{folder}' has "
                f"{format_bytes(room)} free: let TMPDIR name a larger folder."
            )
    free = free_host_bytes()
    if host > free:
        raise InvalidRequestError(
            f"Measuring {target.name} in {plan.dtype} needs {format_bytes(host)} of memory {memory}, and "
            f"{format_bytes(free)} are free: {advice}."
        )


def free_device_bytes() -> int | None:
    """Return the free bytes of the CUDA device; None if there is none."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def free_host_bytes() -> int:
    """Return the bytes that this process may still take: of the machine, or of its container if that is less."""
    return min(_machine_bytes(), _container_bytes())


def _machine_bytes() -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return _UNKNOWN


def _container_bytes() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return _UNKNOWN  # no limit ("max"), or none that can be read
    return limit - used + int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))
