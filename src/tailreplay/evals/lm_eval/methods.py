"""What an evaluation compares: a full prefill, and three ways to go on after a hit."""

from __future__ import annotations

from dataclasses import dataclass

from tailreplay.errors import InvalidRequestError
from tailreplay.modes import DEFAULT_RATIO, Mode, Reuse, parse_reuse

METHODS: dict[str, Mode] = {"full": "off", "zero": "zero", "replay": "replay", "exact": "exact"}


@dataclass(frozen=True)
class Method:
    """How questions are answered.

    Attributes
    ----------
    name : {"full", "zero", "replay", "exact"}
        "full" computes the whole prompt; the others compute the context once, exactly, and reuse it for every question.
    reuse : Reuse
        What the engine is asked for.
    """

    name: str
    reuse: Reuse

    @property
    def label(self) -> str:
        """The name as people read it: "replay 5%" with its ratio."""
        ratio = self.reuse.ratio
        return self.name if ratio is None else f"{self.name} {100 * ratio:g}%"


def parse_method(name: str, ratio: float | None = None, min_tail: int = 0) -> Method:
    """Build a method from its name.

    Parameters
    ----------
    ratio : float, optional
        Share of the context to replay, for "replay" only; 0.05 if not given.
    min_tail : int
        Shortest tail of "replay". The paper's rule has none.

    Raises
    ------
    InvalidRequestError
        If the name is unknown, the ratio is outside (0, 1], or a ratio is given with another method.
    """
    if name not in METHODS:
        raise InvalidRequestError(f"The method must be one of {', '.join(METHODS)}, got {name!r}.", "method")
    if name != "replay" and ratio is not None:
        raise InvalidRequestError(f"A ratio goes with method 'replay' only, not with {name!r}.", "ratio")
    # As in the paper, whatever anchors the cache has.
    start = "zero" if METHODS[name] == "replay" else None
    return Method(name, parse_reuse(METHODS[name], ratio, min_tail, start))


def parse_methods(names: list[str], ratios: list[float] | None, min_tail: int = 0) -> list[Method]:
    """Build several methods; "replay" once for each ratio.

    Raises
    ------
    InvalidRequestError
        As in `parse_method`, or if ratios are given and no method is "replay".
    """
    if ratios and "replay" not in names:
        raise InvalidRequestError("A ratio goes with method 'replay' only, which is not among the methods.", "ratio")
    methods = [
        parse_method(name, ratio, min_tail)
        for name in dict.fromkeys(names)
        for ratio in ((ratios or [DEFAULT_RATIO]) if name == "replay" else [None])
    ]
    return list(dict.fromkeys(methods))
