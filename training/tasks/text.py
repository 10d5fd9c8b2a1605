"""Plain text: as much English as there is room for."""

from __future__ import annotations

from training.tasks.base import Draw, Kind, Script


def text(script: Script, draw: Draw, characters: int) -> None:
    """Running text of the corpus; now and then made-up sentences."""
    if draw.random.random() < 0.06:
        script.add(" ".join(draw.filler(characters)), Kind.TEXT)
    else:
        script.add(draw.text(characters), Kind.TEXT)
