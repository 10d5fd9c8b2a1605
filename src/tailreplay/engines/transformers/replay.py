"""Tail replay: rebuild linear layers' states from the cached hiddens of a prefix's last tokens.

From a zero state k tokens before the end, each group's tail runs through its linear layers alone (DESIGN: equation 1 with
``S_{m-k} = 0``; Tail-Replay, arXiv 2608.30310). No FA layer runs, and neither does the feed-forward part after a group's
last mixer, since nothing reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone
from tailreplay.topology import Group

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
    """
    end = len(ids)
    stored = {group.index: position for position, group in enumerate(backbone.topology.stored_groups)}
    # Chunks outside, groups inside, as in a prefill: some families (OLMo-Hybrid) ask the last linear layer of the model
    # whether there is a state to continue from, and would take a group's second chunk for its first otherwise.
    for begin in range(end - max(tails, default=0), end, chunk):
        stop = min(begin + chunk, end)
        for group, tail in zip(backbone.topology.groups, tails, strict=True):
            start = max(begin, end - tail)
            if start >= stop:
                continue
            if group.stores_hidden:
                hidden = read_hidden(stored[group.index], start, stop)
            else:
                hidden = backbone.embed(list(ids[start:stop]))
            run_group(backbone, group, hidden, backbone.positions(start, stop), cache)


def run_group(
    backbone: Backbone, group: Group, hidden: torch.Tensor, positions: torch.Tensor, cache: compat.DynamicCache
) -> None:
    """Run a group's linear layers over `hidden`, ``(1, n, d_model)``, after the states in `cache`. Mutates `cache`."""
    *inner, last = (backbone.layers[index] for index in group.layers)
    for layer in inner:
        hidden = compat.call_layer(layer, hidden, positions, cache)
    with _leaving_after(backbone.family.mixer(last)):
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
