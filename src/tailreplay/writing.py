"""Storing a run of tokens: the catalog admits its pages, the arena takes their bytes, the catalog lets them be matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailreplay.catalog import Catalog
from tailreplay.chain import Chain
from tailreplay.decisions import Admission
from tailreplay.keys import TOKEN_BYTES
from tailreplay.page import Page
from tailreplay.provenance import Provenance

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tailreplay.pages import PartSpec
    from tailreplay.tiers.host import HostArena


def admit(tree: Catalog, chain: Chain, ids: bytes, provenance: Provenance, hidden: bool) -> list[Admission]:
    """Admit a page a step, up to the first that is refused; then `chain` is stopped. Under the lock."""
    admitted: list[Admission] = []
    step = tree.page_size * TOKEN_BYTES
    page = chain.page
    for at in range(0, len(ids), step):
        admission = tree.admit(page, chain.namespace, ids[at : at + step], provenance, hidden)
        if admission.page is None:
            chain.stopped = admission.reason
            break
        admitted.append(admission)
        page = admission.page
    return admitted


def abort(tree: Catalog, admitted: Sequence[Admission]) -> None:
    """Give up all of a run. Under the lock."""
    for admission in reversed(admitted):
        if admission.fill is not None:
            tree.abort(admission.fill)
        elif admission.page is not None:
            tree.unpin((admission.page,))


def commit(
    tree: Catalog, chain: Chain, admitted: Sequence[Admission], gates: Sequence[NDArray[Any]] | None = None
) -> int:
    """Let a run be matched and advance `chain`. Returns how many tokens it stored. Under the lock.

    Parameters
    ----------
    gates : sequence of ndarray, optional
        Of each page (see `tailreplay.page.Page.gates`).
    """
    stored = 0
    for index, admission in enumerate(admitted):
        assert admission.page is not None
        if gates is not None:
            if admission.fill is not None:
                admission.fill.gates = gates[index]
            elif admission.page.gates is None:
                admission.page.gates = gates[index]
        if admission.fill is not None:
            tree.commit(admission.fill)
        tree.unpin((chain.page,))
        chain.page = admission.page
        stored += admission.page.tokens
    chain.tokens += stored
    if chain.tokens % tree.page_size:
        chain.stopped = chain.stopped or "partial"
    return stored


def fill(
    arena: HostArena, admitted: Sequence[Admission], kv: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]
) -> None:
    """Write the bytes of admitted pages and note their checksums. Mutates the arena; without the lock.

    Parameters
    ----------
    kv, hidden : sequence of torch.Tensor
        All tokens of the run, one tensor a part of the layout.
    """
    layout = arena.layout
    specs = layout.kv_parts
    pages = [admission.fill for admission in admitted]
    _fill(arena, list(zip(specs, kv, strict=True)), [page.slot if page is not None else -1 for page in pages], pages)
    slots = [page.hidden_slot if page is not None else -1 for page in pages]
    _fill(arena, list(zip(layout.hidden, hidden, strict=True)), slots, pages)


def _fill(
    arena: HostArena,
    columns: Sequence[tuple[PartSpec, torch.Tensor]],
    slots: Sequence[int],
    pages: Sequence[Page | None],
) -> None:
    size = arena.layout.page_size
    for first, run in _runs(slots):
        for part, tensor in columns:
            arena.write(part, run, tensor[first * size : (first + len(run)) * size])
        for slot, page in zip(run, pages[first:], strict=False):
            assert page is not None
            for part, _ in columns:
                arena.seal(part, slot, page.tokens)


def _runs(slots: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Join neighbouring pages that must be written, those with a slot: (index of the first, slots)."""
    runs: list[tuple[int, list[int]]] = []
    for index, slot in enumerate(slots):
        if slot < 0:
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == index:
            runs[-1][1].append(slot)
        else:
            runs.append((index, [slot]))
    return runs
