"""Tail replay: rebuild linear layers' states from the cached hiddens of a prefix's last tokens.

From a zero state k tokens before the end, each group's tail runs through its linear layers alone (DESIGN: equation 1 with
``S_{m-k} = 0``; Tail-Replay, arXiv 2608.30310). No FA layer runs, and neither does the feed-forward part after a group's
last mixer, since nothing reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.topology import Group, Topology

ReadHidden = Callable[[int, int, int], torch.Tensor]


class _MixerDone(Exception):
    """Raised from a hook to leave a layer after its token mixer."""


def replay(
    backbone: Backbone,
    cache: compat.DynamicCache,
    ids: Sequence[int],
    tails: Sequence[int],
    read_hidden: ReadHidden,
    chunk: int = 2048,
    skip: bool = True,
) -> None:
    """Write the states after ``len(ids)`` tokens into `cache`. Mutates `cache`.

    Parameters
    ----------
    cache : DynamicCache
        Whose linear layers are empty: a group with an empty tail keeps the zero state.
    ids : sequence of int
        The matched prefix; its last tokens are embedded for the embedding group.
    tails : sequence of int
        k by group.
    read_hidden : callable
        ``read_hidden(g, start, stop)`` returns the hiddens of the g-th *stored* group, ``(1, stop - start, d_model)``.
    chunk : int
        Longest run at once, so that memory does not grow with the tail.
    skip : bool
        False runs the feed-forward part after a group's last mixer too, to measure what leaving it out saves.
    """
    end = len(ids)
    stored = {group.index: position for position, group in enumerate(backbone.topology.stored_groups)}
    # Chunks outside, groups inside, as in a prefill: some families (OLMo-Hybrid) ask the last linear layer of the model
    # whether there is a state to continue from, and would take a group's second chunk for its first otherwise.
    for spans in _chunks(backbone.topology, tails, end, chunk):
        for group, start, stop in spans:
            if group.stores_hidden:
                hidden = read_hidden(stored[group.index], start, stop)
            else:
                hidden = backbone.embed(list(ids[start:stop]))
            run_group(backbone, group, hidden, backbone.positions(start, stop), cache, skip)


def reads_of(topology: Topology, tails: Sequence[int], end: int, chunk: int = 2048) -> list[tuple[int, int, int]]:
    """Return what `replay` reads first, before it computes anything: (stored group, start, stop) of its first chunk."""
    stored = {group.index: position for position, group in enumerate(topology.stored_groups)}
    first = next(_chunks(topology, tails, end, chunk), [])
    return [(stored[group.index], start, stop) for group, start, stop in first if group.stores_hidden]


def _chunks(topology: Topology, tails: Sequence[int], end: int, chunk: int) -> Iterator[list[tuple[Group, int, int]]]:
    """Yield chunk by chunk the groups that take part, and from where to where."""
    for begin in range(end - max(tails, default=0), end, chunk):
        stop = min(begin + chunk, end)
        spans = [(group, max(begin, end - tail), stop) for group, tail in zip(topology.groups, tails, strict=True)]
        yield [span for span in spans if span[1] < stop]


def run_group(
    backbone: Backbone,
    group: Group,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    cache: compat.DynamicCache,
    skip: bool = True,
) -> None:
    """Run a group's linear layers over `hidden`, ``(1, n, d_model)``, after the states in `cache`. Mutates `cache`."""
    *inner, last = (backbone.layers[index] for index in group.layers)
    for layer in inner:
        hidden = compat.call_layer(layer, hidden, positions, cache)
    with _leaving_after(backbone.family.mixer(last)) if skip else nullcontext():
        compat.call_layer(last, hidden, positions, cache)


@contextmanager
def _leaving_after(mixer: torch.nn.Module) -> Iterator[None]:
    """End the block's layer call when `mixer` has run: its state is updated, and the rest of the layer is not needed."""

    def leave(*_: object) -> None:
        raise _MixerDone

    handle = mixer.register_forward_hook(leave)
    try:
        yield
    except _MixerDone:
        pass
    finally:
        handle.remove()
