"""Forget gates of every family that has them: what pages know, and what follows for states that are replayed."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tailreplay import Adaptive, HybridLM, PrefixCache, Storage
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.engines.transformers.calibration import calibrate, measure
from tailreplay.engines.transformers.gates import gated_layers, head_shares
from tailreplay.engines.transformers.horizons import measure_horizons
from tailreplay.engines.transformers.replay import replay
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.errors import InvalidRequestError
from tailreplay.forgetting import Calibration, tail_errors
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.naive import forget_gates
from tailreplay.page import Page
from tailreplay.plan import ReplayPlan
from tests.engine.test_families import hit, prefill, state_errors
from tests.engine.tiny_models import CONFIGS, random_ids, tiny_model
from tests.tiers.memory_tier import MemoryTier

GATED = [name for name in CONFIGS if name != "lfm2"]
EXPERTS = ("qwen3_5_moe", "qwen3_next", "kimi_linear", "granitemoehybrid", "nemotron_h")
MAMBA = ("granitemoehybrid", "nemotron_h", "bamba")
PAGE = 64
# With more prompts a slow test: see the Makefile.
PROMPTS = int(os.environ.get("TAILREPLAY_PROMPTS", "2"))


@cache
def slow_model(name: str) -> PreTrainedModel:
    """A tiny model that forgets slowly. KDA's ``A_log`` has four dimensions, so `tiny_model` takes it for a matrix."""
    model = tiny_model(name)
    if name == "kimi_linear":
        model = copy.deepcopy(model)
        torch.manual_seed(0)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.data.uniform_(0.001, 0.05).log_()
    return model


def fresh(name: str) -> HybridLM:
    return HybridLM(slow_model(name), cache=PrefixCache("32MiB"))


@pytest.fixture(params=GATED)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def pages_of(lm: HybridLM, ids: list[int]) -> tuple[Page, ...]:
    """Pages that hold `ids`, all of which the cache must have."""
    plan = lm.cache.lookup([*ids, 5], lm.namespace(), parse_reuse("replay"), lm.backbone.topology)
    lm.cache.release(plan)
    assert plan.matched == len(ids)
    return plan.pages


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = tensor.detach().double().numpy()
    return found


def oracle(name: str, mixer: Any, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log alpha of a mixer's inputs ``(n, d_model)`` in float64, from its weights: ``(n, heads)``."""
    if name == "kimi_linear":
        gate = mixer.forget_gate
        step = inputs @ numpy_of(gate.f_a_proj.weight).T @ numpy_of(gate.f_b_proj.weight).T
        heads = gate.num_heads
        rate = numpy_of(gate.A_log).reshape(heads, 1)
        logs = forget_gates(step.reshape(len(step), heads, -1), rate, numpy_of(gate.dt_bias).reshape(heads, -1))
        return logs.max(-1)
    limits = (0.0, np.inf)
    if name in MAMBA:
        step = inputs @ numpy_of(mixer.in_proj.weight).T[:, -mixer.num_heads :]
        limits = mixer.time_step_limit
    elif name == "qwen3_next":
        # Of each key head: b of its value heads, then a of its value heads.
        both = inputs @ numpy_of(mixer.in_proj_ba.weight).T
        step = both.reshape(len(both), mixer.num_k_heads, 2, -1)[:, :, 1].reshape(len(both), -1)
    else:
        projection = mixer.a_proj if name == "olmo_hybrid" else mixer.in_proj_a
        step = inputs @ numpy_of(projection.weight).T
    return forget_gates(step, numpy_of(mixer.A_log), numpy_of(mixer.dt_bias), limits)


def test_pages_know_the_sums_of_the_oracle(name: str) -> None:
    lm, ids = fresh(name), random_ids(3 * PAGE + 20)
    layers = gated_layers(lm.backbone.topology)
    mixers = [lm.backbone.family.mixer(lm.backbone.layers[layer]) for layer in layers]
    inputs: list[list[torch.Tensor]] = [[] for _ in mixers]

    def note(row: int) -> Any:
        return lambda module, args, kwargs: inputs[row].append((args[0] if args else kwargs["hidden_states"])[0])

    handles = [mixer.register_forward_pre_hook(note(row), with_kwargs=True) for row, mixer in enumerate(mixers)]
    try:
        sequence, _ = prefill(lm, ids, chunk=100)
    finally:
        for handle in handles:
            handle.remove()
    logs = np.stack([oracle(name, mixer, numpy_of(torch.cat(got))) for mixer, got in zip(mixers, inputs, strict=True)])
    assert logs.shape[1] == len(ids)
    for page in pages_of(lm, ids):
        assert page.gates is not None
        assert page.gates.dtype == np.float16
        expected = logs[:, page.start : page.start + page.tokens].sum(1)
        np.testing.assert_allclose(page.gates[0], expected, rtol=2.5e-3)
        assert (page.gates[0] >= expected - 1e-4).all(), "never more forgotten than there is"
    np.testing.assert_allclose(page.gates[1], head_shares(sequence.past, lm.backbone.topology), atol=1e-3)
    np.testing.assert_allclose(page.gates[1].sum(-1), 1, atol=3e-3)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "bamba"], indirect=True)
