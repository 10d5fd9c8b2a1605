"""Groups of a model, from its layer types."""

from __future__ import annotations

import pytest

from tailreplay import Topology, UnsupportedModelError
from tailreplay.topology import KIND_OF_TYPE, LayerKind

A, L, C, F = "full_attention", "linear_attention", "conv", "mlp"


def groups(
    layer_types: list[str], kernel: int | None = None
) -> list[tuple[int | None, tuple[int, ...], tuple[int, ...]]]:
    topology = Topology.from_layer_types(layer_types, kernel)
    return [(group.source, group.layers, group.stateful) for group in topology.groups]


def test_linear_layers_before_the_first_attention_form_the_embedding_group() -> None:
    topology = Topology.from_layer_types([L, L, L, A] * 2)
    assert groups([L, L, L, A] * 2) == [(None, (0, 1, 2), (0, 1, 2)), (3, (4, 5, 6), (4, 5, 6))]
    assert [group.index for group in topology.groups] == [0, 1]
    assert topology.attention_layers == (3, 7)
    assert [group.stores_hidden for group in topology.groups] == [False, True]
    assert topology.stored_groups == (topology.groups[1],)


def test_attention_layers_in_a_row_make_no_empty_groups() -> None:
    assert groups([A, A, L, A, A]) == [(1, (2,), (2,))]


def test_layers_after_the_last_stateful_one_are_left_out() -> None:
    # A feed-forward layer changes the states of those after it, so those before the last mixer are replayed.
    assert groups([A, F, L, F, "moe", "mamba", F, F]) == [(0, (1, 2, 3, 4, 5), (2, 5))]
    assert groups([A, F]) == []
    assert groups([F, L, A]) == [(None, (0, 1), (1,))]


def test_a_model_of_attention_alone_is_not_hybrid() -> None:
    topology = Topology.from_layer_types([A, A])
    assert not topology.is_hybrid
    assert topology.groups == ()
    assert Topology.from_layer_types([A, L]).is_hybrid


@pytest.mark.parametrize(
    ("layer_types", "kernel", "fields"),
    [
        ([C, C, A, C], 3, [5, 3]),  # n layers of kernel K: n * (K - 1) + 1
        ([C, A, C, F, C, C], 4, [4, 10]),
        ([C, A], None, [None]),  # width unknown
        ([C, L, A, C], 3, [None, 3]),  # a recurrence in the group remembers everything
    ],
)
def test_receptive_fields(layer_types: list[str], kernel: int | None, fields: list[int | None]) -> None:
    topology = Topology.from_layer_types(layer_types, kernel)
    assert [group.receptive_field for group in topology.groups] == fields


def test_a_receptive_field_is_as_long_as_the_convolutions_need() -> None:
    # Follow which inputs the kept inputs of the last convolution depend on.
    kernel, layers, tokens = 4, 3, 40
    topology = Topology.from_layer_types([A] + [C] * layers, kernel)
    needed = set(range(tokens - kernel, tokens))
    for _ in range(layers - 1):
        needed = {source for at in needed for source in range(at - kernel + 1, at + 1)}
    assert topology.groups[0].receptive_field == tokens - min(needed)


@pytest.mark.parametrize("name", KIND_OF_TYPE)
def test_every_known_type_has_its_kind(name: str) -> None:
    topology = Topology.from_layer_types([A, name])
    assert topology.kinds[1] is KIND_OF_TYPE[name]
    assert topology.is_hybrid == (KIND_OF_TYPE[name] in (LayerKind.LINEAR, LayerKind.CONV))


@pytest.mark.parametrize(
    ("layer_types", "words"),
    [
        ([L, L], "no full-attention layer"),
        ([], "no full-attention layer"),
        ([A, "sliding_attention"], "Layer 1 .* only full attention"),
        ([A, L, "hybrid"], "Layer 2 .* one layer"),
        (["rwkv", A], "Layer 0 .* unknown type 'rwkv'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(layer_types: list[str], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        Topology.from_layer_types(layer_types)
