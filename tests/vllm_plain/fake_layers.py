"""Tiny decoder layers that are called, and that call their parts, as those of vLLM's models are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

WIDTH = 8
Carried = tuple[torch.Tensor, torch.Tensor | None]


class Norm(torch.nn.Module):
    """Adds the residual in place where it is given one, as vLLM's fused norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return torch.nn.functional.rms_norm(hidden, (WIDTH,), self.weight)
        residual.add_(hidden)
        hidden.copy_(torch.nn.functional.rms_norm(residual, (WIDTH,), self.weight))
        return hidden, residual


class Mixer(torch.nn.Module):
    """A decaying sum (linear) or a mean over the past (attention); remembers what it was given."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear, self.weight = linear, torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.seen: list[torch.Tensor] = []

    def mix(self, normed: torch.Tensor) -> torch.Tensor:
        self.seen.append(normed.clone())
        past = torch.arange(len(normed))
        reach = (past[:, None] - past).double()
        weights = torch.where(reach < 0, 0.0, 0.9**reach if self.linear else 1.0)
        return (weights / weights.sum(1, keepdim=True)).to(normed) @ normed @ self.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mix(hidden_states)


class PositionsMixer(Mixer):
    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert hidden_states.shape[0] == positions.shape[0]
        return self.mix(hidden_states)


class OutputMixer(Mixer):
    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:  # type: ignore[override]
        output.copy_(self.mix(hidden_states))


class Feed(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Layer(torch.nn.Module):
    """Two residual branches, mixer and feed-forward. Remembers the whole layer's input."""

    norm_name, mixer_name, mixer_class = "input_layernorm", "linear_attn", Mixer

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inputs = kind, torch.empty(0)
        setattr(self, self.norm_name, Norm())
        setattr(self, self.mixer_name, Feed() if kind == "mlp" else self.mixer_class(kind == "linear_attention"))
        self.post_attention_layernorm, self.mlp = Norm(), Feed()

    @property
    def seen(self) -> list[torch.Tensor]:
        """Inputs of the mixer, call by call."""
        seen: list[torch.Tensor] = getattr(self, self.mixer_name).seen
        return seen

    def enter(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.inputs = hidden.clone() if residual is None else hidden + residual
        norm = getattr(self, self.norm_name)
        if residual is None:
            return norm(hidden), hidden
        normed: tuple[torch.Tensor, torch.Tensor] = norm(hidden, residual)
        return normed

    @classmethod
    def call(cls, layer: Any, positions: torch.Tensor, carried: Carried) -> Carried:
        """Call a layer as its model does."""
        out = layer(positions=positions, hidden_states=carried[0], residual=carried[1])
        return out[0], out[-1]


class Qwen(Layer):
    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, **kwargs: object
    ) -> Any:
        hidden, residual = self.enter(hidden_states, residual)
        hidden, residual = self.post_attention_layernorm(self.linear_attn(hidden_states=hidden), residual)
        return self.mlp(hidden), residual


class Kimi(Layer):
    mixer_name, mixer_class = "self_attn", PositionsMixer

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None, **kwargs: object
    ) -> Any:
        hidden, residual = self.enter(hidden_states, residual)
        hidden = self.self_attn(hidden_states=hidden, positions=positions)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), None, residual


class KimiAmd(Kimi):
    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None, **kwargs: object
    ) -> Any:
        hidden, _, residual = super().forward(positions, hidden_states, residual)
        return hidden, residual


class Granite(Layer):
    mixer_name = "mamba"

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None, **kwargs: object) -> Any:
        hidden, residual = self.enter(hidden_states, None)
        hidden = residual + self.mamba(hidden) * 0.7
        # What is returned beside is no summand.
        return hidden + self.mlp(self.post_attention_layernorm(hidden)) * 0.7, hidden


class Olmo(Layer):
    mixer_class = OutputMixer

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.enter(hidden_states, None)
        output = torch.empty_like(hidden)
        self.linear_attn(hidden_states=hidden, output=output)
        hidden = residual + output
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    @classmethod
    def call(cls, layer: Any, positions: torch.Tensor, carried: Carried) -> Carried:
        return layer(positions, carried[0]), None


class Nemotron(Layer):
    norm_name, mixer_name = "norm", "mixer"

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None, **kwargs: object) -> Any:
        hidden, residual = self.enter(hidden_states, residual)
        return self.mixer(hidden), residual


class Decoder(torch.nn.Module):
    """A model's layers, or those of one pipeline stage. Shares them with the other stages."""

    def __init__(self, layers: list[Layer], start: int, stop: int, multiplier: float | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.start_layer, self.end_layer, self.style = start, stop, type(layers[0])
        here = [layer if start <= i < stop else torch.nn.Identity() for i, layer in enumerate(layers)]
        self.layers = torch.nn.ModuleList(here)
        if start == 0:
            self.embed_tokens = torch.nn.Embedding(100, WIDTH)
            if multiplier is not None:
                self.embedding_multiplier = multiplier

    def first_input(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(ids)
        return embedded * getattr(self, "embedding_multiplier", 1.0)

    def forward(self, positions: torch.Tensor, carried: Carried) -> Carried:
        for layer in list(self.layers)[self.start_layer : self.end_layer]:
            carried = self.style.call(layer, positions, carried)
        return carried
