"""What a request says about the cache: ``tailreplay``, ``kv_transfer_params.tailreplay`` and ``cache_salt``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tailreplay.errors import InvalidRequestError
from tailreplay.modes import Reuse, parse_reuse

_KEYS = ("mode", "ratio", "error", "store", "start", "reuse_approximate")


@dataclass(frozen=True)
class CacheWish:
    """How one request wants the cache used.

    Attributes
    ----------
    reuse : Reuse
    salt : str
        Requests share pages only with those of the same salt; "" for those without one.
    store : bool
        Whether later requests may reuse this one.
    """

    reuse: Reuse
    salt: str
    store: bool


def parse_cache_wish(body: Mapping[str, Any], default: Reuse, min_tokens: int) -> CacheWish:
    """Read a request's wish; what it leaves open is the server's.

    Parameters
    ----------
    default : Reuse
        The server's mode.
    min_tokens : int
        Shortest tail of "replay".

    Raises
    ------
    InvalidRequestError
        If a key, a mode, a ratio, a state error, a start, a policy or the salt is not valid.
    """
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        # An empty salt is likelier a tenant's id that got lost than the wish to share with everybody.
        raise InvalidRequestError("'cache_salt' must be a string that is not empty.", "cache_salt")
    path, fields = _fields(body)
    unknown = [key for key in fields if key not in _KEYS]
    if unknown:
        raise InvalidRequestError(f"'{path}' has no key {unknown[0]!r}, only {', '.join(_KEYS)}.", path)
    store = fields.get("store")
    if store is not None and not isinstance(store, bool):
        raise InvalidRequestError(f"'{path}.store' must be true or false, got {store!r}.", f"{path}.store")
    return CacheWish(_reuse(path, fields, default, min_tokens), salt or "", store is not False)


def _fields(body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return where the wish stands in the request, and the wish."""
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, Mapping):
        raise InvalidRequestError("'kv_transfer_params' must be an object.", "kv_transfer_params")
    found = {"tailreplay": body.get("tailreplay"), "kv_transfer_params.tailreplay": (transfer or {}).get("tailreplay")}
    given = [(path, fields) for path, fields in found.items() if fields is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"Give either {' or '.join(map(repr, found))}, not both.", "tailreplay")
    if not given:
        return "tailreplay", {}
    path, fields = given[0]
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f'\'{path}\' must be an object like {{"mode": "exact"}}.', path)
    return path, fields


def _reuse(path: str, fields: Mapping[str, Any], default: Reuse, min_tokens: int) -> Reuse:
    names = ("mode", "ratio", "error", "start", "reuse_approximate")
    mode, ratio, error, start, approximate = (fields.get(name) for name in names)
    try:
        if mode in (None, default.mode) and ratio is None and error is None:
            asked = parse_reuse(default.mode, None, min_tokens, start, approximate, default)
            return replace(default, start=asked.start, depth=asked.depth)
        return parse_reuse("replay" if mode is None else mode, ratio, min_tokens, start, approximate, default, error)
    except InvalidRequestError as refusal:
        raise InvalidRequestError(str(refusal), f"{path}.{refusal.param}") from None
