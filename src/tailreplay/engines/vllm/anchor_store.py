"""The bytes of one rank's anchors: states of its recurrent layers, from vLLM's cache to host memory and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tailreplay.errors import CacheConfigError
from tailreplay.pages import state_codec
from tailreplay.tiers.anchor_arena import AnchorArena

if TYPE_CHECKING:
    from tailreplay.engines.vllm.compat import Geometry, StateBatch
    from tailreplay.engines.vllm.settings import Settings


def anchor_room(settings: Settings, geometry: Geometry) -> tuple[int, int]:
    """Return how many anchors each rank has room for, and the bytes of all of them, which pages do without."""
    storage = settings.storage
    each = geometry.anchor_bytes(storage.anchor_codec)
    slots = storage.anchor_slots(settings.host_bytes, geometry.page_bytes(settings.host_codec)[0], each)
    return slots, slots * each


class AnchorStore:
    """Saves states from the blocks of a request, and puts them into those of another.

    Raises
    ------
    CacheConfigError
        If an anchor of this rank is larger than vLLM's configuration says.
    """

    def __init__(self, settings: Settings, geometry: Geometry, states: StateBatch, pin: bool = False) -> None:
        codec = settings.storage.anchor_codec
        parts = [replace(part, codec=state_codec(part, codec)) for part in states.parts]
        most = geometry.anchor_bytes(codec)
        size = sum(part.token_bytes for part in parts)
        if size > most:
            raise CacheConfigError(
                f"The states of this rank have {size} bytes, more than the {most} that vLLM's configuration says: the "
                "limit of host memory would not hold."
            )
        slots, _ = anchor_room(settings, geometry)
        self._states = states
        self._checks = settings.checksums
        self.arena = AnchorArena(parts, slots, pin and slots > 0)

    def save(self, slot: int, blocks: dict[int, int]) -> None:
        """Copy the states in `blocks` to `slot`: once every forward so far has run. Mutates the arena.

        Raises
        ------
        ValueError
            If a codec cannot hold the numbers.
        """
        self.arena.write(slot, self._states.views(blocks))

    def load(self, slot: int, blocks: dict[int, int]) -> None:
        """Copy a slot into the states in `blocks`, before anything that the device is asked to do next."""
        self.arena.read(slot, self._states.views(blocks))

    def is_damaged(self, slot: int) -> bool:
        """Whether a slot does not hold what was saved."""
        return self._checks and self.arena.is_damaged(slot)
