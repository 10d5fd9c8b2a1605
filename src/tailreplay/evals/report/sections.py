"""Which tables a report shows, and in which order: tasks that tell one replay from another come first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from tailreplay.evals.cells import Cell, Split
from tailreplay.evals.methods import FULL, label, ordered
from tailreplay.evals.report.grids import (
    NOTHING,
    Grid,
    Section,
    filled,
    number,
    percent,
    percent_interval,
    plus_minus,
    signed,
)
from tailreplay.evals.rows import PLAIN_TEXT
from tailreplay.evals.summary import LayerErrors, Summary

_TASKS_ABREAST = 5
T = TypeVar("T")


def sections_of(summary: Summary) -> list[Section]:
    """Return the sections that have data."""
    sections = [
        _overall(summary),
        _tasks(summary),
        _plain_text(summary),
        _tails(summary),
        _turns(summary),
        _states(summary),
        _boundary(summary),
    ]
    return [section for section in sections if section.grids]


def _overall(summary: Summary) -> Section:
    over = next((row.nll_gap_over for row in summary.rows if row.nll_gap_over), PLAIN_TEXT)
    rows = [
        (
            label(row.method),
            plus_minus(row.score, 3),
            percent_interval(row.retention),
            percent_interval(row.nll_gap_closed),
            str(row.n or row.n_nll),
        )
        for row in summary.rows
    ]
    headings = ("method", "score", "of full prefill's", f"NLL gap closed ({over})", "probes")
    return Section(
        "What a hit keeps",
        "Over tasks that fail without the linear states; every task and length weighs the same. The NLL gap closed is 100% "
        "for full prefill and 0% for zero states. ± and brackets are 95% intervals by document; one without width means "
        "that all documents agreed, not that the result is certain.",
        _grid("By method", headings, rows),
    )


def _tasks(summary: Summary) -> Section:
    return Section(
        "Tasks that need the linear states",
        "Score, and in brackets the share of full prefill's.",
        _scores_by_length([cell for cell in summary.cells if cell.discriminates]),
    )


def _plain_text(summary: Summary) -> Section:
    cells = [cell for cell in summary.cells if cell.first_nll is not None]
    headings = ("method", "first 8 tokens", "all tokens", "gap closed")
    grids = [
        grid
        for title, group in _grouped(cells, lambda cell: f"{cell.title}, {cell.length:,} tokens")
        for grid in _grid(title, headings, [_plain_text_row(cell) for cell in group])
    ]
    return Section(
        "Plain text",
        "Nats per token of the text's true continuation: of full prefill, and by how much more other methods need. The "
        "first tokens stand apart because a wrong state has had the least time to mend there.",
        tuple(grids),
    )


def _plain_text_row(cell: Cell) -> tuple[str, ...]:
    if cell.method == FULL:
        return label(cell.method), number(cell.first_nll, 3), number(cell.nll, 3), NOTHING
    gaps = (signed(estimate.value, 3) for estimate in (cell.first_nll_over_full, cell.nll_over_full))
    return label(cell.method), *gaps, percent_interval(cell.nll_gap_closed)


def _tails(summary: Summary) -> Section:
    cells = [cell for cell in summary.cells if cell.discriminates and cell.inside.n + cell.outside.n]
    headings = ("method", "replayed tokens", "fact inside the tail", "probes", "fact before the tail", "probes")
    grids = [
        grid
        for title, group in _grouped(cells, _length_title)
        for grid in _grid(title, headings, [_tail_row(method, cells) for method, cells in _by_method(group)])
    ]
    return Section(
        "Facts inside and before the replayed tail",
        "Score of probes all of whose needed facts are replayed, and of the others; in brackets what full prefill "
        "scores at the same probes.",
        tuple(grids),
    )


def _tail_row(method: str, cells: Sequence[Cell]) -> tuple[str, ...]:
    tails = [cell.tail for cell in cells if cell.tail is not None]
    splits = [_pooled([cell.inside for cell in cells]), _pooled([cell.outside for cell in cells])]
    columns = (text for split in splits for text in (_with_full(split), str(split.n)))
    return label(method), number(sum(tails) / len(tails), 0), *columns


def _pooled(splits: Sequence[Split]) -> Split:
    measured = [(split.n, split.score, split.full) for split in splits if split.score is not None]
    n = sum(count for count, _, _ in measured)
    if not n:
        return Split(0, None, None)
    score = sum(count * score for count, score, _ in measured) / n
    fulls = [count * full for count, _, full in measured if full is not None]
    return Split(n, score, sum(fulls) / n if len(fulls) == len(measured) else None)


def _with_full(split: Split) -> str:
    return number(split.score) if split.full is None else f"{number(split.score)} ({number(split.full)})"


def _turns(summary: Summary) -> Section:
    grids: list[Grid] = []
    for title, group in _grouped(summary.turns, lambda turn: f"{turn.title}, {turn.length:,} tokens"):
        methods = ordered(turn.method for turn in group)
        scores = {(turn.turn, turn.method): plus_minus(turn.score) for turn in group}
        rows = [
            (str(turn + 1), *(scores.get((turn, method), NOTHING) for method in methods))
            for turn in sorted({turn.turn for turn in group})
        ]
        grids += _grid(title, ("turn", *map(label, methods)), rows)
    return Section(
        "Conversations by turn",
        "Score at each turn: a hit on all before it, answers as the method wrote them included.",
        tuple(grids),
    )


def _states(summary: Summary) -> Section:
    grids = [
        grid
        for title, group in _grouped(summary.state_error, _length_title)
        for grid in _grid(title, ("linear layer", *(label(errors.method) for errors in group)), _layer_rows(group))
    ]
    return Section(
        "State error by layer",
        "Distance of the states after a hit from those of full prefill, over the size of the latter: 0 is the same "
        "state, 1 is as far off as no state. Means over hits.",
        tuple(grids),
    )


def _layer_rows(group: Sequence[LayerErrors]) -> list[tuple[str, ...]]:
    columns = zip_longest(*(errors.errors for errors in group))
    return [(str(layer), *(number(error, 3) for error in errors)) for layer, errors in enumerate(columns)]


def _boundary(summary: Summary) -> Section:
    rows = [
        (
            label(row.method),
            plus_minus(row.score_boundary, 3),
            percent_interval(row.retention_boundary),
            str(row.n_boundary),
        )
        for row in summary.rows
        if row.n_boundary
    ]
    return Section(
        "Retrieval at a clean boundary: says nothing about r",
        "Zero states are expected to pass these tasks: the model reads the whole question itself, and its attention layers "
        "find the answer. They show that reuse keeps the attention layers' part, not that the replay is long enough.",
        (
            *_grid("By method", ("method", "score", "of full prefill's", "probes"), rows),
            *_scores_by_length([cell for cell in summary.cells if not cell.discriminates]),
        ),
    )


def _scores_by_length(cells: Iterable[Cell]) -> tuple[Grid, ...]:
    """Return methods by tasks for each length; many tasks are dealt out to several tables, for narrow screens."""
    grids: list[Grid] = []
    for title, group in _grouped([cell for cell in cells if cell.score.value is not None], _length_title):
        tasks = list(dict.fromkeys(cell.task for cell in group))
        for start in range(0, len(tasks), _TASKS_ABREAST):
            grids += _score_grid(title, group, tasks[start : start + _TASKS_ABREAST])
    return tuple(grids)


def _score_grid(title: str, group: Sequence[Cell], tasks: Sequence[str]) -> tuple[Grid, ...]:
    titles = {cell.task: cell.title for cell in group}
    texts = {(cell.method, cell.task): _score_text(cell) for cell in group}
    rows = [
        (label(method), *(texts.get((method, task), NOTHING) for task in tasks))
        for method in ordered(cell.method for cell in group)
    ]
    return _grid(title, ("method", *(titles[task] for task in tasks)), rows)


def _score_text(cell: Cell) -> str:
    score = plus_minus(cell.score)
    return score if cell.method == FULL else f"{score} ({percent(cell.retention.value, 0)})"


def _length_title(item: Cell | LayerErrors) -> str:
    return f"{item.length:,} tokens"


def _by_method(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    return [(method, [cell for cell in cells if cell.method == method]) for method in ordered(c.method for c in cells)]


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _grid(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> tuple[Grid, ...]:
    """Return the table, or none if it would say nothing."""
    kept = filled(rows)
    return (Grid(title, headings, kept),) if kept else ()
