"""How vLLM calls the decoder layers of each architecture: what a tap must see there, and what replay must do.

vLLM's models agree on ``model.layers``, and on little else. One `Adapter` an architecture family holds the differences:
the names of a linear layer's norm and mixer, and the form in which hiddens travel from layer to layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tailreplay.errors import UnsupportedModelError

Carried = tuple[torch.Tensor, torch.Tensor | None]
"""What one layer hands to the next: hidden and residual, whose sum is the layer's output, or the output alone and None."""

# Layers with one of these set keep a slice of the rows on each rank.
_SHARDED = ("use_attn_reduce_scatter_for_moe", "use_sequence_parallel")
# Layers with one of these set (Kimi K3) mix the outputs of many layers before, so one hidden is not all that they read.
_BLOCK_RESIDUALS = ("use_attn_res", "use_attn_residuals")


@dataclass(frozen=True)
class Adapter:
    """Layers called as ``layer(positions=, hidden_states=, residual=)`` that return ``(hidden, …, residual)``.

    A layer's input is the sum of the two; its norm adds them. Subclasses change what differs.

    Attributes
    ----------
    norm : str
        Name of the norm before a linear layer's mixer.
    mixer : str
        Name of the mixer that keeps a recurrent state.
    """

    norm: str
    mixer: str

    def carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
        """Return what a call of a layer with these arguments was handed."""
        return kwargs["hidden_states"], kwargs["residual"]

    def step(self, layer: Any, positions: torch.Tensor, carried: Carried) -> Carried:
        """Run a whole layer, past its hooks: what is replayed must not be tapped."""
        hidden, residual = carried
        out = layer.forward(positions=positions, hidden_states=hidden, residual=residual)
        return out[0], out[-1]

    def finish(self, layer: Any, positions: torch.Tensor, carried: Carried) -> None:
        """Run a linear layer's norm and mixer only, for the state that the mixer leaves."""
        hidden, residual = carried
        norm = getattr(layer, self.norm)
        normed = norm(hidden) if residual is None else norm(hidden, residual)[0]
        self.mix(getattr(layer, self.mixer), normed, positions)

    def mix(self, mixer: Any, normed: torch.Tensor, positions: torch.Tensor) -> None:
        """Call a mixer."""
        mixer(normed)

    def embed(self, decoder: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input, ``(tokens, d_model)``."""
        embedded: torch.Tensor = decoder.embed_tokens(ids)
        return embedded

    def fits(self, parameters: list[str]) -> bool:
        """Whether a layer with these parameters can be called as the adapter does."""
        return {"hidden_states", "residual"} <= set(parameters)

    def check(self, layers: Iterable[Any], d_model: int) -> None:
        """Look at linear layers for what would make replay wrong.

        Raises
        ------
        UnsupportedModelError
            One sentence.
        """
        for layer in layers:
            kind = type(layer).__name__
            norm = getattr(layer, self.norm, None)
            if norm is None or not hasattr(layer, self.mixer):
                raise UnsupportedModelError(
                    f"A linear layer of type '{kind}' lacks '{self.norm}' or '{self.mixer}': this version of vLLM builds "
                    "the model in another way than tailreplay knows."
                )
            width = norm.weight.shape[-1]
            if width != d_model:
                raise UnsupportedModelError(
                    f"Layers of type '{kind}' read hiddens of width {width}, the config says {d_model}."
                )
            if not self.fits(list(inspect.signature(layer.forward).parameters)):
                raise UnsupportedModelError(
                    f"Layers of type '{kind}' take other arguments than tailreplay knows: this version of vLLM calls them "
                    "in another way."
                )
            if any(getattr(layer, name, False) for name in _SHARDED):
                raise UnsupportedModelError(
                    "tailreplay needs whole hiddens on every rank, and vLLM's sequence parallelism for experts divides "
                    "them: start without expert parallelism, or without tensor or data parallelism."
                )
            if any(getattr(layer, name, False) for name in _BLOCK_RESIDUALS):
                raise UnsupportedModelError(
                    f"Layers of type '{kind}' attend to the outputs of earlier layers here (attn_res_block_size), which "
                    "one hidden a group cannot replace."
                )


@dataclass(frozen=True)
class KimiAdapter(Adapter):
    """Kimi-Linear: either kind of layer calls its mixer ``self_attn``, with positions."""

    def mix(self, mixer: Any, normed: torch.Tensor, positions: torch.Tensor) -> None:
        mixer(hidden_states=normed, positions=positions)


@dataclass(frozen=True)
class GraniteAdapter(Adapter):
    """Granite 4: layers take a residual and ignore it; embeddings are scaled."""

    def carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
        return kwargs["hidden_states"], None

    def step(self, layer: Any, positions: torch.Tensor, carried: Carried) -> Carried:
        return super().step(layer, positions, carried)[0], None

    def embed(self, decoder: Any, ids: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = super().embed(decoder, ids) * decoder.embedding_multiplier
        return scaled


@dataclass(frozen=True)
class OlmoAdapter(Adapter):
    """OLMo-Hybrid: ``layer(positions, hidden_states)`` returns one tensor; the mixer writes into one it is given."""

    def carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried:
        return args[1], None

    def fits(self, parameters: list[str]) -> bool:
        return parameters == ["positions", "hidden_states"]

    def step(self, layer: Any, positions: torch.Tensor, carried: Carried) -> Carried:
        return layer.forward(positions, carried[0]), None

    def mix(self, mixer: Any, normed: torch.Tensor, positions: torch.Tensor) -> None:
        mixer(hidden_states=normed, output=torch.empty_like(normed))


@dataclass(frozen=True)
class Architecture:
    """Where vLLM keeps a model class, and how its layers are called.

    Attributes
    ----------
    module : str
        Imported only when a model of this architecture is loaded: some files need a GPU's packages, or a newer vLLM.
    adapter : Adapter
    text : str or None
        Attribute that holds the language model, in a model that sees images too.
    """

    module: str
    adapter: Adapter
    text: str | None = None


_MODELS = "vllm.model_executor.models"
_QWEN = Adapter("input_layernorm", "linear_attn")

ARCHITECTURES = {
    "Qwen3NextForCausalLM": Architecture(f"{_MODELS}.qwen3_next", _QWEN),
    "Qwen3_5ForCausalLM": Architecture(f"{_MODELS}.qwen3_5", _QWEN),
    "Qwen3_5MoeForCausalLM": Architecture(f"{_MODELS}.qwen3_5", _QWEN),
    "Qwen3_5ForConditionalGeneration": Architecture(f"{_MODELS}.qwen3_5", _QWEN, "language_model"),
    "Qwen3_5MoeForConditionalGeneration": Architecture(f"{_MODELS}.qwen3_5", _QWEN, "language_model"),
    "OlmoHybridForCausalLM": Architecture(f"{_MODELS}.olmo_hybrid", OlmoAdapter("input_layernorm", "linear_attn")),
    "KimiLinearForCausalLM": Architecture("vllm.models.kimi_k3", KimiAdapter("input_layernorm", "self_attn")),
    "GraniteMoeHybridForCausalLM": Architecture(
        f"{_MODELS}.granitemoehybrid", GraniteAdapter("input_layernorm", "mamba")
    ),
    "NemotronHForCausalLM": Architecture(f"{_MODELS}.nemotron_h", Adapter("norm", "mixer")),
}