def test_tokens_of_an_answer_are_summed_like_those_of_a_prompt(name: str) -> None:
    lm, other = fresh(name), fresh(name)
    prompt = random_ids(PAGE - 10)
    answer = lm.generate(prompt, max_new_tokens=40).tokens
    ids = [*prompt, *answer[:-1]]
    prefill(other, ids)
    for decoded, computed in zip(pages_of(lm, ids), pages_of(other, ids), strict=True):
        assert decoded.gates is not None
        assert computed.gates is not None
        np.testing.assert_allclose(decoded.gates[0], computed.gates[0], rtol=2e-2)


def test_a_page_after_a_hit_knows_what_it_can() -> None:
    """After a hit at a partial page's end all is known; one inside a page leaves out what is reused of it."""
    lm = fresh("qwen3_5")
    ids = random_ids(3 * PAGE)
    whole = fresh("qwen3_5")
    prefill(whole, ids)
    expected = [page.gates for page in pages_of(whole, ids)]
    lm.generate(ids[: PAGE + 21], max_new_tokens=1)
    lm.generate(ids, max_new_tokens=1, replay="exact")
    for page, sums in zip(pages_of(lm, ids), expected, strict=True):
        assert page.gates is not None
        assert sums is not None
        np.testing.assert_allclose(page.gates[0], sums[0], rtol=2e-3)
    branch = [*ids[: PAGE + 10], *random_ids(PAGE, seed=3)]
    lm.generate(branch, max_new_tokens=1, replay="exact")
    second, expected_second = pages_of(lm, branch)[1].gates, expected[1]
    assert second is not None
    assert expected_second is not None
    assert (second[0] < 0).all()
    computed = fresh("qwen3_5")
    prefill(computed, branch)
    full = pages_of(computed, branch)[1].gates
    assert full is not None
    assert (second[0] > full[0]).all(), "never more forgotten than there is"


def test_what_is_only_reused_is_stored_again_with_what_is_known() -> None:
    lm = fresh("qwen3_5")
    ids = random_ids(2 * PAGE)
    prefill(lm, ids)
    plan = lm.cache.lookup(ids[: PAGE + 20], lm.namespace(), parse_reuse("exact"), lm.backbone.topology)
    sequence = Sequence(lm.backbone, lm.cache, lm.namespace(), len(ids))
    sequence.restore(plan, ids)
    sequence.finish()
    lm.cache.release(plan)
    assert lm.cache.stats().pinned == 0


def test_pages_from_tiers_below_know_their_gates() -> None:
    tier, ids = MemoryTier(1 << 24), random_ids(3 * PAGE)
    first, second = (
        HybridLM(tiny_model("qwen3_5"), cache=PrefixCache("16MiB", storage=Storage([tier], deadline=10.0)))
        for _ in range(2)
    )
    prefill(first, ids)
    assert first.cache.flush()
    for above, below in zip(pages_of(first, ids), pages_of(second, ids), strict=True):
        assert above.gates is not None
        assert below.gates is not None
        np.testing.assert_array_equal(below.gates, above.gates)
    tier.close()


def test_a_family_without_gates_stores_none() -> None:
    lm = fresh("lfm2")
    prefill(lm, random_ids(PAGE))
    assert all(page.gates is None for page in pages_of(lm, random_ids(PAGE)))
    with pytest.raises(InvalidRequestError, match="no forget gates"):
        measure_horizons(lm.backbone, random_ids(10))
    with pytest.raises(InvalidRequestError, match="no forget gates"):
        calibrate(lm.backbone, [random_ids(300)])


# ---- the theorem


@torch.inference_mode()
def recorded(
    backbone: Backbone, ids: list[int], stops: list[int]
) -> tuple[list[Any], list[torch.Tensor], torch.Tensor]:
    """Run `ids`; return the caches at `stops`, the hiddens by stored group, and log alpha."""
    run, sink = backbone.gate_run(PAGE), [[] for _ in backbone.topology.stored_groups]
    assert run is not None
    running, caches, start = backbone.new_cache(len(ids)), [], 0
    for stop in stops:
        backbone.forward(ids[start:stop], start, running, sink, 1, run)
        caches.append(backbone.copy_cache(running, stop))
        start = stop
    return caches, [torch.cat(parts)[None] for parts in sink], run.taps.log_alpha(run.raw)


@torch.inference_mode()
def rebuilt(backbone: Backbone, ids: list[int], tail: int, hiddens: list[torch.Tensor]) -> Any:
    states = backbone.new_cache(1)
    tails = [tail] * len(backbone.topology.groups)
    replay(backbone, states, ids, tails, lambda group, start, stop: hiddens[group][:, start:stop])
    return states


def recurrent(states: Any, layer: int) -> torch.Tensor:
    found = compat.states(states, layer)[1]
    assert found is not None
    return found[0].double()


def distances(got: Any, true: Any, layer: int) -> torch.Tensor:
    """Frobenius norm of each head's difference."""
    return (recurrent(got, layer) - recurrent(true, layer)).flatten(1).norm(dim=1)


