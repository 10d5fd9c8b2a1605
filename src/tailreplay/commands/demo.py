"""`tailreplay demo`: a long document, several questions, every mode side by side."""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailreplay.engines.transformers import GenerationResult, HybridLM

METHODS: dict[str, Any] = {"full": "off", "zero": "zero", "replay 5%": 0.05, "exact": "exact"}
_NAMES = ("apple", "river", "garden", "stone", "window", "bridge", "forest", "candle", "mirror", "ladder", "anchor")
_FILLER = (
    "The path goes along the water and past the old mill. ",
    "In the morning the shop opens and people come to buy bread. ",
    "She reads a book by the window while it rains. ",
    "He looks at the map and then at the sky. ",
)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="tailreplay demo",
        description="Ask several questions about one long document: without reuse, with zero states, replayed and exact.",
    )
    parser.add_argument("model", nargs="?", default="bundled", help="hub id, folder, or 'bundled'")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the document")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="where to draw the picture")
    parser.add_argument("--host-bytes", default="1GiB")
    parser.add_argument("--device", help="cpu, cuda, …")
    return parser


@dataclass
class Tally:
    """Outcomes of one method."""

    new: int = 0
    again: int = 0
    seconds: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    from rich.progress import Progress

    from tailreplay.engines.transformers.quiet import quiet_library
    from tailreplay.errors import InvalidRequestError

    if not 1 <= arguments.questions <= len(_NAMES):
        raise InvalidRequestError(f"The demo asks 1 to {len(_NAMES)} questions, got {arguments.questions}.")
    _check_picture(arguments.out)
    quiet_library()
    from tailreplay.cache import PrefixCache
    from tailreplay.engines.transformers import HybridLM

    lm = HybridLM.from_pretrained(arguments.model, cache=PrefixCache(arguments.host_bytes), device=arguments.device)
    document, facts = make_document(lm, arguments.tokens, arguments.seed)
    questions = list(facts.items())[: arguments.questions]
    tallies = {method: Tally() for method in METHODS}
    with Progress(transient=True) as progress:
        bar = progress.add_task("asking", total=len(questions) * (2 * len(METHODS) + 1) + 1)
        lm.generate(document, max_new_tokens=1, replay="off")
        progress.advance(bar)
        prompts = [
            (f"{document}\nQuestion: What is the special magic number for {name}?\nAnswer: ", answer)
            for name, answer in questions
        ]
        for again in (False, True):
            for prompt, answer in prompts:
                if again:
                    lm.generate(prompt, max_new_tokens=1, replay="off")
                    progress.advance(bar)
                for method, tally in tallies.items():
                    result = lm.generate(prompt, max_new_tokens=8, stop=["\n"], replay=METHODS[method], store=False)
                    _count(tally, result, answer, again)
                    progress.advance(bar)
    _print(lm, document, tallies, len(questions))
    _draw(tallies, len(questions), arguments.out)
    return 0


def make_document(lm: HybridLM, tokens: int, seed: int) -> tuple[str, dict[str, str]]:
    """Return a document of about `tokens` tokens and the facts hidden in it, by name."""
    from tailreplay.errors import InvalidRequestError

    rng = random.Random(seed)
    facts = {name: str(rng.randrange(10000, 99999)) for name in rng.sample(_NAMES, len(_NAMES))}
    sentences = [f"The special magic number for {name} is {number}. " for name, number in facts.items()]
    shortest = len(lm.encode("".join(sentences)))
    if tokens < 2 * shortest:
        raise InvalidRequestError(f"The document needs at least {2 * shortest} tokens, got {tokens}.")
    per_filler = statistics.mean(len(lm.encode(text)) for text in _FILLER)
    fillers = [rng.choice(_FILLER) for _ in range(int((tokens - shortest) / per_filler))]
    for sentence in sentences:
        fillers.insert(rng.randrange(len(fillers) + 1), sentence)
    return "".join(fillers).rstrip(), facts


def _count(tally: Tally, result: GenerationResult, answer: str, again: bool) -> None:
    right = result.text.strip().startswith(answer)
    if again:
        tally.again += right
    else:
        tally.new += right
        tally.seconds.append(result.timings.first_token)
        tally.reused.append(result.reuse.matched)
        tally.replayed.append(result.reuse.replayed)


def _print(lm: HybridLM, document: str, tallies: dict[str, Tally], questions: int) -> None:
    from rich.table import Table

    from tailreplay.commands.console import console

    table = Table(title=f"{questions} questions about a document of {len(lm.encode(document))} tokens")
    headings = ("method", "first token", "speed-up", "reused", "replayed", "right: new question", "right: asked again")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    full = statistics.median(tallies["full"].seconds)
    for method, tally in tallies.items():
        seconds = statistics.median(tally.seconds)
        table.add_row(
            method,
            f"{seconds * 1000:.0f} ms",
            f"{full / seconds:.1f}x",
            f"{statistics.median(tally.reused):.0f}",
            f"{statistics.median(tally.replayed):.0f}",
            f"{tally.new}/{questions}",
            f"{tally.again}/{questions}",
        )
    console().print(table)
    console().print(
        "A new question comes after the cached document, so the model reads all of the question itself. Asked again, only\n"
        "its last token is left to read and the states must hold the rest: reuse without replay (zero) fails there.\n"
        "'full' and 'exact' have the states of a full prefill; 'replay' approximates them."
    )


def _check_picture(path: Path) -> None:
    """Refuse now what could not be written after the run."""
    from tailreplay.errors import InvalidRequestError

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidRequestError(f"The picture must be a .png, .svg or .pdf file, got '{path}'.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise InvalidRequestError(f"The picture cannot be written to '{path}': {error}") from error


def _draw(tallies: dict[str, Tally], questions: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = list(tallies)
    bars = left.bar(names, [statistics.median(t.seconds) * 1000 for t in tallies.values()], color="#4477aa")
    left.bar_label(bars, fmt="%.0f")
    left.set_ylabel("time to first token, ms (median)")
    width = 0.4
    places = range(len(names))
    right.bar(
        [x - width / 2 for x in places], [t.new for t in tallies.values()], width, label="new question", color="#66ccee"
    )
    right.bar(
        [x + width / 2 for x in places],
        [t.again for t in tallies.values()],
        width,
        label="asked again",
        color="#ee6677",
    )
    right.set_xticks(list(places), names)
    right.set_ylim(0, questions * 1.25)
    right.set_ylabel(f"right answers of {questions}")
    right.legend()
    figure.suptitle("One long document, several questions")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")
