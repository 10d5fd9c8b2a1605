"""What every tier must do, whatever happens to its medium: one state machine, driven through a harness.

A tier is added by one class that derives from `Harness`, and a line in `test_contract.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailreplay.page_format import PageFormatError, is_intact, unpack_header
from tailreplay.provenance import EXACT, Provenance
from tailreplay.tiers.base import PARTS, Found, TierError, TierPage
from tests.tiers.harness import Harness
from tests.tiers.pages import TENANTS, hint_of, key_of, make_page, value_of

PAGES, HINTS = 10, 4
KEYS = [key_of(index) for index in range(PAGES)]


def flipped(data: bytes) -> bytes:
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if data else b"x"


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2] if data else b"x"


sizes = st.sampled_from([1, 100, 3000, 40_000, 100_000])
part_sizes = st.fixed_dictionaries({}, optional={"kv": sizes, "hidden": sizes}).filter(bool)
pages = st.builds(
    make_page,
    index=st.integers(0, PAGES - 1),
    sizes=part_sizes,
    version=st.integers(0, 2),
    hints=st.lists(st.integers(0, HINTS - 1), max_size=2, unique=True),
    provenance=st.sampled_from([EXACT, EXACT, EXACT, Provenance(1)]),
).map(lambda page: _of_tenant(page))
batches = st.lists(pages, min_size=1, max_size=4, unique_by=lambda page: page.key)
keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)
parts = st.sampled_from(PARTS)


def _of_tenant(page: TierPage) -> TierPage:
    tenant = TENANTS[page.key[-1] % len(TENANTS)]
    return TierPage(page.key, page.header, page.parts, page.hints, tenant)


class TierMachine(RuleBasedStateMachine):
    """Puts, reads, drops and faults in any order, against what was put."""

    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.harness.open()
        self.fault: str | None = None
        # (key, part) -> every value that may be there, and whether it must be.
        self.possible: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.sure: set[tuple[bytes, str]] = set()
        self.hinted: dict[bytes, set[bytes]] = defaultdict(set)
        self.damaged: set[bytes] = set()
        self.evictions = 0

    # What people do.

    @rule(batch=batches)
    def put(self, batch: list[TierPage]) -> None:
        before = self.found()
        done = self.does(lambda: self.tier.put(batch))
        for page in batch:
            self.note(page, before, done)
        self.check_whole(batch, before)
        self.after_writing(batch, done)
        if done and before is not None and batch[0].hints and batch[0].key not in before and self.fault is None:
            newest = {hint: page.key for page in batch for hint in page.hints}
            hints = list(newest)
            if (batch[0].key, next(iter(batch[0].parts))) in self.sure and len(batch) == 1:
                assert self.tier.resolve(hints) == [newest[hint] for hint in hints]

    @rule(batch=batches)
    def replace(self, batch: list[TierPage]) -> None:
        done = self.does(lambda: self.tier.replace(batch))
        for page in batch:
            if done:
                self.forget(page.key)
            self.sure -= {(page.key, part) for part in PARTS}
            self.note(page, {} if done else None, done)
        self.after_writing(batch, done)

    @rule(wanted=keys, part=parts)
    def get(self, wanted: list[bytes], part: str) -> None:
        with self.may_fail():
            headers = self.tier.contains(wanted)
            values = [None if view is None else bytes(view) for view in self.tier.get(wanted, part)]
            assert len(values) == len(wanted)
            for key, found, value in zip(wanted, headers, values, strict=True):
                self.check(key, part, found, value)

    @rule(wanted=keys, part=parts)
    def get_a_part_of_them(self, wanted: list[bytes], part: str) -> None:
        """Stop reading halfway."""
        with self.may_fail():
            for _ in self.tier.get(wanted, part):
                break

    @rule(hints=st.lists(st.integers(0, HINTS - 1).map(hint_of), max_size=3))
    def resolve(self, hints: list[bytes]) -> None:
        with self.may_fail():
            for hint, key in zip(hints, self.tier.resolve(hints), strict=True):
                assert key is None or key in self.hinted[hint], "a hint leads to a page that was put with it"

    @rule(wanted=keys, part=st.none() | parts)
    def drop(self, wanted: list[bytes], part: str | None) -> None:
        done = self.does(lambda: self.tier.drop(wanted, part))
        for key in wanted:
            gone = PARTS if part is None else (part,)
            self.sure -= {(key, name) for name in gone}
            if done:
                for name in gone:
                    self.possible.pop((key, name), None)
                if part is None or not any(self.possible.get((key, name)) for name in PARTS):
                    self.forget(key)
        if done and self.fault is None:
            for key, found in zip(wanted, self.tier.contains(wanted), strict=True):
                assert found is None or (part is not None and part not in found.parts), key

    @rule(batch=batches, wanted=keys, part=parts)
    def read_and_write_at_once(self, batch: list[TierPage], wanted: list[bytes], part: str) -> None:
        before = self.found()

        def read() -> list[bytes | None]:
            return [None if view is None else bytes(view) for view in self.tier.get(wanted, part)]

        with ThreadPoolExecutor(2) as pool:
            writing, reading = pool.submit(self.does, lambda: self.tier.put(batch)), pool.submit(read)
            done = writing.result()
            for page in batch:
                self.note(page, before, done)
            with self.may_fail():
                for key, value in zip(wanted, reading.result(), strict=True):
                    assert value is None or key in self.damaged or value in self.possible[key, part]
        self.after_writing(batch, done)

    @precondition(lambda self: self.harness.persists and self.fault is None)
    @rule()
    def close_and_open(self) -> None:
        self.tier.close()
        self.tier.close()
        self.tier = self.harness.open()

    # What happens to them.

    @precondition(lambda self: self.fault is None and self.harness.faults)
    @rule(data=st.data())
    def break_(self, data: st.DataObject) -> None:
        self.fault = data.draw(st.sampled_from(self.harness.faults))
        self.harness.break_(self.fault)

    @precondition(lambda self: self.fault is not None)
    @rule()
    def mend(self) -> None:
        """After the fault the tier works again, without being opened anew."""
        self.harness.mend()
        self.fault = None
        self.drop(KEYS[-1:], None)
        self.put([_of_tenant(make_page(PAGES - 1, {"kv": 100, "hidden": 100}))])
        assert {(KEYS[-1], part) for part in PARTS} <= self.sure

    @precondition(lambda self: self.fault is None)
    @rule(
        key=st.sampled_from(KEYS),
        part=st.sampled_from([*PARTS, "header"]),
        change=st.sampled_from([flipped, truncated]),
    )
    def corrupt(self, key: bytes, part: str, change: Callable[[bytes], bytes]) -> None:
        if self.harness.corrupt(key, part, change):
            self.damaged.add(key)

    # What must hold.

    @invariant()
    def what_is_there_is_what_was_put(self) -> None:
        if self.fault is not None:
            return
        found = self.tier.contains(KEYS)
        values = {part: [None if v is None else bytes(v) for v in self.tier.get(KEYS, part)] for part in PARTS}
        for part in PARTS:
            for key, one, value in zip(KEYS, found, values[part], strict=True):
                self.check(key, part, one, value)
                assert (value is not None) == (one is not None and part in one.parts)
        usage = self.tier.usage()
        if usage.bytes_used is not None and not self.damaged:
            held = sum(len(one.header) for one in found if one) + sum(len(v) for vs in values.values() for v in vs if v)
            assert usage.bytes_used == held
            assert usage.pages == sum(one is not None for one in found)

    @invariant()
    def limits_hold(self) -> None:
        with self.may_fail():
            usage = self.tier.usage()
            if usage.bytes_used is not None and usage.bytes_limit is not None:
                assert usage.bytes_used <= usage.bytes_limit
            if usage.by_tenant and usage.bytes_used is not None:
                assert sum(usage.by_tenant.values()) == usage.bytes_used

    def teardown(self) -> None:
        self.harness.mend()
        self.tier.close()
        self.harness.destroy()

    # The model.

    def does(self, action: Callable[[], None]) -> bool:
        """Whether the action went through; during a fault it may raise `TierError`, and nothing else ever."""
        try:
            action()
        except TierError:
            if self.fault is None:
                raise
            return False
        return True

    def may_fail(self) -> Any:
        return suppress(TierError) if self.fault is not None else nullcontext()

    def found(self) -> dict[bytes, Found] | None:
        """What is there now; None if that cannot be told."""
        if self.fault is not None:
            return None
        return {key: one for key, one in zip(KEYS, self.tier.contains(KEYS), strict=True) if one is not None}

    def note(self, page: TierPage, before: dict[bytes, Found] | None, done: bool) -> None:
        """A page was put; `before` is what was there, None if that cannot be told."""
        there = (before or {}).get(page.key)
        provenance = unpack_header(page.header).provenance
        for hint in page.hints:
            self.hinted[hint].add(page.key)
        stays = there is not None and there.parts >= set(page.parts)
        for part in page.parts:
            if not stays:
                self.possible[page.key, part].add(value_of(page, part))
            # Beside numbers of another provenance or damaged ones, it depends on what the tier makes of them.
            if done and before is not None and page.key not in self.damaged:
                if there is None or unpack_header(there.header).provenance == provenance:
                    self.sure.add((page.key, part))
                else:
                    self.sure -= {(page.key, name) for name in PARTS}

    def forget(self, key: bytes) -> None:
        for part in PARTS:
            self.possible.pop((key, part), None)
            self.sure.discard((key, part))
        self.damaged.discard(key)

    def after_writing(self, batch: list[TierPage], done: bool) -> None:
        """What was evicted need not be there any more; what was just put must be."""
        if self.fault is not None:
            self.sure.clear()
            return
        evictions = self.tier.usage().evictions
        if evictions != self.evictions or not done:
            self.evictions = evictions
            self.sure &= {(page.key, part) for page in batch for part in page.parts}

    def check_whole(self, batch: list[TierPage], before: dict[bytes, Found] | None) -> None:
        if before is None or self.fault is not None:
            return
        for page, one in zip(batch, self.tier.contains([page.key for page in batch]), strict=True):
            if page.key not in before and one is not None:
                assert one.parts == set(page.parts), "a page is there as a whole or not at all"

    def check(self, key: bytes, part: str, found: Found | None, value: bytes | None) -> None:
        """Compare what came back with what was put."""
        if value is None:
            assert (key, part) not in self.sure or key in self.damaged, f"{part} of {key!r} is lost"
            return
        if value in self.possible[key, part] and key not in self.damaged:
            assert found is not None
            entry = unpack_header(found.header).parts[part]
            assert is_intact(entry, value), "the header speaks of other bytes"
            return
        assert key in self.damaged, f"{part} of {key!r} was never put"
        try:
            intact = found is not None and is_intact(unpack_header(found.header).parts[part], value)
        except (PageFormatError, KeyError):
            intact = False
        assert not intact or value in self.possible[key, part], "damage was not detected"
