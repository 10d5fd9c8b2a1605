"""What most families have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.families.gates import Gate
from tailreplay.errors import UnsupportedModelError
from tailreplay.topology import Topology


@dataclass(frozen=True)
class Family:
    """How one model family is captured and replayed.

    Attributes
    ----------
    mixers : tuple of str
        Attribute names of a layer's token mixer (attention, recurrence or convolution), in order of trial.
    state_ops : float
        Floating-point operations a token and state element of the recurrence: 6 for the delta rule (read, write and
        query), 4 for diagonal recurrences (write and query).
    gated_delta : bool
        Whether the linear layers call the library's gated delta rule, for which there are faster CPU kernels.
    gate : Gate or None
        Where the linear layers' forget gates come from; None where they have none.
    """

    mixers: tuple[str, ...] = ("linear_attn", "self_attn")
    state_ops: float = 6.0
    gated_delta: bool = False
    gate: Gate | None = None

    def topology(self, config: PretrainedConfig) -> Topology:
        """Return the groups of a model with this text config.

        Raises
        ------
        UnsupportedModelError
            If a layer cannot be replayed.
        """
        return Topology.from_layer_types(compat.layer_types(config), self.conv_kernel(config))

    def conv_kernel(self, config: PretrainedConfig) -> int | None:
        """Width of the convolutions, where whole groups consist of nothing else."""
        return None

    def layers(self, model: PreTrainedModel) -> torch.nn.ModuleList:
        """Return the decoder layers, in order.

        Raises
        ------
        UnsupportedModelError
            If the model does not keep them where the library's newer models do.
        """
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: its layers are not in a list 'layers'."
            )
        return layers

    def mixer(self, layer: torch.nn.Module) -> torch.nn.Module:
        """Return a layer's token mixer."""
        for name in self.mixers:
            module = getattr(layer, name, None)
            if module is not None:
                found: torch.nn.Module = module
                return found
        raise AttributeError(f"{type(layer).__name__} has none of {self.mixers}.")

    def embed(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input for token ids ``(1, n)``: shape ``(1, n, d_model)``."""
        embedded: torch.Tensor = model.get_input_embeddings()(ids)
        return embedded
