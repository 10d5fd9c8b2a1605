"""The bytes of one rank's pages: from vLLM's cache to host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tailreplay.clock import Clock
from tailreplay.engines.vllm.anchor_store import anchor_room
from tailreplay.engines.vllm.compat import Geometry, TensorRanks
from tailreplay.engines.vllm.kv_blocks import KVBlocks, OpaqueBlocks, TokenBlocks
from tailreplay.engines.vllm.messages import Load
from tailreplay.engines.vllm.runs import Run
from tailreplay.engines.vllm.settings import Settings
from tailreplay.errors import CacheConfigError
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.slots import divide
from tailreplay.streams import CopyStream
from tailreplay.tiers.host import HostArena


class PageStore:
    """Keys and values of this rank's layers and its share of the hiddens, page by page.

    Parameters
    ----------
    caches : dict
        vLLM's cache tensors by layer name.
    blocks : int
        Number of blocks in each.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        ranks: TensorRanks,
        caches: dict[str, torch.Tensor],
        blocks: int,
    ) -> None:
        kind = TokenBlocks if geometry.is_sliceable else OpaqueBlocks
        self._layers: list[KVBlocks] = [
            kind(f"kv:{name}", caches[name], blocks, geometry.block_size) for name in geometry.attention_layers
        ]
        codec = settings.host_codec
        self._hidden = tuple(
            PartSpec(f"h{group.index}", (geometry.hidden_width,), geometry.dtype, codec)
            for group in geometry.topology.stored_groups
        )
        self._page = geometry.page_size
        self._ranks = ranks
        self._checks = settings.checksums
        self._device = next(iter(caches.values())).device
        self._stream = CopyStream(self._device)
        layout = PageLayout(self._page, tuple((layer.part,) for layer in self._layers), self._hidden)
        page_bytes, hidden_bytes = geometry.page_bytes(codec)
        if layout.page_bytes - layout.hidden_bytes > page_bytes - hidden_bytes or layout.hidden_bytes > hidden_bytes:
            raise CacheConfigError(
                f"A page of this rank has {layout.page_bytes} bytes, more than the {page_bytes} that vLLM's "
                "configuration says: the limit of host memory would not hold."
            )
        # As `Storage.catalog` divides it, which hands out the slots.
        room = settings.host_bytes - anchor_room(settings, geometry)[1]
        slots, hidden_slots = divide(room, page_bytes - hidden_bytes, hidden_bytes, settings.storage.hidden_share)
        self.arena = HostArena(layout, slots, hidden_slots, pin=self._device.type == "cuda")

    def put(self, run: Run, hiddens: torch.Tensor) -> None:
        """Write pages. Mutates the arena.

        Parameters
        ----------
        hiddens : torch.Tensor
            This rank's share of their hiddens, ``(stored groups, run.count, width)``.

        Raises
        ------
        ValueError
            If a codec cannot hold the numbers.
        """
        if run.slots[0] >= 0:
            for layer in self._layers:
                layer.store(run.blocks, run.start, run.count, self.arena, run.slots)
                self._seal(layer.part, run.slots, run.count)
        if run.hidden_slots[0] >= 0:
            for part, rows in zip(self._hidden, hiddens, strict=True):
                self.arena.write(part, run.hidden_slots, rows)
                self._seal(part, run.hidden_slots, run.count)

    def damaged(self, load: Load) -> set[int]:
        """Return the slots of pages whose bytes, as far as `load` needs them, are not those that were stored."""
        if not self._checks:
            return set()
        wrong: set[int] = set()
        for layer in self._layers:
            wrong.update(self.arena.damaged(layer.part, load.slots[load.present // self._page :]))
        first = min(load.matched - load.tail, load.matched // self._page * self._page) // self._page
        for slot, hidden in zip(load.slots[first:], load.hidden_slots[first:], strict=True):
            if hidden >= 0 and self.arena.is_damaged(self._hidden, hidden):
                wrong.add(slot)
        return wrong

    def fill(self, load: Load) -> None:
        """Copy keys and values into the request's blocks; `wait` before a forward uses them. Mutates vLLM's cache."""
        with self._stream.copying():
            for layer in self._layers:
                layer.fill(load.blocks, load.present, load.matched, self.arena, load.slots)

    def mark(self, clock: Clock) -> Any:
        """Mark the moment at which the copies ordered so far have ended."""
        return self._stream.mark(clock)

    def wait(self) -> None:
        """Let the next forward wait for the copies so far."""
        self._stream.wait()

    def hidden_shares(self, load: Load, start: int, stop: int) -> torch.Tensor:
        """Return this rank's share of hiddens ``start .. stop-1``, ``(stored groups, stop - start, width)``."""
        if not self._hidden:
            return torch.empty(0, stop - start, 0)
        part = self._hidden[0]
        out = torch.empty((len(self._hidden), stop - start, *part.shape), dtype=part.dtype, device=self._device)
        for group, rows in enumerate(out):
            self._read(load, group, start, rows)
        return out

    def hidden(self, load: Load, group: int, start: int, stop: int) -> torch.Tensor:
        """Return hiddens ``start .. stop-1`` of the stored group, ``(stop - start, d_model)``. All ranks call it alike."""
        return self._ranks.gather(self._share(load, group, start, stop))

    def _share(self, load: Load, group: int, start: int, stop: int) -> torch.Tensor:
        part = self._hidden[group]
        out = torch.empty((stop - start, *part.shape), dtype=part.dtype, device=self._device)
        self._read(load, group, start, out)
        return out

    def _read(self, load: Load, group: int, start: int, out: torch.Tensor) -> None:
        stop = start + out.shape[0]
        if start < stop and min(load.hidden_slots[start // self._page : -(-stop // self._page)]) < 0:
            raise LookupError(f"Hiddens {start} to {stop - 1} are not all in host memory.")
        self.arena.read(self._hidden[group], load.hidden_slots, start, stop, out)

    def _seal(self, part: PartSpec, slots: Sequence[int], count: int) -> None:
        # What goes to tiers below, and what comes back, is checked in any case.
        if self._checks:
            for at, slot in enumerate(slots):
                # A whole block is one thing, however few of its tokens are there.
                tokens = self._page if part.whole else min(self._page, count - at * self._page)
                self.arena.seal(part, slot, tokens)
