"""Opens the tier that a person named: a folder, or the URL of a server."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from tailreplay.errors import CacheConfigError
from tailreplay.quotas import parse_shares
from tailreplay.sizes import parse_bytes
from tailreplay.tiers.base import Tier
from tailreplay.tiers.guard import Guarded

REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")
SCHEMES = ("disk", "mooncake", *REDIS)
DISK_LIMIT = "20GiB"
MOONCAKE_PORT = 50051
DEADLINE = 0.2
# What threads and sockets can wait for, and nobody will.
_MOST_DEADLINE, _MOST_SECONDS = 3600.0, 1e9
_REMOTE = ("deadline", "prefix", "timeout")
# Left in the URL: redis-py reads them.
_REDIS_OWN = (
    "db", "username", "password",
    "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile",
)  # fmt: skip
OPTIONS = {
    "disk": ("limit", "reserve", "tenant_limit"),
    "mooncake": (*_REMOTE, "lend", "buffer", "protocol", "device", "host"),
    **dict.fromkeys(REDIS, (*_REMOTE, "ttl", *_REDIS_OWN)),
}


def open_tier(spec: str, guarded: bool = True, deadline: float = DEADLINE) -> Tier:
    """Open the tier that `spec` names.

    Parameters
    ----------
    spec : str
        A folder, ``disk`` for ``~/.cache/tailreplay``, ``disk:FOLDER?limit=20GiB``, ``redis://HOST:6379/0``, ``valkey://HOST``,
        ``mooncake://HOST:50051?lend=1GiB&protocol=tcp``. `OPTIONS` has the options of each.
    guarded : bool
        Put `Guarded` around a tier on a server.
    deadline : float
        Seconds for `Guarded`, where `spec` has no option ``deadline``.

    Raises
    ------
    CacheConfigError
        If it is not understood, or a package is missing; one sentence, without a password.
    """
    scheme, options = _parse(spec)
    if scheme == "disk":
        return _disk(spec, options)
    deadline = _seconds(options.pop("deadline", str(deadline)), "deadline", _MOST_DEADLINE)
    tier = _mooncake(spec, options) if scheme == "mooncake" else _redis(spec, options)
    return Guarded(tier, deadline=deadline) if guarded else tier


def folder_of(spec: str) -> Path | None:
    """Return the folder that `spec` names; None if it names a server.

    Raises
    ------
    CacheConfigError
        If it is not understood.
    """
    return _folder(spec) if _parse(spec)[0] == "disk" else None


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    """Return the scheme, and the options."""
    head = spec.partition("?")[0]
    scheme = "disk" if head.startswith(("/", ".", "~")) or ":" not in head else head.partition(":")[0].lower()
    if not spec.strip() or scheme not in SCHEMES:
        named = _quoted(scheme if spec.strip() else spec)
        raise CacheConfigError(
            f"{named} is no storage: name a folder, or a URL that begins with one of {_listed(SCHEMES, ':')}."
        )
    if scheme != "disk" and "://" not in head:
        raise CacheConfigError(f"A URL of {scheme} looks like {scheme}://HOST:PORT.")
    options: dict[str, str] = {}
    for name, value in parse_qsl(spec.partition("?")[2], keep_blank_values=True):
        if name not in OPTIONS[scheme]:
            raise CacheConfigError(f"{_quoted(name)} is no option of {scheme}: it has {_listed(OPTIONS[scheme])}.")
        if name in options or not value:
            raise CacheConfigError(f"The option {name} of {scheme} must have one value.")
        options[name] = value
    return scheme, options


def _disk(spec: str, options: dict[str, str]) -> Tier:
    folder, limit = _folder(spec), parse_bytes(options.get("limit", DISK_LIMIT))
    # Loaded here: the package it needs is no dependency of the others.
    shares = {name: _shares(name, options[name]) for name in ("reserve", "tenant_limit") if name in options}
    made: Tier = import_module("tailreplay.tiers.disk").DiskTier(
        folder, limit, shares.get("reserve"), shares.get("tenant_limit")
    )
    return made


def _shares(name: str, text: str) -> dict[bytes, int]:
    """Return tenant -> bytes for ``SALT=SIZE,SALT=SIZE``."""
    shares: dict[str, int | str] = {}
    for each in text.split(","):
        salt, equals, size = each.rpartition("=")
        if not equals or not salt or salt in shares:
            raise CacheConfigError(f"The option {name} of disk is SALT=SIZE,SALT=SIZE, got {_quoted(each)}.")
        shares[salt] = size
    return parse_shares(shares)


def _folder(spec: str) -> Path:
    head = spec.partition("?")[0]
    folder = unquote(head.partition(":")[2]) if head.lower().startswith("disk:") else head
    if folder in ("", "disk"):
        from tailreplay.tiers.disk_file import default_path

        return default_path()
    from tailreplay.tiers.disk_file import folder_at

    return folder_at(folder)


def _redis(spec: str, options: dict[str, str]) -> Tier:
    from tailreplay.tiers.redis import RedisTier

    own = {name: options[name] for name in _REDIS_OWN if name in options}
    url = spec.partition("?")[0] + ("?" + urlencode(own) if own else "")
    more: dict[str, Any] = {name: _seconds(options[name], name) for name in ("timeout", "ttl") if name in options}
    return RedisTier(url, prefix=options.get("prefix", "tailreplay"), **more)


def _mooncake(spec: str, options: dict[str, str]) -> Tier:
    from tailreplay.tiers.mooncake import MooncakeTier

    try:
        parts = urlsplit(spec)
        port = parts.port
    except ValueError:
        raise CacheConfigError("Mooncake's master is named like mooncake://HOST:50051.") from None
    if not parts.hostname or parts.path.strip("/") or parts.username:
        raise CacheConfigError("Mooncake's master is named like mooncake://HOST:50051; it has no path and no user.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    more: dict[str, Any] = dict(options)
    if "timeout" in more:
        more["timeout"] = _seconds(more["timeout"], "timeout")
    return MooncakeTier(f"{host}:{MOONCAKE_PORT if port is None else port}", **more)


def _seconds(text: str, name: str, most: float = _MOST_SECONDS) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= most:
        raise CacheConfigError(
            f"The option {name} is a positive number of seconds, at most {most:.0f}, got {_quoted(text)}."
        )
    return seconds


def _quoted(text: str) -> str:
    return f"'{text[:40]}'"


def _listed(names: tuple[str, ...], ending: str = "") -> str:
    shown = [name + ending for name in names]
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(shown) > 1 else shown[0]
