"""Groups of a hybrid model, from its layer types alone.

A *group* is one full-attention (FA) layer and the linear layers after it, up to the next FA layer. Linear layers before
the first FA layer form the *embedding group*. Groups are what makes tail replay cheap: each starts from a stored hidden
(or from the token embedding), so each replays without any FA layer and independently of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tailreplay.errors import UnsupportedModelError


class LayerKind(Enum):
    """What a layer keeps from one token to the next."""

    ATTENTION = "attention"
    """Keys and values of every token."""
    LINEAR = "linear"
    """A recurrent state, and often a short convolution's inputs (Gated DeltaNet, KDA, Mamba, lightning attention)."""
    CONV = "conv"
    """The inputs of a short convolution only."""
    FFN = "ffn"
    """Nothing: a feed-forward block that is a layer of its own."""


# Names used by transformers' ``config.layer_types`` and ``layers_block_type``.
KIND_OF_TYPE = {
    "full_attention": LayerKind.ATTENTION,
    "attention": LayerKind.ATTENTION,
    "linear_attention": LayerKind.LINEAR,
    "mamba": LayerKind.LINEAR,
    "mamba2": LayerKind.LINEAR,
    "conv": LayerKind.CONV,
    "mlp": LayerKind.FFN,
    "moe": LayerKind.FFN,
}


@dataclass(frozen=True)
class Group:
    """Linear layers that are replayed together.

    Attributes
    ----------
    index : int
        Position among the model's groups.
    source : int or None
        Index of the layer whose output feeds the group: an FA layer, or the last layer of the pipeline stage before. None
        for the embedding group.
    layers : tuple of int
        Layers that replay runs, in order: from the group's first up to its last stateful one. FFN layers after that
        one change no state of this group, so they are left out.
    stateful : tuple of int
        Those of `layers` that keep a state.
    receptive_field : int or None
        A tail of this many tokens rebuilds the states exactly; None where a recurrence remembers every token.
    """

    index: int
    source: int | None
    layers: tuple[int, ...]
    stateful: tuple[int, ...]
    receptive_field: int | None

    @property
    def stores_hidden(self) -> bool:
        """Whether hiddens must be cached: the embedding group's input is recomputed from token ids instead."""
        return self.source is not None


@dataclass(frozen=True)
class Topology:
    """Layer kinds of a model, or of one pipeline stage of it, and the groups they form.

    Attributes
    ----------
    kinds : tuple of LayerKind
        One per layer.
    groups : tuple of Group
        Only groups with a stateful layer: an FA layer followed by none needs no hiddens.
    first : int
        Index of the first layer. Indices count the whole model's layers, in a stage too.
    conv_kernel : int or None
        Width of the model's short convolutions, where known.
    """

    kinds: tuple[LayerKind, ...]
    groups: tuple[Group, ...]
    first: int = 0
    conv_kernel: int | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose keys and values are cached."""
        return tuple(i for i, kind in enumerate(self.kinds, self.first) if kind is LayerKind.ATTENTION)

    @property
    def stored_groups(self) -> tuple[Group, ...]:
        """Groups that have hiddens in the cache, in order."""
        return tuple(group for group in self.groups if group.stores_hidden)

    @property
    def is_hybrid(self) -> bool:
        """False for a model without any stateful linear layer: its cache is a plain prefix cache, always exact."""
        return bool(self.groups)

    @classmethod
    def from_layer_types(cls, layer_types: Sequence[str], conv_kernel: int | None = None) -> Topology:
        """Build the groups of a model.

        Parameters
        ----------
        layer_types : sequence of str
            One name per layer, as in transformers' ``config.layer_types``.
        conv_kernel : int, optional
            Width K of the model's short convolutions; needed to know the finite receptive field of conv-only groups.

        Raises
        ------
        UnsupportedModelError
            If a layer type is unknown, if one layer holds attention and recurrence together, or if there is no FA layer.
        """
        kinds = tuple(_kind(index, name) for index, name in enumerate(layer_types))
        if LayerKind.ATTENTION not in kinds:
            raise UnsupportedModelError(
                "This model has no full-attention layer, so there are no keys and values to reuse; "
                "a purely recurrent model needs state checkpoints instead."
            )
        return cls._build(kinds, 0, conv_kernel)

    def stage(self, start: int, stop: int) -> Topology:
        """Return the part that a pipeline stage runs: layers `start` to `stop` - 1.

        Linear layers that are cut off from the layer that feeds their group form a group of this stage. Its input is the
        stage's own input, which must be stored, even where the border lies in the embedding group: only the first stage
        has the embedding.

        Raises
        ------
        ValueError
            If there is no such part.
        """
        if not self.first <= start < stop <= self.first + len(self.kinds):
            raise ValueError(
                f"no layers {start} to {stop - 1} among {self.first} to {self.first + len(self.kinds) - 1}"
            )
        return self._build(self.kinds[start - self.first : stop - self.first], start, self.conv_kernel)

    def stages(self, spans: Iterable[tuple[int, int]]) -> tuple[Topology, ...]:
        """Return each pipeline stage's part, for the ``(start, stop)`` of each in order.

        Raises
        ------
        ValueError
            If the spans leave layers out or overlap.
        """
        spans = list(spans)
        borders = [self.first, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != borders[:-1] or borders[-1] != self.first + len(self.kinds):
            raise ValueError(
                f"pipeline stages {spans} do not divide layers {self.first} to {borders[0] + len(self.kinds)}"
            )
        return tuple(self.stage(start, stop) for start, stop in spans)

    @classmethod
    def _build(cls, kinds: tuple[LayerKind, ...], first: int, conv_kernel: int | None) -> Topology:
        groups: list[Group] = []
        start, source = 0, None if first == 0 else first - 1
        for end in [*(i for i, kind in enumerate(kinds) if kind is LayerKind.ATTENTION), len(kinds)]:
            group = _group(len(groups), source, range(first + start, first + end), kinds[start:end], conv_kernel)
            if group is not None:
                groups.append(group)
            start, source = end + 1, first + end
        return cls(kinds, tuple(groups), first, conv_kernel)


def _kind(index: int, name: str) -> LayerKind:
    kind = KIND_OF_TYPE.get(name)
    if kind is not None:
        return kind
    if name.startswith("hybrid"):
        raise UnsupportedModelError(
            f"Layer {index} is of type '{name}': it mixes attention and recurrence in one layer, so the input of every "
            "layer would have to be stored and nothing would be skipped."
        )
    if "attention" in name:
        raise UnsupportedModelError(
            f"Layer {index} is of type '{name}': only full attention is supported, since windowed or chunked attention "
            "keeps other keys and values than those of every token."
        )
    raise UnsupportedModelError(f"Layer {index} is of unknown type '{name}'; known are {', '.join(KIND_OF_TYPE)}.")


def _group(
    index: int, source: int | None, span: range, kinds: tuple[LayerKind, ...], conv_kernel: int | None
) -> Group | None:
    stateful = tuple(i for i, kind in zip(span, kinds, strict=True) if kind in (LayerKind.LINEAR, LayerKind.CONV))
    if not stateful:
        return None
    receptive_field = None
    if conv_kernel is not None and LayerKind.LINEAR not in kinds:
        # Each convolution widens the field by K-1; the last one's state holds its K last inputs.
        receptive_field = len(stateful) * (conv_kernel - 1) + 1
    return Group(index, source, tuple(range(span.start, stateful[-1] + 1)), stateful, receptive_field)
