"""Our forward pass is the library's, and a cut takes away what it says."""

from __future__ import annotations

import pytest
import torch
from training.initial import dt_bias_of, initialise
from training.model import Cut, Hybrid, library_model
from training.settings import Settings, load_settings
from transformers import DynamicCache

from tailreplay.topology import Topology


def ids_of(model: Hybrid, tokens: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(2, model.config.vocab_size, (2, tokens))


def test_logits_are_the_librarys(model: Hybrid) -> None:
    ids = ids_of(model, 90)
    with torch.no_grad():
        theirs = model.model(ids, use_cache=False).logits.flatten(0, 1)
        ours = model.logits(ids)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_logits_of_the_real_size_are_the_librarys() -> None:
    settings = load_settings().model
    library = library_model(settings)
    initialise(library, settings, 0)
    model = Hybrid(library)
    ids = ids_of(model, 70)
    with torch.no_grad():
        theirs = library(ids, use_cache=False).logits.flatten(0, 1)
        assert (model.logits(ids) - theirs).abs().max() < 1e-4 * theirs.abs().max()
        rounded = Hybrid(library, torch.bfloat16).logits(ids)
        rounded_theirs = library.bfloat16()(ids, use_cache=False).logits.flatten(0, 1).float()
    assert (rounded - theirs).norm() < 1.1 * (rounded_theirs - theirs).norm()


def test_gradients_are_the_librarys(model: Hybrid) -> None:
    ids = ids_of(model, 40)
    weights = torch.randn(80, model.config.vocab_size)
    (model.model(ids, use_cache=False).logits.flatten(0, 1) * weights).sum().backward()
    theirs = {name: p.grad.clone() for name, p in model.parameters.items()}
    model.model.zero_grad()
    (model.logits(ids) * weights).sum().backward()
    for name, p in model.parameters.items():
        assert (p.grad - theirs[name]).norm() < 1e-4 * theirs[name].norm() + 1e-6, name


def test_a_part_of_the_logits_can_be_asked_for(model: Hybrid) -> None:
    ids = ids_of(model, 20)
    chosen = torch.tensor([3, 25])
    torch.testing.assert_close(model.logits(ids, chosen), model.logits(ids)[chosen])


@torch.no_grad()
def test_zero_states_are_those_of_a_cache_whose_states_are_zero(model: Hybrid) -> None:
    ids, at = ids_of(model, 60), 40
    cache = DynamicCache(config=model.config)
    model.model(ids[:, :at], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
            for state in states.values() if isinstance(states, dict) else states or ():
                state.zero_()
    theirs = model.model(ids[:, at:], past_key_values=cache, use_cache=True).logits
    ours = model.logits(ids, cut=Cut(at, states=True)).view(2, 60, -1)[:, at:]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("states", "kv"), [(True, False), (False, True)])
def test_either_cut_leaves_the_other_way(model: Hybrid, states: bool, kv: bool) -> None:
    ids, other = ids_of(model, 50), ids_of(model, 50)
    other[:, :30] = ids_of(model, 30, seed=1)
    cut = Cut(30, states, kv)
    ours, theirs = (model.logits(x, cut=cut).view(2, 50, -1)[:, 30:] for x in (ids, other))
    assert (ours - theirs).norm() > 1e-3 * ours.norm()
    whole = model.logits(ids).view(2, 50, -1)
    assert (ours - whole[:, 30:]).norm() > 1e-3 * ours.norm()


@torch.no_grad()
def test_both_cuts_leave_nothing(model: Hybrid) -> None:
    ids, other = ids_of(model, 50), ids_of(model, 50)
    other[:, :30] = ids_of(model, 30, seed=1)
    cut = Cut(30, states=True, kv=True)
    ours, theirs = (model.logits(x, cut=cut).view(2, 50, -1)[:, 30:] for x in (ids, other))
    torch.testing.assert_close(ours, theirs)


def test_the_bundled_sizes_store_hiddens_of_three_groups_and_fit() -> None:
    model = library_model(load_settings().model)
    topology = Topology.from_layer_types(model.config.layer_types)
    assert len(topology.stored_groups) >= 3
    assert len(topology.attention_layers) >= 4
    assert sum(p.numel() for p in model.parameters()) * 2 < 20e6


def test_horizons_are_spread_and_the_same_for_the_same_seed(tiny: Settings) -> None:
    def biases(seed: int) -> torch.Tensor:
        library = library_model(tiny.model)
        initialise(library, tiny.model, seed)
        layers = [layer.linear_attn for layer in library.model.layers if hasattr(layer, "linear_attn")]
        return torch.cat([layer.dt_bias.detach() for layer in layers])

    horizons = 1 / torch.nn.functional.softplus(biases(0))
    assert horizons.min() < 2 * tiny.model.horizon_min
    assert horizons.max() > tiny.model.horizon_max / 2
    assert torch.equal(biases(0), biases(0))
    assert not torch.equal(biases(0), biases(1))
    torch.testing.assert_close(1 / torch.nn.functional.softplus(dt_bias_of(200.0)), torch.tensor(200.0))
