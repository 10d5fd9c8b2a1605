"""Who may push whose pages out: byte limits and reserved shares by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tailreplay.errors import CacheConfigError
from tailreplay.keys import tenant_of
from tailreplay.sizes import format_bytes, parse_bytes


class Quotas:
    """Bytes of each tenant, and what they allow. A tenant is the 8 bytes that stand for a salt.

    Parameters
    ----------
    reserved : mapping, optional
        Tenant -> bytes that no other tenant's traffic can push out.
    limits : mapping, optional
        Tenant -> bytes that it never exceeds.

    Attributes
    ----------
    used : Counter
        Tenant -> bytes now. Changed by `add`.
    """

    def __init__(self, reserved: Mapping[bytes, int] | None = None, limits: Mapping[bytes, int] | None = None) -> None:
        self.reserved = dict(reserved or {})
        self.limits = dict(limits or {})
        self.used: Counter[bytes] = Counter()

    @property
    def named(self) -> set[bytes]:
        """Tenants with a reserved share or a limit of their own."""
        return self.reserved.keys() | self.limits.keys()

    def check(self, limit: int) -> None:
        """Raise `CacheConfigError` if the reserved shares do not fit into `limit` bytes."""
        total = sum(self.reserved.values())
        if total > limit:
            raise CacheConfigError(
                f"The shares reserved for tenants come to {format_bytes(total)}, more than the limit of "
                f"{format_bytes(limit)}: lower them or raise the limit."
            )

    def add(self, tenant: bytes, nbytes: int) -> None:
        """Count bytes that come (or go, if negative)."""
        self.used[tenant] += nbytes
        if not self.used[tenant]:
            del self.used[tenant]

    def fits(self, tenant: bytes, nbytes: int) -> bool:
        """Whether `tenant` may have `nbytes` more without exceeding a limit of its own."""
        return self.used[tenant] + nbytes <= self.limits.get(tenant, self.used[tenant] + nbytes)

    def may_evict(self, tenant: bytes, owner: bytes, nbytes: int) -> bool:
        """Whether `tenant` may push out `nbytes` of `owner`: its own, or what exceeds the owner's reserved share."""
        return tenant == owner or self.used[owner] - nbytes >= self.reserved.get(owner, 0)


def parse_shares(given: Mapping[str, int | str]) -> dict[bytes, int]:
    """Return tenant -> bytes for salt -> size, as people write it: ``{"alice": "2GiB"}``.

    Raises
    ------
    CacheConfigError
        If a size is not valid.
    """
    return {tenant_of(salt): parse_bytes(size) for salt, size in given.items()}
