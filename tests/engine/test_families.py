"""Every family: states and logits after a hit against those of a plain prefill."""

from __future__ import annotations

import math

import pytest
import torch

from tailreplay import HybridLM, PrefixCache
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.storage import Storage
from tests.engine.tiny_models import CONFIGS, random_ids, relative, tiny_model

TOLERANCE = 1e-4
PREFIXES = (1, 2, 3, 5, 63, 64, 65, 130, 203)
QUERY = 9
IDS = random_ids(203 + QUERY)


@pytest.fixture(scope="module", params=CONFIGS)
def lm(request: pytest.FixtureRequest) -> HybridLM:
    """A model of each family whose cache holds `IDS`, captured once in one pass."""
    model = HybridLM(tiny_model(request.param), cache=PrefixCache("64MiB", storage=Storage(anchor_bytes=0)))
    prefill(model, IDS)
    return model


def prefill(lm: HybridLM, ids: list[int], chunk: int = 2048, store: bool = True) -> tuple[Sequence, torch.Tensor]:
    """Compute `ids` without reuse."""
    sequence = Sequence(lm.backbone, lm.cache, lm.namespace(), len(ids), store)
    plan = lm.cache.lookup(ids, lm.namespace(), Reuse("off", None), lm.backbone.topology)
    sequence.restore(plan, ids)
    for start in range(0, len(ids), chunk):
        logits = sequence.extend(ids[start : start + chunk])
    sequence.finish()
    return sequence, logits


def hit(lm: HybridLM, ids: list[int], reuse: Reuse, matched: int, salt: str = "") -> Sequence:
    """Restore a prefix of `ids`, which must match `matched` tokens."""
    plan = lm.cache.lookup(ids, lm.namespace(salt), reuse, lm.backbone.topology, lm.backbone.costs)
    assert plan.matched == matched
    sequence = Sequence(lm.backbone, lm.cache, lm.namespace(), len(ids), store=False)
    sequence.restore(plan, ids)
    lm.cache.release(plan)
    return sequence


def state_errors(lm: HybridLM, sequence: Sequence, expected: Sequence) -> list[float]:
    """Relative error of each convolution and recurrent state; a state that only one of the two has is an error."""
    errors = []
    for group in lm.backbone.topology.groups:
        for layer in group.stateful:
            for got, want in zip(compat.states(sequence.past, layer), compat.states(expected.past, layer), strict=True):
                assert (got is None) == (want is None), f"layer {layer}"
                if got is not None and want is not None:
                    errors.append(relative(got, want))
    assert errors
    return errors


def recurrent_error(lm: HybridLM, sequence: Sequence, expected: Sequence) -> float:
    """Relative error over all recurrent states; a state never written counts as zero."""
    wrong = total = 0.0
    for group in lm.backbone.topology.groups:
        for layer in group.stateful:
            got, want = compat.states(sequence.past, layer)[1], compat.states(expected.past, layer)[1]
            if want is not None:
                got = torch.zeros_like(want) if got is None else got
                wrong += float((got - want).double().norm() ** 2)
                total += float(want.double().norm() ** 2)
    return math.sqrt(wrong / total)


@pytest.mark.parametrize("m", PREFIXES)
def test_full_replay_rebuilds_the_states_of_a_prefill(lm: HybridLM, m: int) -> None:
    expected, _ = prefill(lm, IDS[:m], store=False)
    sequence = hit(lm, IDS[: m + 1], parse_reuse("exact"), m)
    assert max(state_errors(lm, sequence, expected)) < TOLERANCE


@pytest.mark.parametrize("m", PREFIXES)
def test_query_logits_after_an_exact_hit_equal_those_of_a_prefill(lm: HybridLM, m: int) -> None:
    query = random_ids(QUERY, seed=m)
    _, expected = prefill(lm, IDS[:m] + query, store=False)
    sequence = hit(lm, IDS[:m] + query, parse_reuse("exact"), common(IDS, IDS[:m] + query))
    assert relative(sequence.extend((IDS[:m] + query)[len(sequence.tokens) :]), expected) < TOLERANCE


@pytest.mark.parametrize("chunk", [QUERY, 4])
def test_logits_of_several_tokens_after_a_hit_are_the_librarys(lm: HybridLM, chunk: int) -> None:
    m = 130
    prompt = IDS[:m] + random_ids(QUERY, seed=m)
    with torch.inference_mode():
        logits = lm.model(torch.tensor([prompt])).logits[0]
    sequence = hit(lm, prompt, parse_reuse("exact"), common(IDS, prompt))
    start = len(sequence.tokens)
    parts = [prompt[at : at + chunk] for at in range(start, len(prompt), chunk)]
    got = [sequence.extend_last(part, len(part)) for part in parts]
    assert relative(torch.cat(got), logits[start:]) < TOLERANCE


