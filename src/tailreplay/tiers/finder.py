"""Who knows what the tiers below host memory hold: looks prompts up by key chain, and moves nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tailreplay.keys import TOKEN_BYTES, Namespace, common_tokens, page_key
from tailreplay.page_format import WHOLE, PageFormatError, PageHeader, unpack_header
from tailreplay.provenance import Provenance
from tailreplay.tiers.base import HIDDEN, KV, Found, Tier, TierError
from tailreplay.tiers.naming import PageRecord, hints_for, rank_key

log = logging.getLogger("tailreplay")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that some tiers hold.

    Attributes
    ----------
    record : PageRecord
        Its provenance is the worst of its parts'.
    sources : dict
        Part name -> index of the first tier that has it, on every rank.
    nbytes : dict
        Part name -> bytes to be read, of one rank.
    """

    record: PageRecord
    sources: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)


class Finder:
    """Looks pages up in tiers, fastest first. Threads may share it; every call may take as long as its tiers do.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first. One that fails is passed over.
    page_size : int
        Tokens a page.
    ranks : sequence of str
        Ranks that each hold a share of every page: it is there only if all of them have theirs.
    """

    def __init__(self, tiers: Sequence[Tier], page_size: int, ranks: Sequence[str] = (WHOLE,)) -> None:
        self._tiers = tiers
        self._page_size = page_size
        self._ranks = ranks
        self.damaged = 0

    def find(self, ids: bytes, namespace: Namespace, start: int, parent: bytes) -> list[FoundPage]:
        """Return the pages of a prompt from token `start` on, as far as the tiers hold its keys and values.

        Parameters
        ----------
        ids : bytes
            Whole prompt, from `tailreplay.keys.token_bytes`.
        start : int
            A multiple of the page size: where the first page begins.
        parent : bytes
            Key of the page before it; the namespace's digest for the first.

        Returns
        -------
        list of FoundPage
            In order. Only the last may go on otherwise than the prompt, or end within a page.
        """
        records = self._chain(ids, namespace, start, parent)
        found: list[FoundPage] = []
        # Most prompts end after a few pages that are known: asking in growing batches keeps what is asked in vain small.
        batch = 32
        while len(found) < len(records):
            asked = records[len(found) : len(found) + batch]
            got = self.pages(asked)
            for page in got:
                if page is None or KV not in page.sources:
                    break
                found.append(page)
            else:
                batch = min(4 * batch, _BATCH)
                continue
            break
        at = start + len(found) * self._page_size
        last = self._part_of_page(ids[at * TOKEN_BYTES :], namespace, at, found[-1].record.key if found else parent)
        return [*found, last] if last is not None else found

    def pages(self, records: Sequence[PageRecord]) -> list[FoundPage | None]:
        """Return what the tiers hold of just these pages, in one round trip a tier."""
        found: list[FoundPage | None] = [None] * len(records)
        for index, tier in enumerate(self._tiers):
            # A tier is asked only for what the faster ones do not have as a whole.
            missing = [i for i, page in enumerate(found) if page is None or len(page.sources) < 2]
            if not missing:
                break
            for i, headers in zip(missing, self._headers(tier, [records[i] for i in missing]), strict=True):
                if headers is not None:
                    found[i] = _merged(found[i], index, *headers)
        return found

    # ---- inside

    def _chain(self, ids: bytes, namespace: Namespace, start: int, parent: bytes) -> list[PageRecord]:
        """Name the full pages of a prompt from token `start` on."""
        step, digest = self._page_size * TOKEN_BYTES, namespace.digest
        records = []
        for at in range(start * TOKEN_BYTES, len(ids) - step + 1, step):
            part = ids[at : at + step]
            key = page_key(parent, digest, part)
            records.append(PageRecord(key, parent, digest, namespace.tenant, at // TOKEN_BYTES, part, Provenance()))
            parent = key
        return records

    def _part_of_page(self, rest: bytes, namespace: Namespace, start: int, parent: bytes) -> FoundPage | None:
        """Return the page after `parent` that shares most tokens with `rest`, as far as its hints tell."""
        rest = rest[: self._page_size * TOKEN_BYTES]
        digest = namespace.digest
        names = hints_for(parent, digest, rest, self._page_size, self._ranks[0])
        best: FoundPage | None = None
        common = 0
        for tier in self._tiers if names else ():
            header = self._hinted(tier, names)
            if header is None or (header.parent, header.namespace) != (parent, digest):
                continue
            shared = common_tokens(header.ids, rest)
            record = PageRecord(header.key, parent, digest, namespace.tenant, start, header.ids, Provenance())
            page = self.pages([record])[0] if shared > common else None
            if page is not None and KV in page.sources:
                best, common = page, shared
        return best

    def _hinted(self, tier: Tier, names: Sequence[bytes]) -> PageHeader | None:
        """Return the header of the page that the first of `names` stands for whose page is there."""
        try:
            keys = list(dict.fromkeys(key for key in tier.resolve(names) if key is not None))
            entries = tier.contains(keys) if keys else []
        except TierError:
            return None
        for key, found in zip(keys, entries, strict=True):
            try:
                if found is not None:
                    return unpack_header(found.header)
            except PageFormatError as error:
                self._condemn(tier, [key], str(error))
        return None

    def _headers(
        self, tier: Tier, records: Sequence[PageRecord]
    ) -> list[tuple[PageRecord, PageHeader, frozenset[str]] | None]:
        """Return for each page its header of the first rank, and the parts that every rank has in `tier`."""
        keys = [rank_key(record.key, rank) for record in records for rank in self._ranks]
        try:
            entries = tier.contains(keys)
        except TierError:
            return [None] * len(records)
        size = len(self._ranks)
        return [self._page_of(tier, record, entries[i * size : (i + 1) * size]) for i, record in enumerate(records)]

    def _page_of(
        self, tier: Tier, record: PageRecord, entries: Sequence[Found | None]
    ) -> tuple[PageRecord, PageHeader, frozenset[str]] | None:
        parts: frozenset[str] = frozenset((KV, HIDDEN))
        worst: Provenance | None = None
        first: PageHeader | None = None
        for entry in entries:
            if entry is None:
                return None
            try:
                header = unpack_header(entry.header)
            except PageFormatError as error:
                self._condemn(tier, [rank_key(record.key, rank) for rank in self._ranks], str(error))
                return None
            if (header.key, header.namespace, header.ids) != (record.key, record.namespace, record.ids):
                return None
            parts &= entry.parts & header.parts.keys()
            worst = header.provenance if worst is None else worst.worst(header.provenance)
            first = first or header
        assert first is not None
        assert worst is not None
        merged = replace(record, provenance=worst, gates=first.gates)
        return merged, first, parts

    def _condemn(self, tier: Tier, keys: Sequence[bytes], why: str) -> None:
        """Drop a page whose header cannot be read."""
        if not self.damaged:
            log.warning("A page in the %s tier is dropped: %s (further ones are only counted).", tier.name, why)
        self.damaged += 1
        with suppress(TierError):
            tier.drop(keys)


def _merged(
    known: FoundPage | None, tier: int, record: PageRecord, header: PageHeader, parts: frozenset[str]
) -> FoundPage | None:
    """Add what a further tier has of a page."""
    new = {part: tier for part in parts if known is None or part not in known.sources}
    if not new:
        return known
    sizes = {part: header.parts[part].nbytes for part in new}
    if known is None:
        return FoundPage(record, new, sizes)
    provenance = known.record.provenance.worst(record.provenance)
    worse = replace(record, provenance=provenance, gates=known.record.gates or record.gates)
    return FoundPage(worse, {**known.sources, **new}, {**known.nbytes, **sizes})