@pytest.mark.parametrize("tail", [16, 190])
def test_an_error_in_a_first_layer_shrinks_by_its_gates_at_least(name: str, tail: int) -> None:
    backbone, ids, kernel = fresh(name).backbone, random_ids(260, seed=5), 4
    # With its convolution's context complete, the tail computes what a prefill does.
    begin = len(ids) - tail + kernel - 1
    (before, after), hiddens, logs = recorded(backbone, ids, [begin, len(ids)])
    start = rebuilt(backbone, ids[:begin], kernel - 1, hiddens)
    end = rebuilt(backbone, ids, tail, hiddens)
    row = 0
    for group in backbone.topology.groups:
        layer = group.stateful[0]
        wrong = [
            (compat.states(got, layer)[1], compat.states(true, layer)[1])
            for got, true in ((start, before), (end, after))
        ]
        first, last = ((got - true)[0].double().flatten(1).norm(dim=1) for got, true in wrong)
        kept = logs[row, begin:].double().sum(0).exp()
        noise = 1e-6 * float(wrong[1][1].norm())
        assert float(kept.max()) < 1
        assert (last <= kept * first * (1 + 1e-4) + noise).all()
        if name in MAMBA:
            torch.testing.assert_close(last, kept * first, rtol=1e-3, atol=noise)
        row += len(group.stateful)


# ---- the calibrated prediction


ERRORS = (0.9, 0.3, 0.6, 0.1)


@cache
def calibrated(name: str) -> Calibration:
    texts = 16 if PROMPTS >= 10 else 2
    return calibrate(fresh(name).backbone, [random_ids(5 * PAGE, seed=10_000 + seed) for seed in range(texts)])


def hits(name: str, prompts: int) -> Iterator[tuple[float, ReplayPlan]]:
    """Yield (measured error of the worst layer, plan) of adaptive hits on random prompts of five pages or more."""
    lm = fresh(name)
    for seed in range(prompts):
        ids = random_ids(5 * PAGE + seed % PAGE, seed=seed)
        lm.cache.clear()
        expected, _ = prefill(lm, ids)
        budget = Adaptive(ERRORS[seed % len(ERRORS)], most=0.9, calibration=calibrated(name))
        reuse = Reuse("replay", budget)
        sequence = hit(lm, [*ids, 5], reuse, len(ids))
        plan = lm.cache.lookup([*ids, 5], lm.namespace(), reuse, lm.backbone.topology)
        lm.cache.release(plan)
        assert plan.predicted_error is not None
        assert plan.predicted_error <= budget.error or plan.budget_note == "cut"
        # Convolution states, every second, are exact with any tail.
        yield max(state_errors(lm, sequence, expected)[1::2]), plan


def test_measured_state_errors_stay_below_the_predicted_ones(name: str) -> None:
    found = list(hits(name, PROMPTS))
    assert any(plan.replayed < plan.matched for _, plan in found)
    shares = [measured / (plan.predicted_error + 1e-5) for measured, plan in found if plan.predicted_error is not None]
    wrong = [share for share in shares if share > 1]
    assert not wrong, f"{len(wrong)} of {len(found)}: {max(wrong):.2f} times the prediction"
    worst = [measured for measured, _ in found]
    print(f"{name}: {len(found)} hits, errors {min(worst):.3f} to {max(worst):.3f}, ", end="")
    print(f"of the prediction {np.median(shares):.2f} (median) to {max(shares):.2f}; {calibrated(name)}")


@pytest.mark.skipif(PROMPTS < 10, reason="slow: TAILREPLAY_PROMPTS=200 runs it")
def test_every_tails_error_stays_below_the_predicted_one(name: str) -> None:
    """Of any layer, in six tails a prompt. Where a disturbed input goes to another expert, the error jumps: seldom."""
    backbone, shares = fresh(name).backbone, []
    for seed in range(PROMPTS):
        (sample,) = measure(backbone, random_ids(5 * PAGE, seed=seed))
        predicted = tail_errors(sample.forgetting, backbone.topology, calibrated(name))[list(sample.tails)]
        shares.append(float((sample.errors / (predicted + 1e-5)).max()))
    above = sum(share > 1 for share in shares)
    print(f"{name}: at most {max(shares):.2f} of the prediction in any layer, above it in {above} of {PROMPTS} prompts")
    assert above <= (0.05 * PROMPTS if name in EXPERTS else 0)


def test_a_calibration_without_enough_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="more than 128 tokens"):
        calibrate(fresh("qwen3_5").backbone, [random_ids(100)])


# ---- horizons


def test_horizons_follow_from_the_gates(name: str) -> None:
    backbone, ids = fresh(name).backbone, random_ids(200)
    found = measure_horizons(backbone, ids, chunk=70)
    _, _, logs = recorded(backbone, ids, [200])
    np.testing.assert_allclose(found.tokens, -1 / logs.double().mean(1), rtol=1e-4)
    np.testing.assert_allclose(found.shares.sum(-1), 1, rtol=1e-5)
    assert found.layers == tuple(gated_layers(backbone.topology))
    assert found.tokens.min() > 20, "tiny models forget slowly, or they would show nothing"
