"""The run's log: a JSON object a line, and a picture of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE, PICTURE = "log.jsonl", "training.png"


class Journal:
    """Appends to a log. After a resumption, what lay behind the checkpoint is taken off first.

    Parameters
    ----------
    folder : Path
    step : int
        The run goes on from here: later entries are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / FILE
        if self.path.exists():
            kept = [entry for entry in read(self.path) if entry["step"] <= step]
            self.path.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one entry."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, **values}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all entries; a last line that was cut off is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def draw(folder: Path) -> Path:
    """Draw the log: losses and accuracies of training, and accuracies of evaluation. Returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = read(folder / FILE)
    train = [entry for entry in entries if entry["event"] == "train"]
    tests = [entry for entry in entries if entry["event"] == "evaluation"]
    figure, (losses, learning, testing) = pyplot.subplots(1, 3, figsize=(17, 5))
    for name in ("text", "answer"):
        points = [(e["tokens"] / 1e6, e[f"{name}_nll"]) for e in train if e[f"{name}_nll"] is not None]
        losses.plot(*_columns(_smooth(points)), label=name)
    losses.set(title="loss in training", xlabel="million tokens", ylabel="nats a token", yscale="log")
    for task in sorted({task for entry in train for task in entry["tasks"]}):
        points = [(e["tokens"] / 1e6, e["tasks"][task][0]) for e in train if task in e["tasks"]]
        learning.plot(*_columns(_smooth(points)), label=task)
    learning.set(title="answer tokens right in training", xlabel="million tokens", ylim=(0, 1.02))
    for cell in sorted({cell for entry in tests for cell in entry["cells"] if "exact" in entry["cells"][cell]}):
        points = [(e["tokens"] / 1e6, e["cells"][cell]["exact"]) for e in tests if cell in e["cells"]]
        testing.plot(*_columns(points), marker=".", label=cell)
    testing.set(title="exact answers, held out", xlabel="million tokens", ylim=(0, 1.02))
    starts = {entry["stage"]: entry["tokens"] / 1e6 for entry in reversed(train)}
    for axes in (losses, learning, testing):
        for at in starts.values():
            axes.axvline(at, color="0.85", zorder=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6, ncols=2)
    figure.tight_layout()
    path = folder / PICTURE
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _smooth(points: list[tuple[float, float]], share: float = 0.3) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for x, y in points:
        out.append((x, y if not out else out[-1][1] + share * (y - out[-1][1])))
    return out
