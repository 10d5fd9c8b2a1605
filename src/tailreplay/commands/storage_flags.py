"""Flags of commands that keep a cache: tiers below host memory, codecs, eviction, quotas."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from tailreplay.errors import TailReplayError
from tailreplay.modes import DEFAULT_START, Starts
from tailreplay.storage import ANCHOR_CODECS, CODECS, Storage, parse_storage


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
    add("--anchor-bytes", "SIZE", "host memory for anchors (saved recurrent states; default: an eighth; 0 for none)")
    group.add_argument(
        "--anchor-codec",
        default="none",
        choices=ANCHOR_CODECS,
        help="how anchors are held (default: %(default)s); exact mode takes no lossy one",
    )
    add("--policy", "NAME", "which page leaves host memory first: 'lru' or 'flops' (default: lru)")
    add("--reserve", "SALT=SIZE", "host memory that others cannot push a tenant out of", action="append", default=[])
    add("--tenant-limit", "SALT=SIZE", "host memory that a tenant never exceeds", action="append", default=[])
    add("--tier-deadline", "SECONDS", "after which a tier is passed over for a while (default: 0.2)", type=float)


def add_reuse_flags(parser: argparse.ArgumentParser) -> None:
    """Add what requests that say nothing else get. Mutates `parser`."""
    group = parser.add_argument_group("reuse", "see docs/method.md")
    group.add_argument(
        "--start",
        default=DEFAULT_START,
        choices=get_args(Starts),
        help="what a replayed tail begins with: zero states as in the paper; an anchor that is near enough; else the last "
        "one, stale as it may be; or halfway between that and the model's mean state (default: %(default)s)",
    )
    group.add_argument(
        "--reuse-approximate",
        default="always",
        metavar="POLICY",
        help="'always', 'never', or behind how many approximate replays a page may lie (default: %(default)s)",
    )
    group.add_argument(
        "--anchor-interval",
        default=0,
        type=int,
        metavar="TOKENS",
        help="also save states every so many tokens of a prompt, a multiple of 16 (default: at the ends of chunks, "
        "prompts and answers)",
    )
    group.add_argument(
        "--repair",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="while no request runs, make the model's mean state, and compute what stands behind approximate hits again "
        "exactly",
    )


def approximate_policy(text: str) -> int | str:
    """Return the number in `text`, or `text` itself (checked later)."""
    # Python refuses to read numbers of thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 19 else text


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
        "anchor_bytes": args.anchor_bytes,
        "anchor_codec": args.anchor_codec,
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


def reuse_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `add_reuse_flags` were given, under the names of an engine's settings; defaults are left out."""
    given = {
        "start": args.start,
        "reuse_approximate": approximate_policy(args.reuse_approximate),
        "anchor_interval": args.anchor_interval,
    }
    plain = {"start": DEFAULT_START, "reuse_approximate": "always", "anchor_interval": 0}
    return {name: value for name, value in given.items() if value != plain[name]}


def _shares(flag: str, given: list[str]) -> dict[str, str]:
    shares: dict[str, str] = {}
    for each in given:
        salt, equals, size = each.rpartition("=")
        if not equals or not salt or salt in shares:
            raise TailReplayError(f"{flag} is SALT=SIZE, once a salt, got {each!r}.")
        shares[salt] = size
    return shares
