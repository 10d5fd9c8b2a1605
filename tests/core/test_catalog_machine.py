"""The catalog against the brute-force model of `tests.core.catalog_model`, under operations in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tailreplay import room
from tailreplay.provenance import EXACT, Provenance
from tests.core.catalog_model import (
    HIDDEN_BYTES,
    NAMESPACES,
    PAGE_BYTES,
    PAGE_SIZE,
    Driver,
    Model,
    Name,
    Tokens,
    names_of,
    parent_of,
)

CLEAR_EVERY = 25

# Runs of few values, cut near page borders: most sequences share a prefix with others and part inside a page.
runs = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 2]), st.sampled_from([1, 2, 7, 15, 16, 17, 32])), min_size=1, max_size=4
)
namespaces = st.sampled_from([0] * 6 + list(range(1, len(NAMESPACES))))
provenances = st.sampled_from([EXACT, EXACT, EXACT, Provenance(0, lossy=True), Provenance(1), Provenance(2)])


def expand(pieces: list[tuple[int, int]]) -> Tokens:
    return tuple(value for value, count in pieces for _ in range(count))


@dataclass
class Writer:
    """A sequence on its way into the catalog."""

    names: list[Name]
    provenance: Provenance
    at: Name
    """Pinned: the page after which the next one to be committed goes."""
    admitted: list[tuple[Name, str]] = field(default_factory=list)
    stopped: bool = False


class CatalogMachine(RuleBasedStateMachine):
    """Every step does the same to the catalog and to the model and compares the answers."""

    prompts = Bundle("prompts")
    plans = Bundle("plans")
    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.slots = (1, 1)
        self.driver = Driver(1, 1)
        self.model = Model(1, 1)
        self.log: list[tuple[str, tuple[Any, ...], Any]] = []
        self.clears = 1
        self.eager = False

    def act(self, method: str, *args: Any) -> Any:
        """Call `method` of the catalog and of the model; their answers must agree."""
        answer = getattr(self.driver, method)(*args)
        assert answer == getattr(self.model, method)(*args), method
        self.log.append((method, args, answer))
        return answer

    # ---- prompts

    @initialize(
        target=prompts,
        slots=st.sampled_from([1, 2, 3, 5, 8, 12]),
        hidden_slots=st.sampled_from([1, 2, 4, 12]),
        pieces=st.lists(runs, min_size=3, max_size=3),
        eager=st.booleans(),
    )
    def start(self, slots: int, hidden_slots: int, pieces: list[list[tuple[int, int]]], eager: bool) -> Any:
        self.slots = slots, min(slots, hidden_slots)
        self.eager = eager
        self.driver = Driver(*self.slots)
        self.model = Model(*self.slots)
        return multiple(*map(expand, pieces))

    @rule(target=prompts, pieces=runs)
    def invent(self, pieces: list[tuple[int, int]]) -> Tokens:
        return expand(pieces)

    @rule(target=prompts, base=prompts, cut=st.integers(0, 64), pieces=runs)
    def branch(self, base: Tokens, cut: int, pieces: list[tuple[int, int]]) -> Tokens:
        return base[:cut] + expand(pieces)[: 5 * PAGE_SIZE]

    # ---- readers

    @rule(
        target=plans,
        namespace=namespaces,
        prompt=prompts,
        limit=st.one_of(st.none(), st.integers(-1, 80)),
        exact_only=st.booleans(),
        tail=st.sampled_from([0, 0, 20, 40]),
    )
    def look_up(self, namespace: int, prompt: Tokens, limit: int | None, exact_only: bool, tail: int = 0) -> list[Name]:
        limit = len(prompt) - 1 if limit is None else limit
        tokens, stop, path = self.driver.match(namespace, prompt, limit, exact_only)
        assert (tokens, stop) == self.model.match(namespace, prompt, limit, exact_only)
        assert len(path) == -(-tokens // PAGE_SIZE)
        for at, name in zip(range(0, tokens, PAGE_SIZE), path, strict=True):
            end = min(tokens, at + PAGE_SIZE)
            assert name[0] == namespace
            assert name[1][:end] == prompt[:end]
            assert not exact_only or self.model.entries[name].provenance.is_exact
        self.act("pin", path, tail)
        return path

    @rule(plan=consumes(plans))
    def release(self, plan: list[Name]) -> None:
        self.act("unpin", plan)

    @rule(plan=consumes(plans), at=st.sampled_from([0, 0, 1, 5]))
    def find_damage(self, plan: list[Name], at: int) -> None:
        """What a load does that meets a damaged page: it gives up."""
        if plan:
            self.act("condemn", plan[at % len(plan)])
        self.act("unpin", plan)

    # ---- writers

    @rule(target=writers, namespace=namespaces, prompt=prompts, provenance=provenances)
    def open(self, namespace: int, prompt: Tokens, provenance: Provenance) -> Writer:
        names = names_of(namespace, prompt)
        root = parent_of(names[0])
        self.act("pin", [root])
        return Writer(names, provenance, root)

    @rule(target=writers, plan=plans, prompt=prompts, provenance=provenances)
    def open_after(self, plan: list[Name], prompt: Tokens, provenance: Provenance) -> Any:
        full = [name for name in plan if len(name[1]) % PAGE_SIZE == 0]
        if not full:
            return multiple()
        self.act("pin", [full[-1]])
        return Writer(names_of(full[-1][0], full[-1][1] + prompt)[len(full) :], provenance, full[-1])

    @rule(writer=writers, pages=st.integers(1, 3), hidden=st.booleans())
    def admit(self, writer: Writer, pages: int, hidden: bool = True) -> None:
        for _ in range(pages):
            if writer.names and not writer.stopped:
                name = writer.names.pop(0)
                outcome = self.act("admit", name, writer.provenance, hidden)
                writer.stopped = outcome in ("full", "covered", "busy")
                if not writer.stopped:
                    writer.admitted.append((name, outcome))

    @rule(writer=writers)
    def commit(self, writer: Writer) -> None:
        if writer.admitted:
            name, outcome = writer.admitted.pop(0)
            if outcome != "present":
                self.act("commit", name)
            self.act("unpin", [writer.at])
            writer.at = name

    @rule(writer=consumes(writers))
    def fail(self, writer: Writer) -> None:
        for name, outcome in reversed(writer.admitted):
            self.act("unpin" if outcome == "present" else "abort", [name] if outcome == "present" else name)
        self.act("unpin", [writer.at])

    @rule(writer=consumes(writers))
    def finish(self, writer: Writer) -> None:
        self.admit(writer, len(writer.names))
        while writer.admitted:
            self.commit(writer)
        self.act("unpin", [writer.at])

    @rule(namespace=namespaces, prompt=prompts, provenance=provenances)
    def store(self, namespace: int, prompt: Tokens, provenance: Provenance) -> None:
        self.finish(self.open(namespace, prompt, provenance))

    @precondition(lambda self: self.model.damaged())
    @rule(provenance=provenances, which=st.integers(0, 9), pages=st.integers(0, 3))
    def write_again(self, provenance: Provenance, which: int, pages: int) -> None:
        """Come to a damaged page again, and end before, while or after it is written."""
        damaged = self.model.damaged()
        namespace, tokens = damaged[which % len(damaged)]
        writer = self.open(namespace, tokens + (7,) * 20, provenance)
        self.admit(writer, 1 + pages)
        if which % 2:
            self.commit(writer)
        self.fail(writer) if which % 3 == 0 else self.finish(writer)

    @rule(target=prompts, namespace=namespaces, prompt=prompts, pieces=runs, provenance=provenances)
    def turn(self, namespace: int, prompt: Tokens, pieces: list[tuple[int, int]], provenance: Provenance) -> Tokens:
        """What a chat does: look up, go on after the last full page that was found, release after storing."""
        longer = prompt[: 5 * PAGE_SIZE] + expand(pieces)
        plan = self.look_up(namespace, longer, None, provenance.is_exact)
        full = [name for name in plan if name[1] == longer[: len(name[1])] and len(name[1]) % PAGE_SIZE == 0]
        names = names_of(namespace, longer)
        start = full[-1] if full else parent_of(names[0])
        self.act("pin", [start])
        self.finish(Writer(names[len(full) :], provenance, start))
        self.release(plan)
        return longer

    @precondition(lambda self: len(self.log) >= CLEAR_EVERY * self.clears)
    @rule()
    def clear(self) -> None:
        self.clears += 1
        self.act("clear")

    # ---- those who follow from outside

    @rule()
    def follow(self) -> None:
        """Somebody who has read all events knows exactly what is there."""
        driver = self.driver
        driver.follow()
        pages = {page.key: page for page in driver.catalog.resident(damaged=True)}
        again = {fill.key: fill for fill in driver.fills.values()}  # a damaged page that is being written again
        assert pages.keys() <= driver.known.keys() <= pages.keys() | again.keys()
        pages = {**again, **pages}
        for key, event in driver.known.items():
            assert event.ids == pages[key].ids
            parent = pages[key].parent
            assert parent is not None
            assert event.parent == (None if parent.is_root else parent.key)
            while parent.parent is not None:
                parent = parent.parent
            assert event.namespace.digest == parent.key

    @invariant()
    def events_are_bounded(self) -> None:
        if self.eager:
            self.follow()
        assert len(self.driver.events) <= 2 * self.driver.catalog.slots

    # ---- what must always hold

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.driver.state() == self.model.state()
        assert self.driver.catalog.pages == len(self.model.entries)
        assert self.driver.catalog.evictions == self.model.evictions
        assert self.driver.catalog.stripped == self.model.stripped

    @invariant()
    def every_slot_has_one_page(self) -> None:
        catalog, used, hidden = self.driver.catalog, self.driver.slots(), self.driver.hidden_slots()
        assert len(set(used)) == len(used) <= catalog.slots
        assert all(0 <= slot < catalog.slots for slot in used)
        assert len(set(hidden)) == len(hidden) <= catalog.hidden_slots
        assert all(0 <= slot < catalog.hidden_slots for slot in hidden)
        assert catalog.bytes_used == len(used) * (PAGE_BYTES - HIDDEN_BYTES) + len(hidden) * HIDDEN_BYTES

    @invariant()
    def pinned_pages_and_parents_stay(self) -> None:
        names = self.driver.names()
        children = Counter(map(parent_of, self.model.entries))
        for name, page in names.items():
            assert page.pins == self.model.entries[name].pins
            assert page.children == children[name]
            parent = parent_of(name)
            if parent[1]:
                assert page.parent is (names.get(parent) or self.driver.fills[parent])
        for name, page in self.driver.held.items():
            assert not name[1] or page is (names.get(name) or self.driver.fills[name])

    def teardown(self) -> None:
        twin = Driver(*self.slots)
        for method, args, answer in self.log:
            assert getattr(twin, method)(*args) == answer
        assert twin.slots() == self.driver.slots(), "the same operations chose other slots"
        assert twin.hidden_slots() == self.driver.hidden_slots()
        self.driver.let_go()
        self.driver.clear()
        self.driver.follow()
        assert not self.driver.known
        catalog = self.driver.catalog
        assert (catalog.pages, catalog.pinned, catalog.bytes_used, catalog.namespaces) == (0, 0, 0, 0)


def test_catalog_does_what_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "NEAR_TOKENS", 20)  # sequences here are short
    machine = CatalogMachine.TestCase
    machine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
    machine().runTest()
