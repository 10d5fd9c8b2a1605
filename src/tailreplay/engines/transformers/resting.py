"""What a model does while nobody wants it: its mean state once, then repair."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailreplay.engines.transformers.mean_state import mean_states
from tailreplay.engines.transformers.repair import repair_one
from tailreplay.prose import calibration_text

if TYPE_CHECKING:
    from tailreplay.engines.transformers.lm import HybridLM
    from tailreplay.engines.transformers.prompts import Prompt

log = logging.getLogger("tailreplay")


def make_mean_state(lm: HybridLM, text: Prompt | None, waits: Callable[[], bool]) -> bool:
    """Do what `HybridLM.make_mean_state` does."""
    if isinstance(text, list):
        ids = lm.encode(text)
    elif lm.tokenizer is None:
        return lm.mean is not None
    else:
        ids = lm.tokenizer.encode(calibration_text() if text is None else text, add_special_tokens=False)
    with lm.lock:
        mean = mean_states(lm.backbone, ids[: lm.backbone.max_tokens], waits=waits)
    if mean is not None:
        lm.mean = mean
    return lm.mean is not None


def repair(lm: HybridLM, waits: Callable[[], bool]) -> int:
    """Do what `HybridLM.repair` does."""
    computed = 0
    while len(lm.repairs) and not waits():
        computed += repair_one(lm, waits)
    return computed


class Rest:
    """What to do when nothing else runs, as a server's worker wants it: call it.

    Parameters
    ----------
    lm : HybridLM
    """

    def __init__(self, lm: HybridLM) -> None:
        self._lm = lm
        # Whose mean state was tried for: weights that change get another one.
        self._tried = ""

    def __call__(self, waits: Callable[[], bool] = lambda: False) -> None:
        """Make the mean state if there is none yet, then repair, until `waits` says that somebody comes."""
        lm = self._lm
        if lm.mean is None and lm.reuse.start == "mixed" and self._tried != lm.fingerprint and lm.backbone.states.parts:
            try:
                lm.make_mean_state(waits=waits)
                tried = lm.mean is not None or not waits()
            except Exception:
                log.exception("Making the model's mean state failed; tails begin without it.")
                tried = True
            self._tried = lm.fingerprint if tried else ""
        lm.repair(waits)
