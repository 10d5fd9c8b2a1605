"""Log-probabilities of tokens that follow a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailreplay.engines.transformers.sequence import Sequence

# Logits of many tokens are large: 512 of a vocabulary of 250,000 are half a GiB in float32.
_MOST_LOGITS = 512


@dataclass(frozen=True)
class Score:
    """Natural log-probability of some tokens, and whether each was the likeliest."""

    logprob: float
    greedy: bool

    def __add__(self, other: Score) -> Score:
        return Score(self.logprob + other.logprob, self.greedy and other.greedy)


@torch.inference_mode()
def score(sequence: Sequence, ids: list[int], first: int, chunk: int) -> Score:
    """Run what is left of ``ids[:-1]`` and score ``ids[first:]``. Mutates `sequence`.

    Parameters
    ----------
    ids : list of int
        Begins with the sequence's own tokens.
    first : int
        First token to score, after those that `sequence` holds already.
    chunk : int
        Longest run of tokens computed at once.
    """
    total = Score(0.0, True)
    at, end = len(sequence.tokens), len(ids) - 1
    assert first > at
    while at < end:
        stop = min(at + chunk, end, max(at, first - 1) + _MOST_LOGITS)
        # Token i is predicted by the logits after token i - 1.
        count = stop - max(at, first - 1)
        if count <= 0:
            sequence.extend(ids[at:stop])
        else:
            logits = sequence.extend_last(ids[at:stop], count)
            total += _score(logits, ids[stop + 1 - count : stop + 1])
        at = stop
    return total


def _score(logits: torch.Tensor, wanted: list[int]) -> Score:
    ids = torch.tensor(wanted, device=logits.device)
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, None])
    return Score(float(logprobs.double().sum()), bool((logits.argmax(-1) == ids).all()))
