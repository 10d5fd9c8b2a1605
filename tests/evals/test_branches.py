"""Rows that run together give what each gives by itself, for every family."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tailreplay import HybridLM, PrefixCache
from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.results import Timings
from tailreplay.evals.branches import Branches
from tailreplay.evals.document import Document, Hit, Probe
from tailreplay.evals.methods import DEFAULT, Method, parse_method, parse_methods
from tailreplay.evals.prefix import Boundary, Prefix, state_errors
from tailreplay.modes import parse_reuse
from tailreplay.storage import Storage
from tests.engine.tiny_models import CONFIGS, random_ids, relative, tiny_model

TOLERANCE = 1e-4
IDS = tuple(random_ids(230))
EXTRA = tuple(random_ids(9, seed=3))
ZERO = parse_reuse("zero")
# Seeds with which no choice between experts is so close that the order of sums decides it.
QUERIES = torch.tensor([random_ids(7, seed=15), random_ids(7, seed=16)])
DOCUMENT = Document(
    IDS,
    tuple(
        Hit(at, (Probe((1, 2), (3,)),), extra)
        for at, extra in ((64, ()), (101, ()), (101, EXTRA), (230, ()), (230, EXTRA))
    ),
)


@pytest.fixture(scope="module", params=CONFIGS)
def lm(request: pytest.FixtureRequest) -> HybridLM:
    return HybridLM(tiny_model(request.param), cache=PrefixCache("64MiB", storage=Storage(anchor_bytes=0)))


@pytest.fixture(scope="module")
def boundaries(lm: HybridLM) -> tuple[Prefix, list[Boundary]]:
    prefix = Prefix(lm, DOCUMENT)
    return prefix, prefix.boundaries()


def alone(lm: HybridLM, ids: list[int], query: list[int], method: Method) -> torch.Tensor:
    """Logits after the query, through the engine's own path for one request."""
    reuse = method.reuse or parse_reuse("off")
    sequence, plan = lm.begin([*ids, *query], reuse, lm.namespace(), len(ids) + 9, False, Timings())
    try:
        if method.reuse is None:
            # In the same pieces: another order of sums may flip a choice between experts, here of random weights.
            for start, stop in pairwise([0, *sorted({hit.at for hit in DOCUMENT.hits if hit.at < len(ids)}), len(ids)]):
                sequence.extend(ids[start:stop])
        return sequence.extend(query)
    finally:
        lm.cache.release(plan)


@pytest.mark.parametrize("place", range(len(DOCUMENT.hits)))
def test_each_row_equals_its_request_alone(lm: HybridLM, boundaries: tuple[Prefix, list[Boundary]], place: int) -> None:
    prefix, found = boundaries
    boundary = found[place]
    methods = [parse_method(name) for name in ("full", "zero", "replay@0.05", "replay@0.5", "replay@1")]
    restored = [
        boundary.states if method.reuse is None else prefix.restore(boundary, method.reuse)[0] for method in methods
    ]
    kv = prefix.restore(boundary, ZERO)[2]
    rows = [(one, query) for one in range(len(methods)) for query in range(len(QUERIES))]
    branches = Branches(lm.backbone, kv, [restored[one] for one, _ in rows], boundary.hit.matched, QUERIES.shape[1] + 1)
    logits = branches.run(torch.stack([QUERIES[query] for _, query in rows]), 1)[:, -1]
    for row, (one, query) in enumerate(rows):
        expected = alone(lm, boundary.ids, QUERIES[query].tolist(), methods[one])
        assert relative(logits[row], expected) < TOLERANCE, (methods[one].name, query)


def test_errors_fall_as_the_tail_grows_and_end_at_nothing(
    lm: HybridLM, boundaries: tuple[Prefix, list[Boundary]]
) -> None:
    prefix, found = boundaries
    boundary = found[-1]
    errors = {}
    for method in parse_methods(DEFAULT):
        states = boundary.states if method.reuse is None else prefix.restore(boundary, method.reuse)[0]
        errors[method.name] = [e for e in state_errors(lm, states, boundary.states) if e is not None]
    if lm.model.config.model_type == "lfm2":
        assert not any(errors.values())  # convolutions alone
        return
    mean = {name: sum(values) / len(values) for name, values in errors.items()}
    assert mean["full"] == 0.0
    assert mean["zero"] == 1.0
    assert mean["replay@1"] < TOLERANCE
    assert mean["replay@0.01"] >= mean["replay@0.1"] >= mean["replay@0.5"] > mean["replay@1"]


def test_rows_decode_greedily_as_one_by_one(lm: HybridLM, boundaries: tuple[Prefix, list[Boundary]]) -> None:
    prefix, found = boundaries
    restored, _, kv = prefix.restore(found[1], parse_reuse("exact"))

    def decode(rows: torch.Tensor) -> list[list[int]]:
        states = [restored] * len(rows)
        branches = Branches(lm.backbone, kv, states, found[1].hit.matched, 20)
        return branches.greedy(rows, 6, lambda tokens: len(tokens) == 6)

    together = decode(QUERIES)
    assert together == [decode(QUERIES[:1])[0], decode(QUERIES[1:])[0]]
    assert all(len(row) == 6 for row in together)


def test_without_keys_and_values_the_states_and_positions_stay(
    lm: HybridLM, boundaries: tuple[Prefix, list[Boundary]]
) -> None:
    prefix, found = boundaries
    boundary = found[1]
    kv = [(keys[:0], values[:0]) for keys, values in prefix.restore(boundary, ZERO)[2]]
    m, count = boundary.hit.matched, QUERIES.shape[1]
    logits = Branches(lm.backbone, kv, [boundary.states] * 2, m, count).run(QUERIES, count)
    for row in range(2):
        past = lm.backbone.new_cache(count)
        compat.copy_states(boundary.states, past)
        with torch.inference_mode():
            expected = compat.batch_logits(
                lm.model, QUERIES[row : row + 1], lm.backbone.positions(m, m + count), past, count
            )
        assert relative(logits[row], expected[0]) < TOLERANCE
