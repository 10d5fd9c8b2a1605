"""Ten turns after an approximate hit: what each policy of reusing approximate pages keeps and costs, turn by turn."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from tailreplay.errors import InvalidRequestError
from tailreplay.modes import Reuse, parse_reuse

if TYPE_CHECKING:
    import torch

    from tailreplay.engines.transformers import HybridLM
    from tailreplay.evals.material import Material

_BEYOND = 150
"""Tokens that the first request has read beyond where conversations leave it: no anchor lies just there."""


@dataclass(frozen=True)
class Policy:
    """A way to hold a conversation.

    Attributes
    ----------
    reuse : Reuse
        Of every turn.
    repair : bool
        Whether the pages of each turn are computed again exactly before the next.
    """

    name: str
    reuse: Reuse
    repair: bool = False


def policies(ratio: float) -> list[Policy]:
    """Return the policies that are compared; "off" is what the others are compared with."""

    def replayed(start: str, approximate: str | int) -> Reuse:
        return parse_reuse("replay", ratio, start=start, reuse_approximate=approximate)

    return [
        Policy("off", parse_reuse("off")),
        *(Policy(f"zero, {which}", replayed("zero", which)) for which in ("always", 1, 3, "never")),
        *(Policy(f"carried, {which}", replayed("carried", which)) for which in ("always", "never")),
        *(Policy(f"mixed, {which}", replayed("mixed", which)) for which in ("always", "never")),
        Policy("mixed, always, repair", replayed("mixed", "always"), repair=True),
        Policy("exact", parse_reuse("exact")),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder or 'bundled'")
    parser.add_argument("--length", type=int, default=1000, help="tokens of the prefix that conversations leave")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96, help="of each turn, question and answer together")
    parser.add_argument("--documents", type=int, default=6, help="conversations")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--chunk", type=int, default=512, help="prefill chunk: anchors lie at chunks' ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    # What follows a turn's first token is compared with its second.
    for name, least in (("length", 1), ("turns", 1), ("tokens", 2), ("documents", 1), ("chunk", 1)):
        if getattr(arguments, name) < least:
            raise InvalidRequestError(f"--{name} must be at least {least}, got {getattr(arguments, name)}.")
    from tailreplay.bench.lengths import check_fits
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM
    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.evals.material import python_topics

    chosen = policies(arguments.ratio)
    quiet_library()
    lm = HybridLM.from_pretrained(
        arguments.model, cache=PrefixCache("1GiB"), dtype="float32", prefill_chunk=arguments.chunk
    )
    check_fits(lm, arguments.length + max(_BEYOND + 1, arguments.turns * arguments.tokens))
    lm.make_mean_state()
    rows: list[dict[str, Any]] = []
    for index in range(arguments.documents):
        rows += _conversation(lm, chosen, _texts(lm, python_topics(), arguments, index), arguments)
    if arguments.json:
        print(json.dumps(rows))
    else:
        _print(rows, chosen, arguments)
    return 0


def _texts(lm: HybridLM, material: Material, arguments: argparse.Namespace, index: int) -> tuple[list[int], list[int]]:
    """Tokens that the first request reads, and those of a conversation that leaves them after `length` tokens."""
    rng = random.Random(f"{arguments.seed}/{index}")
    known = _encoded(lm, material.passage(rng), arguments.length + _BEYOND)
    talk = _encoded(lm, material.passage(rng), arguments.turns * arguments.tokens)
    return known, [*known[: arguments.length], *talk]


def _encoded(lm: HybridLM, paragraphs: Iterator[str], count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids += lm.tokenizer.encode(next(paragraphs) + "\n", add_special_tokens=False)
    return ids[:count]


def _conversation(
    lm: HybridLM, chosen: list[Policy], texts: tuple[list[int], list[int]], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Hold one conversation under every policy, with the same words; yield a row a turn."""
    known, talk = texts
    true: list[torch.Tensor] = []
    for policy in chosen:
        lm.cache.clear()
        lm.generate(known, max_new_tokens=1, replay="off", salt=policy.name)
        for turn in range(arguments.turns):
            end = arguments.length + (turn + 1) * arguments.tokens
            logits, row = _turn(lm, policy, talk[:end], arguments.tokens)
            if policy.reuse.mode == "off":
                true.append(logits)
            yield {"policy": policy.name, "turn": turn + 1, **row, **_distance(logits, true[turn], talk[:end])}


def _turn(lm: HybridLM, policy: Policy, ids: list[int], keep: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute a turn as a request would; return the logits after its last tokens, and what was reused."""
    from tailreplay.engines.transformers.results import Timings

    namespace = lm.namespace(policy.name)
    with lm.lock:
        sequence, plan = lm.begin(ids, policy.reuse, namespace, len(ids), True, Timings())
        sequence.wait_loaded()
        lm.cache.release(plan)
        start = plan.matched
        while len(ids) - start > keep:
            stop = min(start + lm.prefill_chunk, len(ids) - keep)
            sequence.extend(ids[start:stop])
            sequence.save_states()
            start = stop
        logits = sequence.extend_last(ids[start:], len(ids) - start)
        sequence.finish()
    if policy.repair and plan.provenance.depth:
        lm.repairs.note(namespace, ids, plan.matched)
        lm.repair()
    row = {"computed": len(ids) - plan.matched, "replayed": plan.replayed, "depth": plan.provenance.depth}
    return logits, {**row, "exact": plan.exact, "start": str(plan.start)}


def _distance(logits: torch.Tensor, true: torch.Tensor, ids: list[int]) -> dict[str, float]:
    """Compare what follows each of a turn's tokens with the truth: divergence, and the text's own NLL."""
    import torch
    import torch.nn.functional as F

    count = min(len(logits), len(true)) - 1
    got, want = (F.log_softmax(each[-1 - count : -1].double(), -1) for each in (logits, true))
    target = torch.tensor(ids[-count:])[:, None]
    return {
        "kl": float((want.exp() * (want - got)).sum(-1).mean()),
        "nll_gap": float((want.gather(1, target) - got.gather(1, target)).mean()),
        "same_top": float((got.argmax(-1) == want.argmax(-1)).double().mean()),
    }


def _print(rows: list[dict[str, Any]], chosen: list[Policy], arguments: argparse.Namespace) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    out = console()
    shown = sorted({1, 2, 3, arguments.turns // 2, arguments.turns} & set(range(1, arguments.turns + 1)))
    table = Table(title=f"{arguments.turns} turns after leaving a known text at token {arguments.length}")
    for name in (
        "policy",
        *(f"KL, turn {turn}" for turn in shown),
        "same token",
        "depth at the end",
        "computed",
        "replayed",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy in chosen:
        mine = [row for row in rows if row["policy"] == policy.name]
        table.add_row(
            policy.name,
            *(f"{mean(row['kl'] for row in mine if row['turn'] == turn):.5f}" for turn in shown),
            f"{100 * mean(row['same_top'] for row in mine):.2f}%",
            f"{mean(row['depth'] for row in mine if row['turn'] == arguments.turns):.1f}",
            *(f"{sum(row[name] for row in mine) / arguments.documents:,.0f}" for name in ("computed", "replayed")),
        )
    out.print(table)
    out.print(
        "KL: of the next token from full prefill's, nats, mean over a turn. Computed and replayed: tokens of a whole "
        "conversation; repair computes more while nobody waits."
    )
