"""The ranks that hold one pipeline stage together (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from tailreplay.errors import UnsupportedModelError


class TensorRanks:
    """All of them run the same batches and hold the same hiddens, so each stores its share of every hidden only.

    Attributes
    ----------
    size, rank : int
        How many there are, and which one this is.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        self.size = size
        self.rank = rank
        self._group = group

    @classmethod
    def current(cls) -> TensorRanks:
        """Return this process's. Only inside a worker."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return cls(group.world_size, group.rank_in_group, group)

    def share(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of hiddens ``(n, d_model)``: a view of shape ``(n, d_model / size)``."""
        width = hidden.shape[-1] // self.size
        return hidden[..., self.rank * width : (self.rank + 1) * width]

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        """Undo `share`. Every rank calls it with its part of the same tokens."""
        if self.size == 1:
            return share
        whole: torch.Tensor = self._group.all_gather(share.contiguous(), dim=-1)
        return whole

    def agree(self, fine: Sequence[bool]) -> list[bool]:
        """Return for each item whether it is fine on every rank. Every rank calls it with as many items."""
        if self.size == 1 or not fine:
            return list(fine)
        flags = torch.tensor(fine, dtype=torch.int32)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [bool(flag) for flag in flags.tolist()]


def check_whole_hiddens(config: VllmConfig) -> None:
    """Look for a compilation pass that leaves each rank a slice of the hiddens between layers.

    Raises
    ------
    UnsupportedModelError
        If there is one.
    """
    # vLLM 0.31 has such a pass, 0.32 has none any more.
    divides = getattr(config.compilation_config.pass_config, "enable_sp", False)
    if divides and config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedModelError(
            "tailreplay needs whole hiddens on every rank: start without sequence parallelism (enable_sp in the "
            "compilation config's pass_config)."
        )
