"""Asks every question of a document under every method, in batches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.generation import end_tokens
from tailreplay.evals.branches import Branches, KeysValues
from tailreplay.evals.document import Document, Probe
from tailreplay.evals.mean_state import calibration_text, mean_state
from tailreplay.evals.methods import FULL, Method
from tailreplay.evals.prefix import Boundary, Prefix, squared_errors, state_errors

WORST = 100.0
"""Most nats that one token counts as."""
FIRST = 8
"""Tokens of a continuation that are reported beside the whole."""


@dataclass(frozen=True)
class Row:
    """A question under a method."""

    method: str
    probe: int


class Asker:
    """Measures documents of one model.

    Parameters
    ----------
    lm : HybridLM
        With a tokenizer.
    methods : list of Method
    batch_bytes : int
        Room for the rows that run together: keys, values, states and logits.
    """

    def __init__(self, lm: HybridLM, methods: list[Method], batch_bytes: int = 512 * 2**20) -> None:
        self.lm = lm
        self.methods = methods
        self._batch_bytes = batch_bytes
        self._ends = end_tokens(lm.model)

    @property
    def _compares_starts(self) -> bool:
        return any(method.start for method in self.methods)

    @cached_property
    def _mean_state(self) -> compat.DynamicCache:
        return mean_state(self.lm, self.lm.tokenizer.encode(calibration_text(), add_special_tokens=False))

    def measure(self, document: Document) -> list[dict[str, Any]]:
        """Return one record a hit; see `tailreplay.evals.records`."""
        prefix = Prefix(self.lm, document, [method.start for method in self.methods if method.start])
        return [self._hit(prefix, boundary) for boundary in prefix.boundaries()]

    def _hit(self, prefix: Prefix, boundary: Boundary) -> dict[str, Any]:
        restored, tails, kv = self._restored(prefix, boundary)
        probes = boundary.hit.probes
        results: list[dict[str, Any]] = [{} for _ in probes]
        # What full prefill, the first of the methods, expects after each probe's query: starts are compared with it.
        expected: dict[int, torch.Tensor] | None = {} if self._compares_starts else None
        for wiped in (False, True):
            names = [method.name for method in self.methods if method.wiped == wiped]
            held = [(keys[:0], values[:0]) for keys, values in kv] if wiped else kv
            for rows in self._batches(names, probes, boundary.hit.matched):
                for row, result in zip(rows, self._ask(rows, probes, boundary, restored, held, expected), strict=True):
                    results[row.probe][row.method] = result
        return {
            "matched": boundary.hit.matched,
            "turn": None,
            "tails": tails,
            "state_error": {
                method.name: state_errors(self.lm, restored[method.name], boundary.states)
                for method in self.methods
                if method.rebuilds
            },
            **(self._heads(boundary, restored) if self._compares_starts else {}),
            "probes": [
                {"evidence": probe.evidence, "results": result} for probe, result in zip(probes, results, strict=True)
            ],
        }

    def _heads(self, boundary: Boundary, restored: dict[str, compat.DynamicCache]) -> dict[str, Any]:
        """What comparing starts needs beside: squared error of every head, operations, and where the anchors lay."""
        backbone, matched = self.lm.backbone, boundary.hit.matched
        empty = compat.new_cache(backbone.config)
        starts = {method.name: method.start for method in self.methods if method.start}
        return {
            "anchors": {name: start.anchor_of(matched) for name, start in starts.items() if start.anchored},
            "head_norm": _short(squared_errors(self.lm, empty, boundary.states)),
            "head_error": {
                method.name: _short(squared_errors(self.lm, restored[method.name], boundary.states))
                for method in self.methods
                if method.rebuilds
            },
        }

    def _restored(
        self, prefix: Prefix, boundary: Boundary
    ) -> tuple[dict[str, compat.DynamicCache], dict[str, int], KeysValues]:
        """States and tails by method, and the keys and values, which are the same bytes for all: one copy is kept."""
        states, tails, kv = {}, {}, None
        for method in self.methods:
            if method.reuse is None:
                states[method.name] = boundary.states
                continue
            states[method.name], tails[method.name], loaded = prefix.restore(boundary, method.reuse)
            kv = kv or loaded
        assert kv is not None, "zero is always among the methods"
        for method in self.methods:
            if method.start:
                mean = self._mean_state if method.start.uses_mean else None
                states[method.name] = prefix.start(boundary, method.start, kv, mean)
                tails[method.name] = method.start.longest(boundary.hit.matched)
        return states, tails, kv

    def _batches(self, methods: list[str], probes: tuple[Probe, ...], matched: int) -> Iterator[list[Row]]:
        """Rows of equal lengths, as many as there is room for: recurrent layers know no padding."""
        together: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for index, probe in enumerate(probes):
            together[len(probe.query), len(probe.reference)] += [Row(method, index) for method in methods]
        backbone = self.lm.backbone
        held = matched * backbone.layout.kv_bytes_per_token + int(backbone.costs.state_bytes)
        for (_, reference), rows in together.items():
            # Logits are there in the model's dtype and in float32.
            logits = 6 * backbone.config.vocab_size * (reference + 1)
            most = max(1, self._batch_bytes // (held + logits))
            for start in range(0, len(rows), most):
                yield rows[start : start + most]

    def _ask(
        self,
        rows: list[Row],
        probes: tuple[Probe, ...],
        boundary: Boundary,
        restored: dict[str, compat.DynamicCache],
        kv: KeysValues,
        expected: dict[int, torch.Tensor] | None,
    ) -> list[dict[str, Any]]:
        """Score rows: the reference's NLL, then a greedy answer where that does not already follow from it."""
        asked = [probes[row.probe] for row in rows]
        query = torch.tensor([probe.query for probe in asked])
        reference = torch.tensor([probe.reference for probe in asked])
        count = reference.shape[1]

        def branches(chosen: list[int], room: int) -> Branches:
            states = [restored[rows[index].method] for index in chosen]
            return Branches(self.lm.backbone, kv, states, boundary.hit.matched, room)

        everyone = list(range(len(rows)))
        read = torch.cat([query, reference], 1)
        logits = branches(everyone, read.shape[1]).run(read, count + 1)
        nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), reference.to(logits.device), reduction="none").cpu()
        likeliest = logits.argmax(-1).cpu()
        # Where the reference and then its end are the likeliest at each token, greedy decoding would write them.
        right = [
            self._ends_word(following) and tuple(written) == probe.reference
            for probe, (*written, following) in zip(asked, likeliest.tolist(), strict=True)
        ]
        answers = [self._text(probe.reference) for probe in asked]
        wrong = [index for index in everyone if asked[index].answers and not right[index]]
        if wrong:
            longest = asked[0].longest
            texts = self._greedy(branches(wrong, query.shape[1] + longest), query[wrong], longest)
            for index, text in zip(wrong, texts, strict=True):
                answers[index] = text
        found = [_result(*one) for one in zip(asked, answers, nll, strict=True)]
        if expected is not None:
            for row, probe, result, own in zip(rows, asked, found, logits, strict=True):
                if not probe.answers:
                    result |= _divergence(expected, row, own[:-1].log_softmax(-1))
        return found

    def _greedy(self, branches: Branches, query: torch.Tensor, longest: int) -> list[str]:
        found = branches.greedy(query, longest, ended(self._text, self._ends))
        return [self._text(tokens) for tokens in found]

    def _ends_word(self, token: int) -> bool:
        return token in self._ends or re.match(r"\w", self._text([token])) is None

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.lm.tokenizer.decode([token for token in tokens if token not in self._ends])
        return text


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _result(probe: Probe, answer: str, losses: torch.Tensor) -> dict[str, Any]:
    generated = bool(probe.answers)
    # A method that breaks the model is to be seen in the means, not left out of them.
    losses = losses.nan_to_num(nan=WORST, posinf=WORST).clamp(max=WORST)
    return {
        "score": contained(probe.answers, answer) if generated else None,
        "nll": round(float(losses.mean()), 5),
        "first_nll": None if generated else round(float(losses[:FIRST].mean()), 5),
        "tokens": len(probe.reference),
        "answer": first_line(answer) if generated else None,
    }


