"""How long a model's heads remember, over a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.capture import Sink
from tailreplay.engines.transformers.gates import gated_layers, head_shares
from tailreplay.errors import InvalidRequestError
from tailreplay.forgetting import Floats


@dataclass(frozen=True)
class Horizons:
    """Retention horizons of the linear layers' heads.

    Attributes
    ----------
    layers : tuple of int
        Layers with a state.
    tokens : ndarray, shape (layers, heads)
        Tokens until a head keeps 1/e of what it held, by its gates alone: ``-1 / mean(log alpha)``. Where the delta rule
        writes over what is there, it goes sooner.
    shares : ndarray, shape (layers, heads)
        Each head's share of its layer's squared state norm after the text.
    text_tokens : int
        Length of the text.
    """

    layers: tuple[int, ...]
    tokens: Floats
    shares: Floats
    text_tokens: int


@torch.inference_mode()
def measure_horizons(backbone: Backbone, ids: Sequence[int], chunk: int = 2048) -> Horizons:
    """Run a text through the model and return how long its heads remember.

    Raises
    ------
    InvalidRequestError
        If the model's layers have no gates.
    """
    run = backbone.gate_run(64)
    if run is None:
        raise InvalidRequestError("This model's linear layers have no forget gates, so no horizons.", "model")
    text = list(ids)
    cache = backbone.new_cache(len(text))
    sink: Sink = [[] for _ in backbone.topology.stored_groups]
    total = torch.zeros(())
    for start in range(0, len(text), chunk):
        backbone.forward(text[start : start + chunk], start, cache, sink, 1, run)
        total = total + run.taps.log_alpha(run.raw).double().sum(1).cpu()
        for kept in (*run.raw, *sink):
            kept.clear()
    tokens = -len(text) / total.clamp(max=-1e-300).numpy()
    shares = head_shares(cache, backbone.topology).cpu().numpy()
    return Horizons(tuple(gated_layers(backbone.topology)), tokens, shares, len(text))


def rounded(horizon: float) -> float:
    """Return a horizon with three digits."""
    return float(f"{min(horizon, 1e12):.3g}") if math.isfinite(horizon) else 1e12
