"""Initial weights under which a small hybrid learns to copy and to count soon.

The library's default forgets within a few tokens. Here each linear head starts with a horizon of its own, and the
convolutions hand on the previous one or two tokens, which is what attention needs to look up "what came after".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from training.settings import ModelSettings

_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@torch.no_grad()
def initialise(model: Any, settings: ModelSettings, seed: int) -> None:
    """Set all weights of a ``Qwen3_5ForCausalLM`` in place; the same seed gives the same weights."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            gain = 0.3 if name.endswith(_OUTPUTS) else 0.5
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]), generator=draw)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.06, generator=draw)
    mixers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    biases = _dt_biases(len(mixers) * settings.delta_heads, settings, draw).view(len(mixers), settings.delta_heads)
    for index, mixer in enumerate(mixers):
        mixer.A_log.zero_()
        mixer.dt_bias.copy_(biases[index])
        mixer.in_proj_a.weight.mul_(0.3)
        _convolution(mixer.conv1d.weight[:, 0], index, settings, draw)


def dt_bias_of(horizon: float | Tensor) -> Tensor:
    """Return the ``dt_bias`` that gives a base horizon, in tokens, where ``A_log`` is 0."""
    rate = 1 / torch.as_tensor(horizon, dtype=torch.float32)
    return rate + torch.log(-torch.expm1(-rate))  # the inverse of softplus


def _dt_biases(count: int, settings: ModelSettings, draw: torch.Generator) -> Tensor:
    """Biases of `count` heads with log-spread horizons, dealt so that every layer has short and long ones."""
    low, high = math.log(settings.horizon_min), math.log(settings.horizon_max)
    horizons = torch.exp(low + (torch.arange(count) + torch.rand(count, generator=draw)) / count * (high - low))
    dealt = horizons.view(settings.delta_heads, -1).t().reshape(-1)
    return dt_bias_of(dealt)


def _convolution(weight: Tensor, index: int, settings: ModelSettings, draw: torch.Generator) -> None:
    """Queries and keys look at the token itself; each head's values at the one `lag` before."""
    nn.init.normal_(weight, std=0.1, generator=draw)
    width = settings.delta_heads * settings.delta_dim
    weight[: 2 * width, -1] += 0.6
    for head in range(settings.delta_heads):
        lag = (1, 0, 2, 1, 0)[(index * settings.delta_heads + head) % 5]
        first = 2 * width + head * settings.delta_dim
        weight[first : first + settings.delta_dim, -1 - lag] += 0.8
