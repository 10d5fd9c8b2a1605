"""Parts of a hit that can be left out, to measure what each of them is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ablation:
    """How an engine carries out a hit. The default is the method as it is meant; results do not depend on it.

    Attributes
    ----------
    skip : bool
        Leave out the feed-forward part after each group's last mixer, which nothing reads.
    overlap : bool
        Copy keys and values on a side stream while the tail is replayed; else replay begins when the copies have ended.
        On CPU copies run in line either way.
    """

    skip: bool = True
    overlap: bool = True

    @property
    def label(self) -> str:
        """The name in tables."""
        if not self.skip and not self.overlap:
            return "no skip, no overlap"
        return " + ".join(name for name, on in (("skip", self.skip), ("overlap", self.overlap)) if on)


METHOD = Ablation()
"""The method as it is meant."""

ABLATIONS = {
    "none": Ablation(skip=False, overlap=False),
    "skip": Ablation(overlap=False),
    "overlap": Ablation(skip=False),
    "both": METHOD,
}
"""By the name in command lines and data."""
