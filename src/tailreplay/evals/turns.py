"""Conversations: each turn is a hit on all before it, answers as they were generated included."""

from __future__ import annotations

from typing import Any

from tailreplay.engines.transformers import HybridLM
from tailreplay.engines.transformers.generation import Generation
from tailreplay.evals.document import Document
from tailreplay.evals.measure import contained, first_line
from tailreplay.evals.methods import Method
from tailreplay.evals.prefix import whole_hit
from tailreplay.modes import parse_reuse


class Talker:
    """Holds conversations with one model, under each method by itself.

    Pages that a turn computes after an approximate hit are approximate, and the next turn hits them: errors add up as they
    would in use. Starts other than the paper's are left out: they are built from one document's states.
    """

    def __init__(self, lm: HybridLM, methods: list[Method]) -> None:
        self.lm = lm
        self.methods = [method for method in methods if not (method.wiped or method.start)]

    def measure(self, document: Document) -> list[dict[str, Any]]:
        """Return one record a turn; see `tailreplay.evals.records`."""
        self.lm.cache.clear()
        turns = [
            {"matched": 0, "turn": turn, "tails": {}, "state_error": {}, "probes": [{"evidence": None, "results": {}}]}
            for turn in range(len(document.turns))
        ]
        for method in self.methods:
            for turn, (score, answer, matched, tail) in enumerate(self._talk(document, method)):
                record: dict[str, Any] = turns[turn]
                record["matched"] = max(record["matched"], matched)
                if method.reuse:
                    record["tails"][method.name] = tail
                record["probes"][0]["results"][method.name] = {
                    "score": score,
                    "nll": None,
                    "first_nll": None,
                    "tokens": 0,
                    "answer": answer,
                }
        return turns

    def _talk(self, document: Document, method: Method) -> list[tuple[float, str, int, int]]:
        """Score, answer, reused tokens and replayed tokens of each turn."""
        lm = self.lm
        reuse = method.reuse or parse_reuse("off")
        namespace = lm.namespace(salt=method.name)
        ids = list(document.ids)
        if method.reuse:
            # The document has been read before, exactly. Each method has pages of its own, as its own turns follow.
            lm.generate(ids, max_new_tokens=1, replay="off", salt=method.name)
        found, cut_off = [], False
        for turn in document.turns:
            # The last token of an answer that was cut off was never computed.
            known = len(ids) - cut_off
            ids += turn.query
            sampling = lm.sampling(max_new_tokens=turn.longest, temperature=0.0, stop=["\n"])
            # Not through `generate`, which never stores what follows zero states: here the next turn is to hit it.
            result = Generation(lm, ids, reuse, namespace, sampling, bool(method.reuse), None).finish()
            if method.reuse:
                whole_hit(result.reuse.matched, known, result.reuse.miss_reason or result.reuse.stop)
            score = contained(turn.answers, result.text)
            found.append((score, first_line(result.text), result.reuse.matched, result.reuse.replayed))
            # The last token ended the line, or the answer.
            cut_off = result.finish_reason != "stop"
            ids += result.tokens if cut_off else result.tokens[:-1]
        return found
