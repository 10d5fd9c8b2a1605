"""Taps and replay on layers that are called in each of vLLM's ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailreplay import Topology, UnsupportedModelError
from tailreplay.engines.vllm.adapters import ARCHITECTURES, Adapter
from tailreplay.engines.vllm.plugin import TappedModel, install_taps, tapped_model
from tailreplay.engines.vllm.replay import Tail, replay
from tailreplay.provenance import Start
from tests.vllm_plain import fake_layers as fake

L, A, F = "linear_attention", "full_attention", "mlp"
TYPES = [L, L, A, L, L, L, A, A, L]
IDS = list(range(3, 33))
POSITIONS = torch.arange(len(IDS))


@dataclass
class Style:
    """An architecture, the layers that imitate it, and a model of them."""

    architecture: str
    layer: type[fake.Layer]
    types: tuple[str, ...] = tuple(TYPES)
    multiplier: float | None = None

    @property
    def adapter(self) -> Adapter:
        return ARCHITECTURES[self.architecture].adapter

    @property
    def topology(self) -> Topology:
        return Topology.from_layer_types(self.types)


STYLES = {
    "qwen": Style("Qwen3_5ForCausalLM", fake.Qwen),
    "kimi": Style("KimiLinearForCausalLM", fake.Kimi),
    "kimi-amd": Style("KimiLinearForCausalLM", fake.KimiAmd),
    "granite": Style("GraniteMoeHybridForCausalLM", fake.Granite, multiplier=3.0),
    "olmo": Style("OlmoHybridForCausalLM", fake.Olmo),
    "nemotron": Style("NemotronHForCausalLM", fake.Nemotron, (F, L, F, F, L, F, A, F, L, A, F, L, F, L, F, F)),
}


class Stage:
    """One pipeline stage with taps, after a forward of `IDS`."""

    def __init__(self, style: Style, layers: list[fake.Layer], start: int, stop: int) -> None:
        self.decoder = fake.Decoder(layers, start, stop, style.multiplier)
        self.layers = layers
        install_taps(self.decoder, self.decoder, style.adapter, style.topology, len(IDS) + 5)
        self.model = tapped_model()
        assert self.model.decoder is self.decoder

    def forward(self, carried: fake.Carried | None) -> fake.Carried:
        if carried is None:
            carried = self.decoder.first_input(torch.tensor(IDS)), None
        # What a stage is sent is in tensors of its own.
        return self.decoder(POSITIONS, tuple(None if t is None else t.clone() for t in carried))


def run(style: Style, spans: list[tuple[int, int]]) -> list[Stage]:
    torch.manual_seed(0)
    layers = [style.layer(kind) for kind in style.types]
    stages = [Stage(style, layers, start, stop) for start, stop in spans]
    carried = None
    with torch.no_grad():
        for stage in stages:
            carried = stage.forward(carried)
    return stages


@contextmanager
def running(*_: Any) -> Iterator[None]:
    yield


def replay_all(model: TappedModel, first: int = 0, *, parts: tuple[int, ...] = (len(IDS),)) -> None:
    """Replay tokens from `first` on, in parts, from what the taps hold."""
    load = SimpleNamespace(
        matched=len(IDS), tail=len(IDS) - first, tail_ids=IDS[first:], states={}, anchor=-1, start=Start.ZERO
    )
    taps = [tap.clone() for tap in model.taps]
    done = 0
    for count in parts:
        tail = Tail(load, done, count)  # type: ignore[arg-type]
        states: Any = SimpleNamespace(running=running)
        replay(model, states, [tail], lambda _, g, start, stop: taps[g][start:stop].clone(), torch.device("cpu"))
        done += count


@pytest.mark.parametrize("name", STYLES)
def test_taps_hold_the_inputs_of_each_groups_first_layer(name: str) -> None:
    (stage,) = run(STYLES[name], [(0, len(STYLES[name].types))])
    groups = stage.model.topology.stored_groups
    assert len(groups) == len(stage.model.taps) == 2
    for group, tap in zip(groups, stage.model.taps, strict=True):
        assert torch.equal(tap[: len(IDS)], stage.layers[group.layers[0]].inputs)
        assert tap[len(IDS) :].isnan().all()


@pytest.mark.parametrize("name", STYLES)
def test_a_whole_replay_gives_mixers_what_a_forward_gives_them(name: str) -> None:
    style = STYLES[name]
    (stage,) = run(style, [(0, len(style.types))])
    taps = [tap.clone() for tap in stage.model.taps]
    replay_all(stage.model)
    for layer in stage.layers:
        if layer.kind == L:
            forward, replayed = layer.seen
            assert torch.allclose(forward, replayed, atol=1e-5)
        elif layer.kind == A:
            assert len(layer.seen) == 1  # never replayed
    # Replay must not be taken for a forward.
    for before, after in zip(taps, stage.model.taps, strict=True):
        assert torch.equal(before.nan_to_num(7), after.nan_to_num(7))


@pytest.mark.parametrize("name", STYLES)
def test_feed_forward_after_a_groups_last_mixer_is_not_replayed(name: str) -> None:
    style = STYLES[name]
    (stage,) = run(style, [(0, len(style.types))])
    for group in stage.model.topology.groups:
        last = stage.layers[group.layers[-1]]
        last.mlp.register_forward_hook(lambda *_: pytest.fail("ran the feed-forward part of the last layer"))
        for index in range(group.layers[-1] + 1, len(style.types)):
            if style.types[index] != F:
                break
            stage.layers[index].register_forward_hook(lambda *_: pytest.fail("ran a layer after the last mixer"))
    replay_all(stage.model)


@pytest.mark.parametrize("name", STYLES)
def test_every_way_to_cut_a_model_in_two(name: str) -> None:
    style = STYLES[name]
    for border in range(1, len(style.types)):
        stages = run(style, [(0, border), (border, len(style.types))])
        for stage in stages:
            for group, tap in zip(stage.model.topology.stored_groups, stage.model.taps, strict=True):
                assert torch.allclose(tap[: len(IDS)], stage.layers[group.layers[0]].inputs, atol=1e-6)
            replay_all(stage.model)
        for layer in stages[0].layers:
            if layer.kind == L:
                forward, replayed = layer.seen
                assert torch.allclose(forward, replayed, atol=1e-5)


def test_a_tail_begins_where_it_begins() -> None:
    (stage,) = run(STYLES["granite"], [(0, len(TYPES))])
    replay_all(stage.model, 20, parts=(4, 6))
    for index in (0, 3, 8):  # a group's first layer sees the same inputs, whatever went before
        forward, one, two = stage.layers[index].seen
        assert torch.allclose(forward[20:], torch.cat([one, two]), atol=1e-5)


def refused(layer: type[fake.Layer], adapter: Adapter, **attributes: Any) -> str:
    layers = [layer(kind) for kind in TYPES]
    for each in layers:
        for name, value in attributes.items():
            setattr(each, name, value)
    decoder = fake.Decoder(layers, 0, len(TYPES), None)
    with pytest.raises(UnsupportedModelError) as error:
        install_taps(decoder, decoder, adapter, Topology.from_layer_types(TYPES), 8)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_would_make_replay_wrong_is_refused() -> None:
    qwen, kimi = STYLES["qwen"].adapter, STYLES["kimi"].adapter
    assert "sequence parallelism" in refused(fake.Qwen, qwen, use_attn_reduce_scatter_for_moe=True)
    assert "sequence parallelism" in refused(fake.Kimi, kimi, use_sequence_parallel=True)
    assert "attn_res_block_size" in refused(fake.Kimi, kimi, use_attn_res=True)
    assert "attn_res_block_size" in refused(fake.KimiAmd, kimi, use_attn_residuals=True)
    assert "lacks 'input_layernorm' or 'linear_attn'" in refused(fake.Granite, qwen)
    assert "other arguments" in refused(fake.Olmo, qwen)
    assert "other arguments" in refused(fake.Qwen, STYLES["olmo"].adapter)
    narrow = fake.Norm()
    narrow.weight = torch.nn.Parameter(torch.ones(4))
    assert "of width 4, the config says 8" in refused(fake.Qwen, qwen, input_layernorm=narrow)


def test_the_tap_survives_compilation() -> None:
    buffer = torch.zeros(6, fake.WIDTH)
    tap = torch.compile(torch.ops.tailreplay.tap, backend="aot_eager", fullgraph=True)
    hidden, residual = torch.randn(4, fake.WIDTH), torch.randn(4, fake.WIDTH)
    tap(hidden, residual, buffer)
    assert torch.equal(buffer[:4], hidden + residual)
    tap(hidden, None, buffer)
    assert torch.equal(buffer[:4], hidden)
    assert not buffer[4:].any()
