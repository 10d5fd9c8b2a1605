"""Pipeline stages of a topology."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailreplay import Topology
from tailreplay.topology import KIND_OF_TYPE, LayerKind

A, L, C, F = "full_attention", "linear_attention", "conv", "mlp"
STATEFUL = (LayerKind.LINEAR, LayerKind.CONV)


@st.composite
def models_and_spans(draw: st.DrawFn) -> tuple[Topology, list[tuple[int, int]]]:
    types = draw(st.lists(st.sampled_from([A, L, C, F]), min_size=1, max_size=14))
    types.insert(draw(st.integers(0, len(types))), A)
    borders = sorted(draw(st.sets(st.integers(1, len(types) - 1), max_size=4)))
    spans = list(zip([0, *borders], [*borders, len(types)], strict=True))
    return Topology.from_layer_types(types, draw(st.sampled_from([None, 3]))), spans


@given(models_and_spans())
def test_stages_divide_the_model(drawn: tuple[Topology, list[tuple[int, int]]]) -> None:
    whole, spans = drawn
    stages = whole.stages(spans)
    assert [kind for stage in stages for kind in stage.kinds] == list(whole.kinds)
    assert [i for stage in stages for i in stage.attention_layers] == list(whole.attention_layers)
    stateful = [i for stage in stages for group in stage.groups for i in group.stateful]
    assert stateful == [i for i, kind in enumerate(whole.kinds) if kind in STATEFUL]
    whole_inputs = {group.layers[0]: group for group in whole.groups}
    for stage, (start, stop) in zip(stages, spans, strict=True):
        assert [group.index for group in stage.groups] == list(range(len(stage.groups)))
        for group in stage.groups:
            assert group.layers == tuple(range(group.layers[0], group.stateful[-1] + 1))
            assert start <= group.layers[0] <= group.layers[-1] < stop
            assert LayerKind.ATTENTION not in {whole.kinds[i] for i in group.layers}
            # What feeds a group is the layer before it. Only the model's first layer is fed by the embedding.
            assert group.source == (group.layers[0] - 1 if group.layers[0] else None)
            if group.layers[0] not in whole_inputs:
                assert group.layers[0] == start


def test_a_stage_that_is_the_whole_model_is_the_model() -> None:
    whole = Topology.from_layer_types([L, L, A, F, L, A], 4)
    assert whole.stage(0, 6) == whole
    assert whole.stages([(0, 6)]) == (whole,)


def test_a_group_cut_at_a_border_stores_the_stages_input() -> None:
    whole = Topology.from_layer_types([L, L, L, A, F, L, F, L])
    first, second, third = whole.stages([(0, 1), (1, 6), (6, 8)])
    assert [(group.source, group.layers, group.stores_hidden) for group in first.groups] == [(None, (0,), False)]
    # The embedding lives on the first stage only.
    assert [(group.source, group.layers) for group in second.groups] == [(0, (1, 2)), (3, (4, 5))]
    assert second.stored_groups == second.groups
    assert second.attention_layers == (3,)
    assert [(group.source, group.layers, group.stateful) for group in third.groups] == [(5, (6, 7), (7,))]


def test_a_stage_may_hold_no_group_or_no_attention() -> None:
    whole = Topology.from_layer_types([A, A, L, L])
    attention, linear = whole.stages([(0, 2), (2, 4)])
    assert attention.groups == ()
    assert linear.attention_layers == ()
    assert [(group.source, group.layers) for group in linear.groups] == [(1, (2, 3))]


def test_receptive_fields_of_a_cut_group_are_those_of_its_parts() -> None:
    whole = Topology.from_layer_types([A, C, C, L], 3)
    assert [group.receptive_field for group in whole.groups] == [None]
    fields = [[group.receptive_field for group in stage.groups] for stage in whole.stages([(0, 2), (2, 3), (3, 4)])]
    assert fields == [[3], [3], [None]]


def test_stages_of_a_stage_keep_the_models_indices() -> None:
    stage = Topology.from_layer_types([L, A, L, L, A, L]).stage(2, 6)
    assert stage.stage(3, 6) == Topology.from_layer_types([L, A, L, L, A, L]).stage(3, 6)


@pytest.mark.parametrize("spans", [[], [(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 0), (0, 4)], [(0, 5)]])
def test_spans_that_do_not_divide_the_model_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="layers"):
        Topology.from_layer_types([L, A, L, A]).stages(spans)


def test_all_types_can_be_cut() -> None:
    whole = Topology.from_layer_types([A, *KIND_OF_TYPE])
    assert len(whole.stages([(i, i + 1) for i in range(len(whole.kinds))])) == len(whole.kinds)
