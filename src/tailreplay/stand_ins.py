"""Better bytes for pages that are there already: written beside them, and taken over when they are complete."""

from __future__ import annotations

from tailreplay.page import Page
from tailreplay.provenance import Provenance
from tailreplay.room import Room


class StandIns:
    """Pages that hold a place for what is being written of a resident page: all of it, or hiddens that it lacks.

    Parameters
    ----------
    room : Room
        Where slots come from and go to.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._present: dict[Page, Page] = {}

    def offer(self, present: Page, provenance: Provenance, hidden: bool) -> Page | None:
        """Return a stand-in to be filled for `present`, which is pinned; None if what is to be had is no better.

        Parameters
        ----------
        hidden : bool
            Whether there are hiddens to store.
        """
        slot: int | None = -1
        # Somebody may be reading a page that is pinned twice: a better copy waits for a later request. Nobody reads hiddens
        # that are not there.
        if provenance < present.provenance and present.pins == 1:
            slot = self._room.take(present.tenant)
        elif not hidden or present.has_hidden or present in self._present.values():
            slot = None
        if slot is None:
            return None
        fill = Page(present.key, present.ids, present.parent, slot, provenance, present.order)
        self._room.give_hidden(fill, hidden)
        if slot < 0 and not fill.has_hidden:
            return None
        self._present[fill] = present
        return fill

    def pop(self, fill: Page) -> Page | None:
        """Forget a stand-in, and return the page that it stands for; None if it is none."""
        return self._present.pop(fill, None)

    def take_over(self, present: Page, fill: Page, tick: int) -> None:
        """Let a resident page have a stand-in's bytes, unless somebody reads those that it has. Mutates both."""
        adds = fill.slot < 0
        if adds:
            # Nobody reads hiddens that are not there, whoever has pinned the page.
            useful = present.ready and not present.has_hidden
        else:
            useful = present.pins == 1 and fill.provenance < present.provenance
        if not useful:
            self._room.leave(fill)
            return
        assert present.parent is not None
        if present.ready:
            present.parent.siblings(present.provenance).discard(present)
        if adds:
            present.provenance = present.provenance.worst(fill.provenance)
        else:
            self._room.leave(present)
            present.slot, present.provenance = fill.slot, fill.provenance
        present.hidden_slot = fill.hidden_slot
        if fill.gates is not None and (not adds or present.gates is None):
            present.gates = fill.gates
        present.hidden_used = tick
        present.hidden_read = present.hidden_read or adds
        present.ready, present.damaged = True, False
        present.parent.siblings(present.provenance).add(present)
