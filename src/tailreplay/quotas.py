"""Who may push whose pages out: byte limits and reserved shares by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tailreplay.errors import CacheConfigError
from tailreplay.keys import tenant_of
from tailreplay.sizes import format_bytes, parse_bytes


class Quotas:
    """What tenants were promised and what they are held to. A tenant is the 8 bytes that stand for a salt.

    Parameters
    ----------
    reserved : mapping, optional
        Tenant -> bytes that no other tenant's traffic can push out.
    limits : mapping, optional
        Tenant -> bytes that it never exceeds.
    """

    def __init__(self, reserved: Mapping[bytes, int] | None = None, limits: Mapping[bytes, int] | None = None) -> None:
        self.reserved = dict(reserved or {})
        self.limits = dict(limits or {})

    def check(self, limit: int, page_bytes: int = 0) -> None:
        """Raise `CacheConfigError` if this cannot be kept in a store of `limit` bytes with pages of `page_bytes`."""
        total = sum(self.reserved.values())
        if total > limit:
            raise CacheConfigError(
                f"The shares reserved for tenants come to {format_bytes(total)}, more than the limit of "
                f"{format_bytes(limit)}: lower them or raise the limit."
            )
        for tenant, most in self.limits.items():
            if most < page_bytes:
                raise CacheConfigError(
                    f"A tenant's limit of {format_bytes(most)} is smaller than one page ({format_bytes(page_bytes)}): "
                    "raise it."
                )
            if most < self.reserved.get(tenant, 0):
                raise CacheConfigError(
                    f"A tenant's limit of {format_bytes(most)} is smaller than what is reserved for it "
                    f"({format_bytes(self.reserved[tenant])}): raise the limit or lower the share."
                )

    def part(self, size: int, whole: int, least: int = 0) -> Quotas:
        """Return the same for a part of `size` bytes of a store of `whole` bytes; limits of `least` bytes at least."""
        if size == whole:
            return self
        return Quotas(
            {tenant: share * size // whole for tenant, share in self.reserved.items()},
            {tenant: max(most * size // whole, least) for tenant, most in self.limits.items()},
        )

    def shares(self, slots: int, total: int) -> Shares:
        """Return the shares of a pool of `slots`: the same part for each tenant as of the store of `total` bytes."""
        return Shares(
            {tenant: size * slots // total for tenant, size in self.reserved.items()},
            {tenant: size * slots // total for tenant, size in self.limits.items()},
        )

    def divide(self, slots: int, hidden_slots: int, kv_bytes: int, hidden_bytes: int) -> tuple[Shares, Shares]:
        """Return the shares of each of two pools, in slots: of keys and values, and of hiddens.

        Each tenant gets the same part of both, `kv_bytes` and `hidden_bytes` being the bytes of a slot. Were its share
        counted in bytes alone, others could take all its hiddens as long as it had keys and values to spare, and those are
        of no use without hiddens.
        """
        total = slots * kv_bytes + hidden_slots * hidden_bytes
        reserved = {
            tenant: (size * slots // total, size * hidden_slots // total) for tenant, size in self.reserved.items()
        }
        limits = {}
        for tenant, size in self.limits.items():
            # One at least, however small the part: a tenant without any would have no hits.
            hiddens = max(1, size * hidden_slots // total)
            limits[tenant] = (min(size * slots // total, (size - hiddens * hidden_bytes) // kv_bytes), hiddens)
        return (
            Shares(
                {name: each[0] for name, each in reserved.items()}, {name: each[0] for name, each in limits.items()}
            ),
            Shares(
                {name: each[1] for name, each in reserved.items()}, {name: each[1] for name, each in limits.items()}
            ),
        )


class Shares:
    """Slots of one pool by tenant, and what they allow.

    Parameters
    ----------
    reserved, limits : mapping, optional
        Tenant -> slots.

    Attributes
    ----------
    used : Counter
        Tenant -> slots now. Changed by `add`.
    named : frozenset
        Tenants with a reserved share or a limit of their own.
    """

    def __init__(self, reserved: Mapping[bytes, int] | None = None, limits: Mapping[bytes, int] | None = None) -> None:
        self._reserved = dict(reserved or {})
        self._limits = dict(limits or {})
        self.named = frozenset(self._reserved.keys() | self._limits.keys())
        self.used: Counter[bytes] = Counter()

    def add(self, tenant: bytes, slots: int) -> None:
        """Count slots that come (or go, if negative)."""
        self.used[tenant] += slots
        if not self.used[tenant]:
            del self.used[tenant]

    def fits(self, tenant: bytes) -> bool:
        """Whether `tenant` may have one more without exceeding a limit of its own."""
        return tenant not in self._limits or self.used[tenant] < self._limits[tenant]

    def may_take(self, tenant: bytes, owner: bytes) -> bool:
        """Whether `tenant` may have a slot of `owner`: one of its own, or what exceeds the owner's reserved share."""
        return tenant == owner or self.used[owner] > self._reserved.get(owner, 0)


def parse_shares(given: Mapping[str, int | str]) -> dict[bytes, int]:
    """Return tenant -> bytes for salt -> size, as people write it: ``{"alice": "2GiB"}``.

    Raises
    ------
    CacheConfigError
        If a size is not valid.
    """
    return {tenant_of(salt): parse_bytes(size) for salt, size in given.items()}
