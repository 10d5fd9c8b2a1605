"""Flags of commands that keep a cache: tiers below host memory, codecs, eviction, quotas."""

from __future__ import annotations

import argparse
from typing import Any

from tailreplay.errors import TailReplayError
from tailreplay.storage import CODECS, Storage, parse_storage


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a command. Mutates `parser`."""
    group = parser.add_argument_group("storage", "see docs/storage.md")

    def add(flag: str, metavar: str, text: str, **more: Any) -> None:
        group.add_argument(flag, metavar=metavar, help=text, **more)

    add(
        "--tier",
        "ADDRESS",
        "below host memory, fastest first, any number of times: 'disk:FOLDER?limit=20GiB' ('disk' alone for "
        "~/.cache/tailreplay), 'redis://HOST:6379', 'mooncake://HOST:50051'",
        action="append",
        default=[],
    )
    for flag, default, text in (
        ("--hidden-codec", "int8", "how tiers hold hiddens (default: %(default)s); exact mode takes no lossy page"),
        ("--kv-codec", "none", "how tiers hold keys and values (default: %(default)s)"),
        ("--host-codec", "none", "how host memory holds hiddens (default: %(default)s)"),
    ):
        group.add_argument(flag, default=default, choices=CODECS, help=text)
    add(
        "--hidden-share",
        "SHARE",
        "for which share of its pages host memory has room for hiddens (default: 1)",
        type=float,
    )
    add("--policy", "NAME", "which page leaves host memory first: 'lru' or 'flops' (default: lru)")
    add("--reserve", "SALT=SIZE", "host memory that others cannot push a tenant out of", action="append", default=[])
    add("--tenant-limit", "SALT=SIZE", "host memory that a tenant never exceeds", action="append", default=[])
    add("--tier-deadline", "SECONDS", "after which a tier is passed over for a while (default: 0.2)", type=float)


def storage_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for under the names of `tailreplay.storage.Storage`, checked; defaults are left out.

    Raises
    ------
    TailReplayError
        If a value is not usable.
    """
    given = {
        "tiers": list(args.tier),
        "hidden_codec": args.hidden_codec,
        "kv_codec": args.kv_codec,
        "host_codec": args.host_codec,
        "hidden_share": args.hidden_share,
        "policy": args.policy,
        "reserved": _shares("--reserve", args.reserve),
        "limits": _shares("--tenant-limit", args.tenant_limit),
        "deadline": args.tier_deadline,
    }
    plain = Storage()
    settings = {
        name: value
        for name, value in given.items()
        if value is not None and value not in ([], {}) and value != getattr(plain, name)
    }
    _ = parse_storage(settings).quotas()
    return settings


def _shares(flag: str, given: list[str]) -> dict[str, str]:
    shares: dict[str, str] = {}
    for each in given:
        salt, equals, size = each.rpartition("=")
        if not equals or not salt or salt in shares:
            raise TailReplayError(f"{flag} is SALT=SIZE, once a salt, got {each!r}.")
        shares[salt] = size
    return shares
