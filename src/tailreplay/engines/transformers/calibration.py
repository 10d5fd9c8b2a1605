"""Measures what `tailreplay.forgetting` cannot prove: how norms drift, and how errors pass from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.capture import Sink
from tailreplay.engines.transformers.gates import gated_layers, head_shares
from tailreplay.engines.transformers.replay import replay
from tailreplay.errors import InvalidRequestError
from tailreplay.forgetting import Calibration, Floats, Forgetting, segmented, tail_errors

SAFETY = 1.5
_TAILS = 6
_MOST = 64.0
_ODD_CHUNK = 397
_FLOAT32 = 1e-5


@dataclass(frozen=True)
class Sample:
    """A prompt's true states against those of replays.

    Attributes
    ----------
    forgetting : Forgetting
    tails : tuple of int
        Rows of ``forgetting.tails`` that were replayed.
    errors : ndarray, shape (tails, layers)
        ``||S^ - S|| / ||S||`` by layer with a state.
    noise : float
        Greatest such error of a replay of the whole prompt, which would be 0 if nothing were rounded.
    """

    forgetting: Forgetting
    tails: tuple[int, ...]
    errors: Floats
    noise: float


def calibrate(
    backbone: Backbone, prompts: Sequence[Sequence[int]], safety: float = SAFETY, page_size: int = 64
) -> Calibration:
    """Return constants with which no replay of these prompts errs by more than predicted, nor would at `safety` times that.

    Parameters
    ----------
    prompts : sequence of sequence of int
        Token ids of texts like those to come, several pages long; each is computed, and replayed up to six times. The
        worst of more prompts is nearer to the worst of all: of tiny models' random ones 16 do.

    Raises
    ------
    InvalidRequestError
        If the model has no gates, or every prompt is too short.
    """
    samples = [sample for prompt in prompts for sample in measure(backbone, prompt, page_size)]
    if not samples:
        raise InvalidRequestError(f"Calibration needs prompts of more than {2 * page_size} tokens.", "prompts")
    noise = max(_FLOAT32, 2 * max(sample.noise for sample in samples))
    floor = torch.finfo(backbone.model.dtype).eps
    errors = safety * np.stack([sample.errors for sample in samples])

    def exceeded(drift: float, gain: Floats) -> NDArray[np.bool_]:
        """Return for which layers some error is greater than predicted; what rounding does is left out."""
        calibration = Calibration(drift, tuple(gain), floor)
        predicted = [tail_errors(each.forgetting, backbone.topology, calibration)[list(each.tails)] for each in samples]
        return np.asarray((errors > np.maximum(predicted, safety * noise)).any(axis=(0, 1)))

    first = np.array([at == 0 for group in backbone.topology.groups for at, _ in enumerate(group.stateful)])
    none = np.zeros(len(first))
    drift = _least(lambda value: bool(exceeded(value[0], none)[first].any()), np.ones(1), np.full(1, _MOST))[0]
    gain = _least(lambda value: exceeded(drift, value), none, np.where(first, 0.0, _MOST))
    return Calibration(round(float(drift), 3), tuple(round(float(each), 3) for each in gain), floor)


def _least(exceeded: Callable[[Floats], Any], low: Floats, high: Floats) -> Floats:
    """Return the least constants with which nothing is exceeded, a little above; a layer's matters to its own alone."""
    while (high - low).max() > 0.005:
        middle = (low + high) / 2
        too_low = exceeded(middle)
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    return high


@torch.inference_mode()
def measure(backbone: Backbone, prompt: Sequence[int], page_size: int = 64, chunk: int = 256) -> Iterator[Sample]:
    """Compute a prompt and replay tails of it from zero states; yields nothing for one of less than three pages.

    Raises
    ------
    InvalidRequestError
        If the model has no gates.
    """
    run = backbone.gate_run(page_size)
    if run is None:
        raise InvalidRequestError(
            "This model's linear layers have no forget gates: there is nothing to measure.", "model"
        )
    ids, topology = list(prompt), backbone.topology
    pages = len(ids) // page_size
    if pages < 3:
        return
    ids = ids[: pages * page_size]
    cache = backbone.new_cache(len(ids))
    sink: Sink = [[] for _ in topology.stored_groups]
    for start in range(0, len(ids), chunk):
        backbone.forward(ids[start : start + chunk], start, cache, sink, 1, run)
    hiddens = [torch.cat(parts)[None] for parts in sink]
    shares = head_shares(cache, topology).cpu().numpy()
    sums = run.taps.log_alpha(run.raw).unflatten(1, (pages, page_size)).sum(2).transpose(0, 1).cpu().numpy()
    forgetting = segmented(range(0, len(ids), page_size), len(ids), sums, shares)
    tails = sorted({round(row) for row in np.linspace(1, len(forgetting.starts) - 1, _TAILS)})
    errors = []
    for row in (0, *tails):
        rebuilt = backbone.new_cache(1)
        length = int(forgetting.tails[row])
        # In chunks that no prefill has, so that the whole prompt's replay shows what rounding does.
        tail = [length] * len(topology.groups)
        replay(backbone, rebuilt, ids, tail, lambda g, a, b: hiddens[g][:, a:b], chunk=_ODD_CHUNK)
        errors.append([_error(rebuilt, cache, layer) for layer in gated_layers(topology)])
    yield Sample(forgetting, tuple(tails), np.array(errors[1:]), max(errors[0]))


def _error(rebuilt: compat.DynamicCache, true: compat.DynamicCache, layer: int) -> float:
    state, expected = (compat.states(cache, layer)[1] for cache in (rebuilt, true))
    assert state is not None
    assert expected is not None
    return float((state.double() - expected.double()).norm() / expected.double().norm())
