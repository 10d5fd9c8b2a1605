"""Entry point ``vllm.general_plugins``: loaded first in each of vLLM's processes.

A KV connector is never handed the model. So each supported architecture is registered again as a subclass that, where our
connector is configured, installs taps on its layers and leaves itself to be found by `tapped_model`. Without the
connector the subclass is the original.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tailreplay.topology import Topology

# Architectures of vLLM's registry -> the subclass here.
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "Qwen3_5",
    "Qwen3_5MoeForCausalLM": "Qwen3_5Moe",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Vision",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeVision",
    "Qwen3NextForCausalLM": "Qwen3Next",
}

_OP = "tailreplay_tap"
_registered = False
_models: list[weakref.ref[TappedModel]] = []


def register() -> None:
    """Register the architectures with vLLM. Called by vLLM in every process, possibly more than once."""
    from vllm import ModelRegistry

    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"tailreplay.engines.vllm.models:{name}")


@dataclass(eq=False)
class TappedModel:
    """What the connector needs of a model in its process.

    Attributes
    ----------
    layers : torch.nn.ModuleList
        Decoder layers, called as ``layer(hidden_states=, residual=, positions=)``.
    embed : torch.nn.Module
        Maps token ids to the first layer's input.
    taps : list of torch.Tensor
        One buffer a stored group, ``(max_num_batched_tokens, d_model)``: row i is the hidden of row i of the last batch.
    """

    layers: torch.nn.ModuleList
    embed: torch.nn.Module
    topology: Topology
    taps: list[torch.Tensor]

    @staticmethod
    def mixer(layer: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run a layer's norm and token mixer alone, for the state that the mixer leaves."""
        normed = layer.input_layernorm(hidden) if residual is None else layer.input_layernorm(hidden, residual)[0]
        layer.linear_attn(normed)


def tapped_model() -> TappedModel:
    """Return the model of this process.

    Raises
    ------
    UnsupportedModelError
        If no supported architecture was loaded here.
    """
    from tailreplay.errors import UnsupportedModelError

    for reference in reversed(_models):
        model = reference()
        if model is not None:
            return model
    raise UnsupportedModelError(
        f"tailreplay cannot tap this model in vLLM; architectures that it knows are {', '.join(sorted(ARCHITECTURES))}."
    )


def install_taps(owner: torch.nn.Module, decoder: torch.nn.Module, topology: Topology, rows: int) -> None:
    """Put a tap before the first layer of each stored group. Mutates the layers; `owner` keeps the result alive.

    Parameters
    ----------
    rows : int
        Most tokens in one batch.
    """
    _register_op()
    layers: torch.nn.ModuleList = decoder.layers  # type: ignore[assignment]
    weight = next(decoder.parameters())
    taps = []
    for group in topology.stored_groups:
        layer = layers[group.layers[0]]
        # A buffer of the layer, so that vLLM's memory profile counts it and a CUDA graph sees one address.
        d_model: int = decoder.config.hidden_size  # type: ignore[union-attr, assignment]
        buffer = torch.zeros(rows, d_model, dtype=weight.dtype, device=weight.device)
        layer.register_buffer("tailreplay_tap", buffer, persistent=False)
        layer.register_forward_pre_hook(_tap, with_kwargs=True)
        taps.append(buffer)
    embed: torch.nn.Module = decoder.embed_tokens  # type: ignore[assignment]
    model = TappedModel(layers, embed, topology, taps)
    owner.tailreplay = model  # type: ignore[assignment]
    _models.append(weakref.ref(model))


def _tap(layer: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
    torch.ops.vllm.tailreplay_tap(kwargs["hidden_states"], kwargs["residual"], layer.tailreplay_tap)


def _write_tap(hidden: torch.Tensor, residual: torch.Tensor, buffer: torch.Tensor) -> None:
    # vLLM carries a layer's output as two summands.
    torch.add(hidden, residual, out=buffer[: hidden.shape[0]])


def _write_tap_fake(hidden: torch.Tensor, residual: torch.Tensor, buffer: torch.Tensor) -> None:
    return None


def _register_op() -> None:
    global _registered
    if not _registered:
        from tailreplay.engines.vllm import compat

        compat.register_op(_OP, _write_tap, _write_tap_fake, ["buffer"])
        _registered = True
