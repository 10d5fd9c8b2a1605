"""Entry point ``vllm.general_plugins``: loaded first in each of vLLM's processes.

A KV connector is never handed the model. So each supported architecture is registered again as a subclass that, where our
connector is configured, installs taps on its layers and leaves itself to be found by `tapped_model`. Without the
connector the subclass is the original.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tailreplay.engines.vllm.adapters import ARCHITECTURES, Adapter
from tailreplay.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tailreplay.topology import Topology

_models: list[weakref.ref[TappedModel]] = []


def register() -> None:
    """Register the architectures with vLLM. Called by vLLM in every process, possibly more than once."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"tailreplay.engines.vllm.models:{architecture}")


@dataclass(eq=False)
class TappedModel:
    """What the connector needs of a model in its process: of this pipeline stage's part.

    Attributes
    ----------
    adapter : Adapter
        How the layers are called.
    decoder : torch.nn.Module
        Holds ``layers``, indexed as in the whole model, and in the first stage ``embed_tokens``.
    topology : Topology
        Of the layers in this process.
    taps : list of torch.Tensor
        One buffer a stored group, ``(max_num_batched_tokens, d_model)``: row i is the hidden of row i of the last batch.
    """

    adapter: Adapter
    decoder: Any
    topology: Topology
    taps: list[torch.Tensor]


def tapped_model() -> TappedModel:
    """Return the model of this process.

    Raises
    ------
    UnsupportedModelError
        If no supported architecture was loaded here.
    """
    for reference in reversed(_models):
        model = reference()
        if model is not None:
            return model
    raise UnsupportedModelError(
        f"tailreplay cannot tap this model in vLLM; architectures that it knows are {', '.join(sorted(ARCHITECTURES))}."
    )


def install_taps(owner: torch.nn.Module, decoder: Any, adapter: Adapter, topology: Topology, rows: int) -> None:
    """Put a tap before the first layer of each stored group. Mutates the layers; `owner` keeps the result alive.

    Parameters
    ----------
    decoder : torch.nn.Module
        Has ``layers``, of which ``start_layer`` to ``end_layer`` - 1 are here, and ``config``.
    topology : Topology
        Of the whole model.
    rows : int
        Most tokens in one batch.

    Raises
    ------
    UnsupportedModelError
        If the layers are not as the adapter expects them.
    """
    stage = topology.stage(decoder.start_layer, decoder.end_layer)
    d_model: int = decoder.config.hidden_size
    adapter.check([decoder.layers[index] for group in stage.groups for index in group.stateful], d_model)
    weight = next(decoder.parameters())
    taps = []
    for group in stage.stored_groups:
        layer = decoder.layers[group.layers[0]]
        # A buffer of the layer, so that vLLM's memory profile counts it and a CUDA graph sees one address.
        # Not a number until a forward has written it.
        buffer = torch.full((rows, d_model), float("nan"), dtype=weight.dtype, device=weight.device)
        layer.register_buffer("tailreplay_tap", buffer, persistent=False)
        layer.register_forward_pre_hook(partial(_tap, adapter), with_kwargs=True)
        taps.append(buffer)
    model = TappedModel(adapter, decoder, stage, taps)
    owner.tailreplay = model  # type: ignore[assignment]
    _models.append(weakref.ref(model))


def _tap(adapter: Adapter, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.ops.tailreplay.tap(*adapter.carried(args, kwargs), layer.tailreplay_tap)


def _write(hidden: torch.Tensor, residual: torch.Tensor | None, buffer: torch.Tensor) -> None:
    rows = buffer[: hidden.shape[0]]
    if residual is None:
        rows.copy_(hidden)
    else:
        torch.add(hidden, residual, out=rows)


# A custom op, which torch.compile keeps as it is.
_library = torch.library.Library("tailreplay", "DEF")
_library.define("tap(Tensor hidden, Tensor? residual, Tensor(a!) buffer) -> ()")
_library.impl("tap", _write, "CompositeExplicitAutograd")
torch.library.register_fake("tailreplay::tap", lambda hidden, residual, buffer: None, lib=_library)
