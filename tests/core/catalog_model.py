"""A catalog written down as plainly as possible, and a driver that gives the real one the same interface.

Both speak of pages by *name*: the number of a namespace and all tokens from the sequence's start to the page's end. The
model has no keys, no tree, no heap and no sorted siblings: every question is a scan over all entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tailreplay import room
from tailreplay.catalog import Catalog
from tailreplay.events import PageEvents, PageStored
from tailreplay.keys import Namespace, token_bytes
from tailreplay.page import Page
from tailreplay.provenance import ANY, ONLY_EXACT, Provenance

PAGE_SIZE = 16
PAGE_BYTES = 100
HIDDEN_BYTES = 40
NAMESPACES = (
    Namespace("model", "layout", PAGE_SIZE),
    Namespace("model", "layout", PAGE_SIZE, salt="tenant"),
    Namespace("model", "layout", PAGE_SIZE, adapter="tenant"),
)
Tokens = tuple[int, ...]
Name = tuple[int, Tokens]


def parent_of(name: Name) -> Name:
    """Name of the page before `name`; a root's tokens are empty."""
    namespace, tokens = name
    return namespace, tokens[: (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE]


def names_of(namespace: int, tokens: Tokens) -> list[Name]:
    """Names of all pages of a sequence, in order."""
    ends = [*range(PAGE_SIZE, len(tokens), PAGE_SIZE), len(tokens)]
    return [(namespace, tokens[:end]) for end in ends]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, token by token."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


@dataclass
class Entry:
    """What the model knows of a page."""

    provenance: Provenance
    born: int
    pins: int = 1
    used: int = 0
    ready: bool = False
    damaged: bool = False
    hidden: bool = False
    hidden_used: int = 0
    hidden_read: bool = False
    better: Provenance | None = None
    """Provenance of the bytes that are being written to replace the present ones, or of hiddens to be added."""
    adds: bool = False
    """Whether only hiddens are added."""
    better_hidden: bool = False
    """Whether what is being written has hiddens."""


class Model:
    """What the catalog should do."""

    def __init__(self, slots: int, hidden_slots: int) -> None:
        self.slots = slots
        self.hidden_slots = hidden_slots
        self.evictions = self.stripped = 0
        self.entries: dict[Name, Entry] = {}
        self._tick = 0
        self._births = 0

    # ---- questions

    def state(self) -> dict[Name, tuple[Provenance, bool]]:
        """Ready pages: their provenance, and whether their hiddens are there."""
        return {name: (entry.provenance, entry.hidden) for name, entry in self.entries.items() if entry.ready}

    def slots_used(self) -> int:
        return len(self.entries) + sum(entry.better is not None and not entry.adds for entry in self.entries.values())

    def hidden_used(self) -> int:
        return sum(entry.hidden + entry.better_hidden for entry in self.entries.values())

    def match(self, namespace: int, tokens: Tokens, limit: int, exact_only: bool) -> tuple[int, str]:
        """Longest common prefix over everything resident, and why it is no longer."""
        longest = self._longest(namespace, tokens, exact_only)
        if longest >= limit:
            return max(0, limit), "end"
        if exact_only and self._longest(namespace, tokens, False) > longest:
            return longest, "approximate"
        goes_on = any(
            len(name[1]) > longest and name[1][:longest] == tokens[:longest]
            for name in self.entries
            if name[0] == namespace and self._reachable(name, False)
        )
        return longest, "diverged" if goes_on else "unseen"

    def evictable(self) -> list[Name]:
        """Names that may be evicted, in the order in which they would be."""
        free = [name for name, entry in self.entries.items() if self._is_free(name, entry)]
        return sorted(free, key=lambda name: (self.entries[name].used, self.entries[name].born))

    def superseded(self, name: Name, provenance: Provenance) -> bool:
        """Whether a ready page of the same parent begins with the tokens of `name`, goes on, and is no worse."""
        return any(
            entry.ready
            and entry.provenance <= provenance
            and parent_of(other) == parent_of(name)
            and other[0] == name[0]
            and len(other[1]) > len(name[1])
            and other[1][: len(name[1])] == name[1]
            for other, entry in self.entries.items()
        )

    def damaged(self) -> list[Name]:
        """Names of damaged pages that may be written again now."""
        return sorted(name for name, entry in self.entries.items() if entry.damaged and not entry.pins)

    # ---- changes; each returns what can be compared with the real catalog's answer

    def pin(self, names: Sequence[Name], tail: int | None = None) -> None:
        self._tick += 1
        for name in names:
            if name[1]:
                self.entries[name].used = self._tick
                self.entries[name].pins += 1
                if tail is not None and len(name[1]) > tail:
                    self.entries[name].hidden_used, self.entries[name].hidden_read = self._tick, True

    def unpin(self, names: Iterable[Name]) -> None:
        for name in names:
            if name[1]:
                self.entries[name].pins -= 1
        self._drop_superseded()

    def admit(self, name: Name, provenance: Provenance, hidden: bool) -> str:
        present = self.entries.get(name)
        if present is not None:
            return self._admit_again(name, present, provenance, hidden)
        if self.superseded(name, provenance):
            return "covered"
        if not self._make_room():
            return "full"
        self._births += 1
        entry = Entry(provenance, self._births)
        entry.hidden = hidden and self._make_hidden_room()
        self.entries[name] = entry
        return "new+h" if entry.hidden else "new"

    def condemn(self, name: Name) -> None:
        entry = self.entries[name]
        if entry.ready:
            entry.ready, entry.damaged = False, True
            self._drop_superseded()

    def commit(self, name: Name) -> None:
        entry = self.entries[name]
        if entry.better is not None:
            if entry.adds and entry.ready and not entry.hidden:
                entry.provenance, entry.hidden = entry.provenance.worst(entry.better), True
                entry.hidden_used, entry.hidden_read = self._tick, True
            elif not entry.adds and entry.pins == 1:
                entry.provenance, entry.hidden = entry.better, entry.better_hidden
                entry.hidden_used = self._tick
                entry.ready, entry.damaged = True, False
            self._end_stand_in(entry)
        else:
            self._tick += 1
            entry.used = entry.hidden_used = self._tick
            entry.ready, entry.damaged = True, False
            self._grow(name)
        self._drop_superseded()

    def abort(self, name: Name) -> None:
        entry = self.entries[name]
        if entry.better is not None:
            self._end_stand_in(entry)
            self.unpin([name])
        elif entry.damaged:
            self.unpin([name])
        else:
            del self.entries[name]
            self._drop_superseded()

    def clear(self) -> None:
        while free := self.evictable():
            del self.entries[free[0]]

    # ---- inside

    def _grow(self, name: Name) -> None:
        """Let the hiddens of the last page that begins far before the end of `name` go first, if nobody has read them."""
        far = [each for each in names_of(*name)[:-1] if len(parent_of(each)[1]) < len(name[1]) - room.NEAR_TOKENS]
        if far and not self.entries[far[-1]].hidden_read:
            self.entries[far[-1]].hidden_used = 0

    def _longest(self, namespace: int, tokens: Tokens, exact_only: bool) -> int:
        lengths = [
            common(name[1], tokens)
            for name in self.entries
            if name[0] == namespace and self._reachable(name, exact_only)
        ]
        return max(lengths, default=0)

    def _reachable(self, name: Name, exact_only: bool) -> bool:
        """Whether the page and all before it are ready (and exact)."""
        for each in names_of(*name):
            entry = self.entries.get(each)
            if entry is None or not entry.ready or (exact_only and not entry.provenance.is_exact):
                return False
        return True

    def _is_free(self, name: Name, entry: Entry) -> bool:
        written = entry.ready or entry.damaged
        return written and entry.pins == 0 and not any(parent_of(other) == name for other in self.entries)

    def _make_room(self) -> bool:
        if self.slots_used() < self.slots:
            return True
        free = self.evictable()
        if free:
            del self.entries[free[0]]
            self.evictions += 1
            self._drop_superseded()
        return bool(free)

    def _make_hidden_room(self) -> bool:
        if self.hidden_used() < self.hidden_slots:
            return True
        free = [
            (e.hidden_used, e.born, name) for name, e in self.entries.items() if e.ready and e.hidden and not e.pins
        ]
        if free:
            self.entries[min(free)[2]].hidden = False
            self.stripped += 1
        return bool(free)

    def _admit_again(self, name: Name, present: Entry, provenance: Provenance, hidden: bool) -> str:
        if present.damaged and not present.pins:
            present.provenance, present.pins = provenance, 1
            present.hidden = hidden and (present.hidden or self._make_hidden_room())
            return "new+h" if present.hidden else "new"
        if not present.ready:
            return "busy"
        self.pin([name])
        if present.better is not None:
            return "present"
        if provenance < present.provenance and present.pins == 1:
            if self._make_room():
                present.better, present.adds = provenance, False
                present.better_hidden = hidden and self._make_hidden_room()
        elif hidden and not present.hidden and self._make_hidden_room():
            present.better, present.adds, present.better_hidden = provenance, True, True
        if present.better is None:
            return "present"
        kind = "adds" if present.adds else "better"
        return f"{kind}+h" if present.better_hidden else kind

    @staticmethod
    def _end_stand_in(entry: Entry) -> None:
        entry.better, entry.adds, entry.better_hidden = None, False, False

    def _drop_superseded(self) -> None:
        while gone := [name for name in self.evictable() if self._is_useless(name)]:
            for name in gone:
                del self.entries[name]

    def _is_useless(self, name: Name) -> bool:
        entry = self.entries[name]
        return entry.damaged or self.superseded(name, entry.provenance)


class Driver:
    """The real catalog behind the model's interface. Keeps what a client would keep: pages that it has pinned."""

    def __init__(self, slots: int, hidden_slots: int) -> None:
        self.events = PageEvents()
        self.known: dict[bytes, PageStored] = {}
        # The odd bytes must not become a slot.
        limit = slots * (PAGE_BYTES - HIDDEN_BYTES) + hidden_slots * HIDDEN_BYTES
        self.catalog = Catalog(
            PAGE_SIZE,
            limit + HIDDEN_BYTES * hidden_slots // slots,
            PAGE_BYTES,
            self.events,
            hidden_bytes=HIDDEN_BYTES,
            hidden_share=hidden_slots / slots,
        )
        assert (self.catalog.slots, self.catalog.hidden_slots) == (slots, hidden_slots)
        self.fills: dict[Name, Page] = {}
        self.held: dict[Name, Page] = {}
        self._holds: dict[Name, int] = {}

    def names(self) -> dict[Name, Page]:
        """Every ready or damaged page by name, read off the pages themselves."""
        return {self._name(page): page for page in self.catalog.resident(damaged=True)}

    def state(self) -> dict[Name, tuple[Provenance, bool]]:
        return {name: (page.provenance, page.has_hidden) for name, page in self.names().items() if page.ready}

    def match(self, namespace: int, tokens: Tokens, limit: int, exact_only: bool) -> tuple[int, str, list[Name]]:
        found = self.catalog.match(
            token_bytes(tokens), NAMESPACES[namespace], limit=limit, terms=ONLY_EXACT if exact_only else ANY
        )
        return found.tokens, found.stop, [self._name(page) for page in found.pages]

    def pin(self, names: Sequence[Name], tail: int | None = None) -> None:
        resident = self.names()
        pages = [
            self.held.get(name) or (resident[name] if name[1] else self.catalog.root(NAMESPACES[name[0]]))
            for name in names
        ]
        self.catalog.pin(pages, tail)
        for name, page in zip(names, pages, strict=True):
            self._hold(name, page)

    def unpin(self, names: Sequence[Name]) -> None:
        self.catalog.unpin([self._drop(name) for name in names])

    def admit(self, name: Name, provenance: Provenance, hidden: bool) -> str:
        parent = parent_of(name)
        ids = token_bytes(name[1][len(parent[1]) :])
        admission = self.catalog.admit(self.held[parent], NAMESPACES[name[0]], ids, provenance, hidden)
        if admission.page is None:
            return admission.reason
        self._hold(name, admission.page)
        if admission.fill is None:
            return "present"
        fill = self.fills[name] = admission.fill
        kind = "new" if fill is admission.page else "better" if fill.slot >= 0 else "adds"
        return f"{kind}+h" if fill.has_hidden else kind

    def commit(self, name: Name) -> None:
        self.catalog.commit(self.fills.pop(name))

    def condemn(self, name: Name) -> None:
        self.catalog.condemn(self.held[name])

    def abort(self, name: Name) -> None:
        self._drop(name)
        self.catalog.abort(self.fills.pop(name))

    def clear(self) -> None:
        self.catalog.clear()

    def follow(self) -> None:
        """Do what a router does with events, and check that it never hears anything that makes no sense."""
        for event in self.events.take():
            if isinstance(event, PageStored):
                assert event.key not in self.known
                assert event.parent is None or event.parent in self.known
                self.known[event.key] = event
            else:
                del self.known[event.key]
                assert all(event.key != other.parent for other in self.known.values())

    def let_go(self) -> None:
        """Abort all that is being written and unpin all that is held."""
        for name in sorted(self.fills, key=lambda name: -len(name[1])):
            self.abort(name)
        while self.held:
            self.unpin(list(self.held))

    def slots(self) -> list[int]:
        """Slots of all pages, written or being written, in no order."""
        # A damaged page that is being written again is both.
        pages = {id(page): page for page in [*self.catalog.resident(damaged=True), *self.fills.values()]}
        return [page.slot for page in pages.values() if page.slot >= 0]

    def hidden_slots(self) -> list[int]:
        """Slots of all hiddens, written or being written, in no order."""
        pages = {id(page): page for page in [*self.catalog.resident(damaged=True), *self.fills.values()]}
        return [page.hidden_slot for page in pages.values() if page.has_hidden]

    def _hold(self, name: Name, page: Page) -> None:
        self.held[name] = page
        self._holds[name] = self._holds.get(name, 0) + 1

    def _drop(self, name: Name) -> Page:
        self._holds[name] -= 1
        return self.held[name] if self._holds[name] else self.held.pop(name)

    def _name(self, page: Page) -> Name:
        ids = b""
        while page.parent is not None:
            ids = page.ids + ids
            page = page.parent
        namespace = next(number for number, each in enumerate(NAMESPACES) if each.digest == page.key)
        return namespace, tuple(int.from_bytes(ids[at : at + 4], "big") for at in range(0, len(ids), 4))