def _divergence(expected: dict[int, torch.Tensor], row: Row, own: torch.Tensor) -> dict[str, float]:
    """Return KL(full prefill || method), nats a token, as means over the reference and its first tokens.

    Far less noisy than a difference of losses, which a wrong state may lower by luck.

    Parameters
    ----------
    expected : dict
        Full prefill's log probabilities by probe, ``(n, vocabulary)``. Mutated where `row` is full prefill's.
    own : torch.Tensor
        The row's, of the same shape.
    """
    if row.method == FULL:
        expected[row.probe] = own
    full = expected[row.probe]
    losses = F.kl_div(own, full, reduction="none", log_target=True).sum(-1).nan_to_num(nan=WORST, posinf=WORST)
    return {"kl": float(f"{losses.mean():.5g}"), "first_kl": float(f"{losses[:FIRST].mean():.5g}")}


def ended(decode: Callable[[list[int]], str], ends: frozenset[int]) -> Callable[[list[int]], bool]:
    """Return what says that an answer is over: an end token, or a line's end after some text."""

    def done(tokens: list[int]) -> bool:
        return tokens[-1] in ends or "\n" in decode(tokens).lstrip()

    return done


def first_line(text: str) -> str:
    """Return the first line with something in it, without the space around it."""
    return text.strip().split("\n")[0].strip()


def contained(answers: tuple[str, ...], text: str) -> float:
    """Return the share of `answers` that stand in the text's first line as whole words."""
    line = first_line(text)
    return sum(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", line) is not None for answer in answers) / len(answers)
