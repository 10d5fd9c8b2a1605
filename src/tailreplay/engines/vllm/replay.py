"""Tail replay of several hits at once, through vLLM's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from tailreplay.engines.vllm.plugin import TappedModel
from tailreplay.provenance import Start

if TYPE_CHECKING:
    from tailreplay.engines.vllm.adapters import Carried
    from tailreplay.engines.vllm.compat import StateBatch
    from tailreplay.engines.vllm.messages import Load


@dataclass(frozen=True)
class Tail:
    """The next `count` tokens of a load's tail, of which `done` are replayed already."""

    load: Load
    done: int
    count: int

    @property
    def start(self) -> int:
        """Position of the first of them in the sequence."""
        return self.load.matched - self.load.tail + self.done

    @property
    def before(self) -> int:
        """Tokens that its states stand for; 0 if it begins with zero states."""
        return self.start if self.load.anchor >= 0 or self.load.start is Start.MEAN else self.done


ReadHidden: TypeAlias = "Callable[[Load, int, int, int], torch.Tensor]"


@torch.inference_mode()
def replay(
    model: TappedModel,
    states: StateBatch,
    tails: Sequence[Tail],
    read_hidden: ReadHidden,
    device: torch.device,
    skip: bool = True,
) -> None:
    """Run the tails through each group's linear layers, all sequences in one batch. Mutates the states in vLLM's cache.

    The feed-forward part after a group's last mixer is skipped. A tail's first part starts from the zero state, or
    from what was put into its blocks; later ones go on from what was left.

    Parameters
    ----------
    read_hidden : callable
        ``read_hidden(load, g, start, stop)`` returns hiddens of the g-th stored group, ``(stop - start, d_model)``.
    skip : bool
        False runs the feed-forward part after a group's last mixer too, to measure what leaving it out saves.
    """
    adapter, decoder = model.adapter, model.decoder
    positions = torch.cat([torch.arange(tail.start, tail.start + tail.count, device=device) for tail in tails])
    stored = 0
    with states.running(
        [tail.before for tail in tails], [tail.count for tail in tails], [tail.load.states for tail in tails]
    ):
        for group in model.topology.groups:
            if group.stores_hidden:
                parts = [read_hidden(tail.load, stored, tail.start, tail.start + tail.count) for tail in tails]
                carried: Carried = torch.cat(parts), None
                stored += 1
            else:
                ids = [i for tail in tails for i in tail.load.tail_ids[tail.done : tail.done + tail.count]]
                carried = adapter.embed(decoder, torch.tensor(ids, device=device)), None
            *inner, last = (decoder.layers[index] for index in group.layers)
            for layer in inner:
                carried = adapter.step(layer, positions, carried)
            if skip:
                adapter.finish(last, positions, carried)
            else:
                adapter.step(last, positions, carried)
