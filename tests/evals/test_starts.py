"""Tails that start otherwise than in the paper: exact where they must be, and what was meant where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tailreplay.engines.transformers import compat
from tailreplay.errors import InvalidRequestError
from tailreplay.evals.document import Document
from tailreplay.evals.mean_state import calibration_text, mean_state, mix
from tailreplay.evals.measure import Asker
from tailreplay.evals.methods import label, ordered, parse_method, parse_methods
from tailreplay.evals.prefix import Prefix
from tailreplay.evals.start_rules import Anchor, Start, parse_start
from tailreplay.evals.trail import Trail, log_decay, stateful_layers
from tailreplay.evals.turns import Talker
from tailreplay.naive import gated_delta_rule
from tests.evals.conftest import Bench

EXACT = ["carried@0.25/75%", "blended@0.25/75%", "mixed@0.25/75%", "recompute@1", "anchored/256"]
NAMES = [*EXACT, "carried@0.05/256", "mean@0.05", "replay@0.25", "recompute@0.25"]
CLOSE = 1e-3


@pytest.fixture(scope="module")
def hits(bench: Bench) -> list[dict[str, Any]]:
    """Two hits of plain text under every start, and one inside a question."""
    asker = Asker(bench.lm, parse_methods(NAMES))
    prose, question = bench.document("prose"), bench.document("mid_question")
    return [
        *asker.measure(Document(prose.ids, prose.hits[2:9:6])),
        *asker.measure(Document(question.ids, question.hits[:1])),
    ]


@pytest.mark.parametrize("name", EXACT)
def test_a_start_that_is_exact_gives_full_prefill(hits: list[dict[str, Any]], name: str) -> None:
    for hit in hits:
        assert all(error < CLOSE for error in hit["state_error"][name])
        for probe in hit["probes"]:
            full, found = probe["results"]["full"], probe["results"][name]
            assert found["answer"] == full["answer"]
            assert found["nll"] == pytest.approx(full["nll"], abs=2e-3)
            assert found.get("kl", 0.0) < 1e-4


def test_tails_and_anchors_are_where_they_should_be(hits: list[dict[str, Any]]) -> None:
    for hit in hits:
        m, tails, anchors = hit["matched"], hit["tails"], hit["anchors"]
        assert tails["carried@0.25/75%"] == tails["replay@0.25"] == -(-m // 4)
        assert anchors["carried@0.25/75%"] == m - tails["replay@0.25"]
        assert anchors["carried@0.05/256"] == (m - tails["carried@0.05/256"]) // 256 * 256
        assert anchors["anchored/256"] == m // 256 * 256 == m - tails["anchored/256"]
        assert "recompute@0.25" not in anchors


def test_the_start_decides_what_a_short_tail_leaves(hits: list[dict[str, Any]]) -> None:
    text = [hit for hit in hits if "kl" in hit["probes"][0]["results"]["zero"]]
    assert len(text) == 2
    for hit in text:
        divergence = {name: result["kl"] for name, result in hit["probes"][0]["results"].items()}
        assert divergence["full"] < 1e-6 < divergence["replay@0.25"] < divergence["zero"]
        assert divergence["mean@0.05"] < divergence["zero"]
        # Without hiddens, from zero states too: another engine path, as good.
        assert divergence["recompute@0.25"] == pytest.approx(divergence["replay@0.25"], rel=0.5)


def test_heads_add_up_to_the_states_errors(bench: Bench, hits: list[dict[str, Any]]) -> None:
    heads = bench.lm.model.config.linear_num_value_heads
    for hit in hits:
        norms = np.array(hit["head_norm"]).reshape(-1, heads).sum(1)
        for name, errors in hit["state_error"].items():
            squared = np.array(hit["head_error"][name]).reshape(-1, heads).sum(1)
            assert np.sqrt(squared / norms) == pytest.approx(errors, abs=2e-3)


@torch.inference_mode()
def test_the_mean_state_is_the_mean_of_states_and_mixed_lies_halfway(bench: Bench) -> None:
    lm, ids = bench.lm, list(bench.document("prose").ids[:192])
    backbone = lm.backbone
    mean = mean_state(lm, ids, every=64, first=128)
    once, twice = backbone.new_cache(192), backbone.new_cache(192)
    backbone.forward(ids[:128], 0, once, None)
    backbone.forward(ids, 0, twice, None)
    layers = stateful_layers(backbone)
    for layer in layers:
        for found, *two in zip(*(compat.states(cache, layer) for cache in (mean, once, twice)), strict=True):
            assert found.numpy() == pytest.approx((two[0] + two[1]).numpy() / 2, abs=1e-3)
    halfway = [(compat.states(once, i)[1] + compat.states(mean, i)[1]) / 2 for i in layers]
    mix(backbone, once, mean)
    for layer, wanted in zip(layers, halfway, strict=True):
        assert compat.states(once, layer)[1].numpy() == pytest.approx(wanted.numpy(), abs=1e-6)


def test_the_calibration_text_is_in_no_task(bench: Bench) -> None:
    sentences = [line.strip() for line in calibration_text().split(". ") if len(line) > 60]
    known = " ".join(bench.measurer._material.paragraphs)
    assert len(sentences) > 30
    assert not [sentence for sentence in sentences if sentence in known]


@pytest.fixture
def forgetting(bench: Bench) -> Iterator[torch.nn.Module]:
    """The first linear layer's mixer, which writes nothing: its keys are zero, so its state only decays."""
    layer = stateful_layers(bench.lm.backbone)[0]
    mixer = bench.lm.backbone.family.mixer(bench.lm.backbone.layers[layer])
    before = mixer.in_proj_qkv.weight.clone()
    yield mixer
    with torch.no_grad():
        mixer.in_proj_qkv.weight.copy_(before)


