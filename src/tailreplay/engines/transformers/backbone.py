"""A loaded model as the engine sees it: groups, layout, costs and the few calls that replay needs."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from blake3 import blake3
from transformers import PretrainedConfig, PreTrainedModel

from tailreplay.costs import CostModel
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.capture import Sink, taps_of
from tailreplay.engines.transformers.families.registry import family_of
from tailreplay.engines.transformers.gates import GateRun, gate_taps_of
from tailreplay.engines.transformers.kernels import install as kernels
from tailreplay.engines.transformers.kernels.states import token_major
from tailreplay.engines.transformers.kv_layer import PreallocatedLayer
from tailreplay.engines.transformers.layer_costs import layer_costs
from tailreplay.engines.transformers.saved_states import StateSpecs
from tailreplay.errors import UnsupportedModelError
from tailreplay.pages import PageLayout, PartSpec

_SAMPLES = 64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Backbone:
    """Wraps a causal language model. Installs taps on it, and kernels in its mixers; changes no weight.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In eval mode, on one device. A model on the meta device can be inspected but not run.
    page_size : int
        Tokens a page.

    Attributes
    ----------
    kernels : bool
        Whether its linear layers use the CPU kernels of `tailreplay.engines.transformers.kernels`.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be replayed; see `tailreplay.engines.transformers.families.registry`.
    """

    def __init__(self, model: PreTrainedModel, page_size: int = 64) -> None:
        self.model = model
        self.config: PretrainedConfig = model.config.get_text_config(decoder=True)
        self.family = family_of(self.config)
        self.topology = self.family.topology(self.config)
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"The model is spread over {', '.join(sorted(devices))}; this engine runs models on one device only."
            )
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.layers = self.family.layers(model)
        self.taps = taps_of(self.layers, self.topology)
        self.gates = gate_taps_of(self.layers, self.family, self.topology)
        self.kernels = self._install_kernels()
        cache, sink = self._probe()
        self.states = StateSpecs.of(cache, self.topology)
        self.layout = self._layout(cache, sink, page_size)
        self.costs = self._costs(cache)

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence the model's positions allow; None if the config names no limit."""
        limit: int | None = getattr(self.config, "max_position_embeddings", None)
        return limit

    def new_cache(self, capacity: int) -> compat.DynamicCache:
        """Return an empty cache whose attention layers have room for `capacity` tokens."""
        cache = self._empty_cache()
        for layer in self.topology.attention_layers:
            cache.layers[layer] = PreallocatedLayer(capacity)
        return cache

    def gate_run(self, page_size: int) -> GateRun | None:
        """Return what takes down the gates of a new sequence; None if the linear layers have none."""
        return GateRun(self.gates, self.topology, page_size) if self.gates is not None else None

    def kv(self, cache: compat.DynamicCache) -> list[PreallocatedLayer]:
        """Return the attention layers' entries of a cache, in layer order."""
        return [cache.layers[layer] for layer in self.topology.attention_layers]

    def copy_cache(self, cache: compat.DynamicCache, capacity: int) -> compat.DynamicCache:
        """Return an independent copy with room for `capacity` tokens."""
        twin = self._empty_cache()
        compat.copy_states(cache, twin)
        for layer in self.topology.attention_layers:
            twin.layers[layer] = cache.layers[layer].copy(capacity)
        return twin

    def forward(
        self,
        ids: list[int],
        start: int,
        cache: compat.DynamicCache,
        sink: Sink | None,
        keep: int = 1,
        gates: GateRun | None = None,
    ) -> torch.Tensor:
        """Run tokens `ids` at positions ``start ..``. Mutates `cache` and appends hiddens to `sink` and gates to `gates`.

        Returns
        -------
        torch.Tensor
            Logits after each of the last `keep` tokens, ``(keep, vocabulary)``.
        """
        tokens = self.token_ids(ids)
        positions = self.positions(start, start + len(ids))
        if sink is None:
            return compat.call_model(self.model, tokens, positions, cache, keep)
        with self.taps.into(sink), gates.taps.into(gates.raw) if gates is not None else nullcontext():
            return compat.call_model(self.model, tokens, positions, cache, keep)

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return positions ``start .. stop-1``, shape ``(1, n)``."""
        return torch.arange(start, stop, device=self.device)[None]

    def embed(self, ids: list[int]) -> torch.Tensor:
        """Return the embedding group's input, ``(1, n, d_model)``."""
        return self.family.embed(self.model, self.token_ids(ids))

    def token_ids(self, ids: list[int]) -> torch.Tensor:
        """Return token ids on the model's device, ``(1, n)``, without waiting for the device."""
        tokens = torch.tensor([ids], device="cpu")  # whatever torch's default is
        if self.device.type == "cuda":
            # From pageable memory the copy would wait for everything queued before it.
            return tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens.to(self.device)

    def fingerprint(self) -> str:
        """Hex name of architecture and weights: the config, and of every tensor the exact sum of its bits and a sample.

        The sum sees an edit of a single row, the sample an exchange of rows. Reads every weight once.
        """
        config = self.config.to_dict()
        named = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
        hasher = blake3(repr(sorted(named.items(), key=lambda item: item[0])).encode())
        for name, tensor in self.model.state_dict().items():
            flat = tensor.detach().reshape(-1)
            bits = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
            sample = bits[:: max(1, bits.numel() // _SAMPLES)][: 2 * _SAMPLES].tolist()
            total = int(bits.sum(dtype=torch.int64))  # of integers: the same in whatever order it is added up
            hasher.update(repr((name, tuple(tensor.shape), str(tensor.dtype), total, sample)).encode())
        digest: str = hasher.hexdigest()
        return digest

    def _install_kernels(self) -> bool:
        mixers = [self.family.mixer(self.layers[i]) for group in self.topology.groups for i in group.stateful]
        if self.family.gated_delta and self.device.type == "cpu" and kernels.wanted():
            return kernels.install(mixers)
        kernels.uninstall(mixers)
        return False

    def _empty_cache(self) -> compat.DynamicCache:
        cache = compat.new_cache(self.config)
        return token_major(cache) if self.kernels else cache

    @torch.inference_mode()
    def _probe(self) -> tuple[compat.DynamicCache, Sink]:
        """Run one token to see the real shapes: the same way for every family, and without weights on 'meta'."""
        cache = self.new_cache(1)
        sink: Sink = [[] for _ in self.topology.stored_groups]
        self.forward([0], 0, cache, sink)
        return cache, sink

    def _layout(self, cache: compat.DynamicCache, sink: Sink, page_size: int) -> PageLayout:
        pairs = []
        for layer, entry in zip(self.topology.attention_layers, self.kv(cache), strict=True):
            if entry.get_seq_length() != 1:
                raise UnsupportedModelError(
                    f"Layer {layer} of this model keeps no keys and values in the library's cache: nothing can be reused."
                )
            keys, values = entry.rows(0, 1)
            pairs.append(
                (
                    PartSpec(f"k{layer}", tuple(keys.shape[1:]), keys.dtype),
                    PartSpec(f"v{layer}", tuple(values.shape[1:]), values.dtype),
                )
            )
        hidden = tuple(
            PartSpec(f"h{group.index}", (tapped[0].shape[-1],), tapped[0].dtype)
            for group, tapped in zip(self.topology.stored_groups, sink, strict=True)
        )
        return PageLayout(page_size, tuple(pairs), hidden, self.states.parts)

    def _costs(self, cache: compat.DynamicCache) -> CostModel:
        states = {
            layer: [state for state in compat.states(cache, layer) if state is not None]
            for group in self.topology.groups
            for layer in group.stateful
        }
        embedding = self.model.get_input_embeddings().weight
        return CostModel(
            topology=self.topology,
            layers=layer_costs(self.layers, self.family, self.config, self.topology, self.layout, states),
            head=2.0 * embedding.numel(),
            kv_bytes=self.layout.kv_bytes_per_token,
            hidden_bytes=self.layout.hidden_bytes_per_token,
            state_bytes=sum(state.nbytes for held in states.values() for state in held),
        )