def common(a: list[int], b: list[int]) -> int:
    """Reusable tokens of b after a: one must be left to run."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return min(same, len(b) - 1)


def test_chunked_replay_equals_unchunked(lm: HybridLM) -> None:
    plan = lm.cache.lookup(IDS, lm.namespace(), parse_reuse("exact"), lm.backbone.topology)
    whole, parts = (Sequence(lm.backbone, lm.cache, lm.namespace(), len(IDS), store=False) for _ in range(2))
    whole.restore(plan, IDS)
    parts.restore(plan, IDS, chunk=50)
    lm.cache.release(plan)
    assert max(state_errors(lm, parts, whole)) < TOLERANCE


def test_hit_after_hit_stays_exact(lm: HybridLM) -> None:
    """Generated tokens are reused in the next turn, and pages written after an exact hit are exact again."""
    prompt, stored = random_ids(150, seed=7), 0
    for turn in range(3):
        answer = lm.generate(prompt, max_new_tokens=70, replay="exact")
        assert (turn == 0) == (answer.reuse.matched == 0)
        # The last sampled token was never computed.
        if turn:
            assert answer.reuse.matched == stored
            assert answer.reuse.exact
        stored = len(prompt) + len(answer.tokens) - 1
        prompt = [*prompt, *answer.tokens, *random_ids(20, seed=turn)]
    query = hit(lm, prompt, parse_reuse("exact"), stored)
    _, expected = prefill(lm, prompt, store=False)
    assert relative(query.extend(prompt[stored:]), expected) < TOLERANCE


def test_state_error_falls_as_the_ratio_grows(lm: HybridLM) -> None:
    m = 200
    expected, _ = prefill(lm, IDS[:m], store=False)
    ratios = (0.05, 0.25, 0.5, 0.75, 1.0)
    sequences = [hit(lm, IDS[: m + 1], parse_reuse("replay", r, min_tokens=1), m) for r in ratios]
    if lm.backbone.topology.groups[0].receptive_field is not None:
        # Convolutions only: any allowed tail is exact.
        for sequence in sequences:
            assert max(state_errors(lm, sequence, expected)) < TOLERANCE
        return
    errors = [recurrent_error(lm, sequence, expected) for sequence in sequences]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < TOLERANCE


def test_zero_baseline_differs(lm: HybridLM) -> None:
    """Without replay the states are missing and the answer changes: replay does something."""
    m = 200
    query = IDS[m : m + QUERY]
    _, logits = prefill(lm, IDS[:m] + query, store=False)
    zero = hit(lm, IDS[: m + 1], parse_reuse("zero"), m)
    assert relative(zero.extend(query), logits) > 20 * TOLERANCE


def test_replayed_hits_are_told_apart_from_exact_ones(lm: HybridLM) -> None:
    prompt = random_ids(400, seed=11)
    lm.generate(prompt, max_new_tokens=1)
    first = lm.generate([*prompt, *random_ids(80, seed=12)], max_new_tokens=1, replay=0.1)
    assert first.reuse.matched == 400
    finite = all(group.receptive_field for group in lm.backbone.topology.groups)
    assert first.reuse.exact is finite
    # Pages computed after an approximate hit are approximate: exact mode stops before them.
    longer = [*prompt, *random_ids(80, seed=12), 5, 6]
    assert lm.generate(longer, max_new_tokens=1, replay=0.1, store=False).reuse.matched == 480
    again = lm.generate(longer, max_new_tokens=1, replay="exact")
    assert again.reuse.matched == (480 if finite else 400)
    assert again.reuse.exact
    # Their exact recomputation has replaced them.
    assert lm.generate(longer, max_new_tokens=1, replay="exact").reuse.matched == len(longer) - 1


def test_chunked_prefill_equals_one_pass(lm: HybridLM) -> None:
    chunked, logits = prefill(lm, IDS, chunk=37, store=False)
    whole, expected = prefill(lm, IDS, store=False)
    assert relative(logits, expected) < TOLERANCE
    assert max(state_errors(lm, chunked, whole)) < TOLERANCE


def test_capture_does_not_change_the_model(lm: HybridLM) -> None:
    _, logits = prefill(lm, IDS, store=False)
    with torch.inference_mode():
        plain = lm.model(torch.tensor([IDS]), use_cache=False).logits[0, -1]
    assert relative(logits, plain) < TOLERANCE


def test_batch_with_a_common_prefix_stores_exact_continuations(lm: HybridLM) -> None:
    trunk = random_ids(100, seed=21)
    prompts = [[*trunk, *random_ids(size, seed=size)] for size in (5, 9, 70)]
    batch = lm.generate(prompts, max_new_tokens=1, salt="batch", replay="exact")
    assert [result.reuse.shared for result in batch] == [0, 100, 100]
    for prompt in prompts:
        expected, _ = prefill(lm, prompt, store=False)
        sequence = hit(lm, [*prompt, 5], parse_reuse("exact"), len(prompt), salt="batch")
        assert max(state_errors(lm, sequence, expected)) < TOLERANCE