@torch.inference_mode()
def test_decayed_states_are_what_the_model_itself_would_have_forgotten(
    bench: Bench, forgetting: torch.nn.Module
) -> None:
    backbone, ids = bench.lm.backbone, list(bench.document("prose").ids[:160])
    layer, past = stateful_layers(backbone)[0], backbone.new_cache(160)
    trail = Trail(backbone, [64], gates=True)
    inputs: list[torch.Tensor] = []
    with trail.watching():
        backbone.forward(ids[:64], 0, past, None)
        trail.passed(64, past)
        hook = forgetting.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args or [kwargs["hidden_states"]])[0]), with_kwargs=True
        )
        forgetting.in_proj_qkv.weight.zero_()
        compat.states(past, layer)[0].zero_()  # keys of before, too
        backbone.forward(ids[64:], 64, past, None)
        hook.remove()
    decayed, blended = backbone.new_cache(1), backbone.new_cache(1)
    trail.put(64, decayed)
    trail.put(64, blended)
    trail.decay(blended, 64, 160, towards=decayed)
    assert compat.states(blended, layer)[1].numpy() == pytest.approx(compat.states(decayed, layer)[1].numpy(), abs=1e-5)
    start = compat.states(decayed, layer)[1].clone()
    trail.decay(decayed, 64, 160)
    found = compat.states(decayed, layer)[1]
    assert float(found.norm()) < 0.9 * float(start.norm())
    assert found.numpy() == pytest.approx(compat.states(past, layer)[1].numpy(), abs=1e-5)
    log = log_decay(forgetting, inputs[0])[0].double().numpy()
    nothing = np.zeros((96, log.shape[1], start.shape[-1]))
    naive = gated_delta_rule(nothing, nothing, log, np.zeros_like(log), start[0].double().numpy())
    assert found[0].numpy() == pytest.approx(naive, abs=1e-5)


def test_a_model_without_such_gates_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = bench.lm.backbone
    monkeypatch.setattr(backbone.family.__class__, "mixer", lambda *_: torch.nn.Linear(1, 1))
    with pytest.raises(InvalidRequestError, match="leave it out"):
        Trail(backbone, [64], gates=True)


def test_an_anchor_inside_a_branch_is_the_branch_s(bench: Bench) -> None:
    """The last anchor may lie in a question that the document does not hold."""
    document = bench.document("mid_question")
    hit = document.hits[0]
    assert hit.extra
    start = Start("carried", 1e-6, Anchor(hit.matched - 2))
    prefix = Prefix(bench.lm, Document(document.ids, (hit,)), [start])
    (boundary,) = prefix.boundaries()
    assert start.anchor_of(hit.matched) > hit.at
    whole = Start("anchored", 1.0, Anchor(hit.matched - 2))
    rebuilt = prefix.start(boundary, whole, [])
    for layer in stateful_layers(bench.lm.backbone):
        found, true = (compat.states(states, layer)[1] for states in (rebuilt, boundary.states))
        assert float((found - true).norm()) < CLOSE * float(true.norm())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("carried@0.05", Start("carried", 0.05, Anchor(128))),
        ("decayed@0.1/256", Start("decayed", 0.1, Anchor(256))),
        ("recompute@0.05", Start("recompute", 0.05, Anchor(128))),
        ("anchored/90%", Start("anchored", 1.0, Anchor(0, 0.9))),
        ("replay@0.05", None),
        ("carried", None),
        ("anchored@0.5", None),
        ("recompute@0.5/256", None),
        ("mean@0.1", Start("mean", 0.1, Anchor(128))),
        ("mean@0.1/256", None),
        ("carried@0.05/", None),
    ],
)
def test_names_say_how_a_tail_starts(name: str, expected: Start | None) -> None:
    assert parse_start(name, interval=128) == expected


@pytest.mark.parametrize("name", ["carried@1.5", "carried@0.05/0", "decayed@0.05/101%", "anchored/-5"])
def test_impossible_starts_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_method(name)


def test_conversations_leave_other_starts_out(bench: Bench) -> None:
    talker = Talker(bench.lm, parse_methods(["carried@0.05", "replay@0.05"]))
    assert [method.name for method in talker.methods] == ["full", "zero", "replay@0.05"]


def test_starts_stand_between_replay_and_zero() -> None:
    assert ordered(["zero", "anchored/512", "carried@0.05", "kv-wiped", "replay@0.05", "full"]) == (
        "full",
        "replay@0.05",
        "anchored/512",
        "carried@0.05",
        "zero",
        "kv-wiped",
    )
    assert label("carried@0.05") == "carried@0.05"
