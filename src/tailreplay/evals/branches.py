"""Many short continuations of one prefix at once: one row a pair of method and question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tailreplay.engines.transformers import compat
from tailreplay.engines.transformers.backbone import Backbone

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class BatchLayer(compat.DynamicLayer):  # type: ignore[misc]
    """Keys and values of one attention layer for several rows that share a prefix, with room to grow in place.

    Parameters
    ----------
    keys, values : torch.Tensor
        Of the prefix, ``(m, kv_heads, head_dim)``, copied to each row.
    rows : int
    room : int
        Tokens after the prefix.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: int, room: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._length = keys.shape[0]
        self._buffers = tuple(_spread(tensor, rows, room) for tensor in (keys, values))
        self._view()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``(rows, kv_heads, n, head_dim)`` and return all of them, as views of the buffer. Mutates self."""
        start, stop = self._length, self._length + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self._length = stop
        self._view()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self._length

    def _view(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def _spread(rows_of_prefix: torch.Tensor, rows: int, room: int) -> torch.Tensor:
    tokens, heads, dim = rows_of_prefix.shape
    buffer = rows_of_prefix.new_empty((rows, heads, tokens + room, dim))
    buffer[:, :, :tokens] = rows_of_prefix.transpose(0, 1)
    return buffer


class Branches:
    """Rows that continue one prefix of `matched` tokens.

    Parameters
    ----------
    backbone : Backbone
    kv : list of (keys, values)
        Of each attention layer, ``(m, kv_heads, head_dim)``; m is `matched`, or 0 if they are taken away.
    states : sequence of DynamicCache
        One a row; their linear layers' states are copied. Rows without states start from zero.
    matched : int
        Position of the rows' next token.
    room : int
        Tokens that will be run.
    """

    def __init__(
        self, backbone: Backbone, kv: KeysValues, states: Sequence[compat.DynamicCache], matched: int, room: int
    ) -> None:
        self._backbone = backbone
        self._position = matched
        self._rows = len(states)
        self._cache = compat.new_cache(backbone.config)
        compat.stack_states(states, self._cache)
        for layer, (keys, values) in zip(backbone.topology.attention_layers, kv, strict=True):
            self._cache.layers[layer] = BatchLayer(keys, values, self._rows, room)

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Run one piece of every row. Mutates self.

        Parameters
        ----------
        ids : torch.Tensor
            ``(rows, n)``, int64.
        keep : int
            Positions from the end whose logits are returned.

        Returns
        -------
        torch.Tensor
            ``(rows, keep, vocabulary)``, float32.
        """
        count = ids.shape[1]
        positions = self._backbone.positions(self._position, self._position + count).expand(self._rows, -1)
        logits = compat.batch_logits(self._backbone.model, ids.to(self._backbone.device), positions, self._cache, keep)
        self._position += count
        return logits.float()

    def greedy(self, ids: torch.Tensor, limit: int, done: Callable[[list[int]], bool]) -> list[list[int]]:
        """Decode greedily after ``ids``, ``(rows, n)``; ``done(tokens)`` says when a row has ended. Mutates self."""
        found: list[list[int]] = [[] for _ in range(self._rows)]
        for step in range(limit):
            following = self.run(ids, 1)[:, -1].argmax(-1)
            ended = True
            for row, token in zip(found, following.tolist(), strict=True):
                if not (row and done(row)):
                    row.append(token)
                    ended &= done(row)
            if ended or step + 1 == limit:
                break
            ids = following[:, None]
        return found
