"""Reading what a plan matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tailreplay.plan import ReplayPlan

if TYPE_CHECKING:
    import torch

    from tailreplay.tiers.anchor_arena import AnchorArena
    from tailreplay.tiers.host import HostArena


class PagesView:
    """The bytes behind a plan, made by `PrefixCache.fetch`; valid until the plan is released."""

    def __init__(self, arena: HostArena, plan: ReplayPlan, anchors: AnchorArena | None = None) -> None:
        self._arena = arena
        self._anchors = anchors
        self._anchor = plan.anchor
        self._slots = [page.slot for page in plan.pages]
        self._hidden_slots = [page.hidden_slot for page in plan.pages]
        self._size = arena.layout.page_size
        self._matched = plan.matched

    def keys_values(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the matched keys and values of the `index`-th attention layer into `keys` and `values`.

        Parameters
        ----------
        keys, values : torch.Tensor
            Shapes ``(m, kv_heads, head_dim)``, mutated. Copies to a CUDA device are asynchronous.
        """
        for part, out in zip(self._arena.layout.kv[index], (keys, values), strict=True):
            self._arena.read(part, self._slots, 0, self._matched, out)

    def hidden(self, index: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy hiddens ``start .. stop-1`` of the `index`-th stored group into `out`, shape ``(stop - start, d)``.

        Raises
        ------
        LookupError
            If they are not there: a plan makes sure of its tails only.
        """
        if start < stop and min(self._hidden_slots[start // self._size : -(-stop // self._size)]) < 0:
            raise LookupError(f"Hiddens {start} to {stop - 1} are not all in host memory.")
        self._arena.read(self._arena.layout.hidden[index], self._hidden_slots, start, stop, out)

    def states(self, out: Sequence[torch.Tensor]) -> None:
        """Copy the states of the plan's anchor into `out`, one tensor a part of the layout's `anchor`. Mutates `out`.

        Copies to a CUDA device are asynchronous.
        """
        assert self._anchors is not None
        assert self._anchor is not None
        self._anchors.read(self._anchor.slot, out)
