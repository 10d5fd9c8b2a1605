"""How a cache stores: tiers below host memory, codecs, eviction, quotas."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailreplay.anchors import Anchors
from tailreplay.catalog import Catalog
from tailreplay.errors import CacheConfigError
from tailreplay.events import PageEvents
from tailreplay.policies import policy_of
from tailreplay.quotas import Quotas, parse_shares
from tailreplay.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tailreplay.tiers.base import Tier
    from tailreplay.tiers.host import HostArena
    from tailreplay.tiers.lower import LowerTiers

DEFAULT_HIDDEN_CODEC = "int8"
CODECS = ("none", "int8", "fp8_e4m3")  # those of `tailreplay.codecs`, which needs torch
ANCHOR_CODECS = ("none", "bf16", "int8")
ANCHOR_SHARE = 8
"""Host memory that anchors have if nothing is said: one part in so many."""
DEADLINE = 0.2
MOST_SECONDS = 3600.0


@dataclass(frozen=True)
class Storage:
    """What is not said is host memory alone, without loss, the least recently used page going first.

    Attributes
    ----------
    tiers : sequence of str or Tier
        Below host memory, fastest first: ``"disk:~/.cache/tailreplay?limit=20GiB"``, ``"redis://…"``,
        ``"mooncake://…"`` (see `tailreplay.tiers.factory.open_tier`).
    hidden_codec, kv_codec : str
        How tiers below hold hiddens, and keys and values: "none", "int8" or "fp8_e4m3". Exact mode uses no page that went
        through a lossy one.
    host_codec, host_kv_codec : str
        The same in host memory.
    anchor_bytes : int or str, optional
        How much of the host memory is for anchors (saved recurrent states); an eighth if not given, 0 for none.
    anchor_codec : str
        How they are held: "none" (as the engine computes them, mostly float32), "bf16" or "int8" (a scale a head). Exact
        mode uses none that went through a lossy one.
    hidden_share : float
        In (0, 1]: for how many of the pages host memory has room for hiddens.
    policy : str
        Which page leaves host memory first (see `tailreplay.policies`).
    reserved, limits : mapping
        Salt -> size: host memory that no other tenant's traffic can push out, and that a tenant never exceeds.
    deadline : float
        Seconds after which a tier is passed over for a while.
    """

    tiers: Sequence[str | Tier] = ()
    hidden_codec: str = DEFAULT_HIDDEN_CODEC
    kv_codec: str = "none"
    host_codec: str = "none"
    host_kv_codec: str = "none"
    anchor_bytes: int | str | None = None
    anchor_codec: str = "none"
    hidden_share: float = 1.0
    policy: str = "lru"
    reserved: Mapping[str, int | str] = field(default_factory=dict)
    limits: Mapping[str, int | str] = field(default_factory=dict)
    deadline: float = DEADLINE

    def __post_init__(self) -> None:
        for name in ("hidden_codec", "kv_codec", "host_codec", "host_kv_codec"):
            if getattr(self, name) not in CODECS:
                raise CacheConfigError(
                    f"The codec '{name}' must be one of {', '.join(CODECS)}, got {getattr(self, name)!r}."
                )
        if self.anchor_codec not in ANCHOR_CODECS:
            raise CacheConfigError(
                f"The codec 'anchor_codec' must be one of {', '.join(ANCHOR_CODECS)}, got {self.anchor_codec!r}."
            )
        self._anchor_bytes(1 << 62)
        policy_of(self.policy)
        share = self.hidden_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise CacheConfigError(f"hidden_share must be a number in (0, 1], got {share!r}.")
        if isinstance(self.tiers, str):
            raise CacheConfigError(f"The tiers must be a list of addresses, got {self.tiers!r}.")
        for name in ("reserved", "limits"):
            if not isinstance(getattr(self, name), Mapping):
                raise CacheConfigError(f"'{name}' must map salts to sizes, got {getattr(self, name)!r}.")
        deadline = self.deadline
        if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline <= MOST_SECONDS:
            raise CacheConfigError(
                f"The deadline of tiers must be a positive number of seconds, an hour at most, got {deadline!r}."
            )

    def quotas(self) -> Quotas:
        """Return the shares of tenants."""
        return Quotas(parse_shares(self.reserved), parse_shares(self.limits))

    def anchor_slots(self, host_bytes: int, page_bytes: int, anchor_bytes: int) -> int:
        """Return how many anchors of `anchor_bytes` bytes are kept in `host_bytes` bytes of host memory, beside pages.

        Raises
        ------
        CacheConfigError
            If what was asked for does not hold one, or leaves no room for a page.
        """
        wanted = self._anchor_bytes(host_bytes)
        if not anchor_bytes or not wanted:
            return 0
        if self.anchor_bytes is None:
            return min(wanted, max(0, host_bytes - page_bytes)) // anchor_bytes
        if wanted < anchor_bytes:
            raise CacheConfigError(
                f"The {format_bytes(wanted)} for anchors are less than one ({format_bytes(anchor_bytes)}): "
                "raise anchor_bytes, or set it to 0."
            )
        if wanted > host_bytes - page_bytes:
            raise CacheConfigError(
                f"The {format_bytes(wanted)} for anchors leave no room for pages in the cache limit of "
                f"{format_bytes(host_bytes)}: lower anchor_bytes."
            )
        return wanted // anchor_bytes

    def catalog(
        self,
        page_size: int,
        host_bytes: int,
        page_bytes: int,
        hidden_bytes: int,
        events: PageEvents | None = None,
        anchor_bytes: int = 0,
    ) -> Catalog:
        """Return a catalog of `host_bytes` bytes for pages of `page_bytes` bytes, `hidden_bytes` of them hiddens.

        Parameters
        ----------
        anchor_bytes : int
            Of one anchor; 0 for a model that has no states.
        """
        quotas = self.quotas()
        quotas.check(host_bytes, page_bytes)
        slots = self.anchor_slots(host_bytes, page_bytes, anchor_bytes)
        anchors = slots * anchor_bytes
        return Catalog(
            page_size,
            host_bytes - anchors,
            page_bytes,
            events,
            hidden_bytes=hidden_bytes,
            hidden_share=self.hidden_share,
            policy=policy_of(self.policy),
            quotas=quotas.part(host_bytes - anchors, host_bytes, page_bytes),
            anchors=Anchors(slots, quotas.shares(slots, host_bytes)),
        )

    def _anchor_bytes(self, host_bytes: int) -> int:
        if self.anchor_bytes is None:
            return host_bytes // ANCHOR_SHARE
        if self.anchor_bytes in (0, "0") and not isinstance(self.anchor_bytes, bool):
            return 0
        return parse_bytes(self.anchor_bytes)

    def open(self, lends: bool = True) -> list[Tier]:
        """Open the tiers, each behind a guard that keeps the deadline.

        Parameters
        ----------
        lends : bool
            False for a process that only looks up (see `tailreplay.tiers.factory.open_tier`).

        Raises
        ------
        CacheConfigError
            If one is not known, or its place cannot be used.
        """
        from tailreplay.tiers.factory import open_tier
        from tailreplay.tiers.guard import Guarded

        opened: list[Tier] = []
        try:
            for tier in self.tiers:
                plain = open_tier(tier, deadline=self.deadline, lends=lends) if isinstance(tier, str) else tier
                opened.append(plain if isinstance(plain, Guarded) else Guarded(plain, self.deadline))
        except BaseException:
            for each in opened:
                each.close()
            raise
        return opened

    def lower_tiers(self, catalog: Catalog, arena: HostArena, lock: threading.Lock, label: str) -> LowerTiers | None:
        """Open the tiers below the host memory of one process; None if there are none."""
        from tailreplay.tiers.lower import LowerTiers
        from tailreplay.tiers.packing import Packer

        if not self.tiers:
            return None
        packer = Packer(arena, self.hidden_codec, self.kv_codec, label=label)
        return LowerTiers(catalog, lock, packer, self.open())


def parse_storage(given: Mapping[str, Any]) -> Storage:
    """Return the storage that a configuration file describes; the names are those of `Storage`.

    Raises
    ------
    CacheConfigError
        If a value is not usable; one sentence.
    """
    values = dict(given)
    tiers = values.get("tiers", ())
    if isinstance(tiers, str) or not isinstance(tiers, Sequence) or not all(isinstance(tier, str) for tier in tiers):
        raise CacheConfigError(f"The setting 'tiers' must be a list of addresses, got {tiers!r}.")
    for name in ("reserved", "limits"):
        shares = values.get(name, {})
        if not isinstance(shares, Mapping) or not all(isinstance(salt, str) for salt in shares):
            raise CacheConfigError(f"The setting '{name}' must map salts to sizes, got {shares!r}.")
    return Storage(**values)
