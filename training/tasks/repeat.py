"""Copying: a passage again, after something else."""

from __future__ import annotations

from training.tasks.base import Draw, Kind, Script


def repeat(script: Script, draw: Draw, characters: int) -> None:
    """A passage, filler, ``Repeat the first passage:`` and the passage."""
    size = draw.random.randint(80, max(100, min(700, characters * 2 // 5)))
    if draw.random.random() < 0.5:
        passage = draw.text(size)[:size].split("<|endoftext|>")[0].replace("\n", " ").strip()
    else:
        passage = " ".join(draw.words(max(4, size // 7)))
    script.line()
    script.add(passage)
    room = characters - 2 * len(passage) - 40
    if room > 60 and draw.random.random() < 0.7:
        script.add("\n" + " ".join(draw.filler(int(room * (1 if draw.last_only else draw.random.random())))), Kind.TEXT)
    # The first word is given away: it says nothing about memory.
    first, _, rest = passage.partition(" ")
    script.ask(f"Repeat the first passage: {first}", f" {rest}")
