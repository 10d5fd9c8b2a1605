"""Modes of reuse, and how a request names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tailreplay.budget import Adaptive, Budget, Exact, Ratio, Zero
from tailreplay.errors import InvalidRequestError
from tailreplay.provenance import ONLY_EXACT, Terms

Mode = Literal["replay", "exact", "zero", "off"]
Starts = Literal["zero", "anchor", "carried", "mixed"]
DEFAULT_RATIO = 0.05
DEFAULT_START: Starts = "mixed"
ADAPTIVE_START: Starts = "anchor"


@dataclass(frozen=True)
class Reuse:
    """What a request wants of the cache.

    Attributes
    ----------
    mode : {"replay", "exact", "zero", "off"}
        "replay" is approximate and matches any page, "exact" matches only exact pages and rebuilds exact states,
        "zero" is the baseline without any replay, "off" neither looks up nor reuses.
    budget : Budget or None
        Chooses the tail; None for "off".
    buckets : tuple of int
        Tail lengths that the engine is quick at, in ascending order: in "replay" mode a tail is lengthened to the next of
        them where the match and its hiddens reach that far. None by default. More tokens only make the states better.
    start : {"zero", "anchor", "carried", "mixed"}
        What a tail of "replay" begins with: zero states, as in the paper; the states of an anchor that is no farther away
        than the budget allows to replay (then nothing is neglected), else zero; or, where none is so near, those of the
        last one before the tail, stale as they are; or halfway between those and the model's mean state (which alone takes
        their place where there is no anchor).
    mean : bool
        Whether the engine has a mean state. Without one "mixed" is "carried".
    depth : int or None
        Pages behind which more approximate replays lie than this are not matched; None for any number.
    """

    mode: Mode
    budget: Budget | None
    buckets: tuple[int, ...] = ()
    start: Starts = DEFAULT_START
    depth: int | None = None
    mean: bool = False

    @property
    def terms(self) -> Terms:
        """Which pages and anchors it takes."""
        return ONLY_EXACT if self.mode == "exact" else Terms(self.depth)

    @property
    def anchors(self) -> bool:
        """Whether saved states are of use."""
        return self.mode == "exact" or (self.mode == "replay" and self.start != "zero")

    @property
    def ratio(self) -> float | None:
        """The ratio r of "replay" mode, else None."""
        return self.budget.r if isinstance(self.budget, Ratio) else None


def parse_reuse(
    mode: Any = "replay",
    ratio: Any = None,
    min_tokens: int = 64,
    start: Any = None,
    reuse_approximate: Any = None,
    default: Reuse | None = None,
    error: Any = None,
) -> Reuse:
    """Build a `Reuse` from a request's own words.

    Parameters
    ----------
    mode : str
        One of `Mode`.
    ratio : float, optional
        Share of the prefix to replay, for "replay" only; 0.05 if not given.
    min_tokens : int
        Shortest tail of "replay".
    start : {"zero", "anchor", "carried", "mixed"}, optional
        What the tail of "replay" begins with.
    reuse_approximate : "always", "never" or int, optional
        Behind how many approximate replays a page may lie. Exact mode takes none.
    default : Reuse, optional
        Where `start` and `reuse_approximate` come from if not given; else they are "mixed" and "always".
    error : float, optional
        Relative state error to replay for, instead of a ratio; for "replay" only (see `tailreplay.budget.Adaptive`). What
        it predicts is for zero states: its start is "anchor" if not given.

    Raises
    ------
    InvalidRequestError
        If a value is unknown or outside its range, both a ratio and an error are given, or one of them, or a start, with
        another mode.
    """
    if mode not in get_args(Mode):
        raise InvalidRequestError(f"The reuse mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.", "mode")
    chosen = start if start is not None else DEFAULT_START if default is None else default.start
    if chosen not in get_args(Starts):
        raise InvalidRequestError(f"The start must be one of {', '.join(get_args(Starts))}, got {start!r}.", "start")
    depth = parse_depth(reuse_approximate) if reuse_approximate is not None else default.depth if default else None
    if error is not None:
        if mode != "replay":
            raise InvalidRequestError(f"A state error goes with mode 'replay' only, not with {mode!r}.", "error")
        if ratio is not None:
            raise InvalidRequestError("Give either a ratio or a state error, not both.", "error")
        return Reuse("replay", Adaptive(error, min_tokens), start=start or ADAPTIVE_START, depth=depth)
    if mode == "replay":
        budget = Ratio(DEFAULT_RATIO if ratio is None else ratio, min_tokens)
        return Reuse("replay", budget, start=chosen, depth=depth)
    for name, value in (("ratio", ratio), ("start", start)):
        if value is not None:
            raise InvalidRequestError(f"A {name} goes with mode 'replay' only, not with {mode!r}.", name)
    budgets: dict[str, Budget | None] = {"exact": Exact(), "zero": Zero(), "off": None}
    return Reuse(mode, budgets[mode], start=chosen, depth=depth)


def parse_depth(given: Any) -> int | None:
    """Return behind how many approximate replays a page may lie to be matched: None for "always", 0 for "never".

    Raises
    ------
    InvalidRequestError
        If it is neither of those nor a whole number.
    """
    if given is None or given == "always":
        return None
    if given == "never":
        return 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidRequestError(
            f"reuse_approximate must be 'always', 'never' or a number of replays, got {given!r}.", "reuse_approximate"
        )
    return given


def parse_replay(replay: Any, min_tokens: int = 64, default: Reuse | None = None) -> Reuse:
    """Build a `Reuse` from the Python API's one argument.

    That is a ratio like ``0.05``, a mode like ``"exact"``, a budget like ``Adaptive(error=0.05)``, or a `Reuse`.

    Parameters
    ----------
    default : Reuse, optional
        As for `parse_reuse`.
    """
    if isinstance(replay, Reuse):
        return replay
    if isinstance(replay, (Ratio, Adaptive)):
        usual = DEFAULT_START if default is None else default.start
        start = ADAPTIVE_START if isinstance(replay, Adaptive) else usual
        return Reuse("replay", replay, start=start, depth=default.depth if default else None)
    if isinstance(replay, str):
        return parse_reuse(replay, min_tokens=min_tokens, default=default)
    return parse_reuse("replay", replay, min_tokens, default=default)


def check_interval(given: Any) -> int:
    """Return `given`, how many tokens lie between anchors at most (0: no limit).

    Raises
    ------
    InvalidRequestError
        If it is not a multiple of 16, or negative.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < 0 or given % 16:
        raise InvalidRequestError(
            f"anchor_interval must be a multiple of 16 tokens, or 0 for none, got {given!r}.", "anchor_interval"
        )
    return given
