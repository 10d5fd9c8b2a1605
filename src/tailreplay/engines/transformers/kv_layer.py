"""Keys and values of one attention layer in a preallocated, token-major buffer."""

from __future__ import annotations

import torch

from tailreplay.engines.transformers.compat import DynamicLayer


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Stands in for transformers' ``DynamicLayer`` in a forward, for one sequence that only grows.

    The buffer is token-major, ``(capacity, kv_heads, head_dim)``, as pages are: a hit is copied straight from the arena
    into it, and a page is a slice of it.

    Parameters
    ----------
    capacity : int
        Tokens to make room for at first; the buffer doubles when it is exceeded.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = max(1, capacity)
        self._length = 0
        self._key_rows: torch.Tensor | None = None
        self._value_rows: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``(1, kv_heads, n, head_dim)`` states and return all of them, as views of the buffer. Mutates self."""
        if key_states.shape[0] != 1:
            raise ValueError("A preallocated layer holds one sequence.")
        new_keys, new_values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        keys, values = self.reserve(len(new_keys), new_keys[0], new_values[0])
        keys.copy_(new_keys)
        values.copy_(new_values)
        return self.keys, self.values

    def reserve(self, count: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `count` uninitialised tokens and return their rows, ``(count, heads, dim)`` each, to be filled.

        Parameters
        ----------
        key, value : torch.Tensor
            One token's, ``(heads, dim)``; only shape, dtype and device are read.
        """
        start, stop = self._length, self._length + count
        self._key_rows = self._grown(self._key_rows, stop, key)
        self._value_rows = self._grown(self._value_rows, stop, value)
        self._length = stop
        self.dtype, self.device = key.dtype, key.device
        self.is_initialized = True
        self.keys = self._key_rows[:stop].transpose(0, 1)[None]
        self.values = self._value_rows[:stop].transpose(0, 1)[None]
        return self._key_rows[start:stop], self._value_rows[start:stop]

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``start .. stop-1`` as views, ``(stop - start, kv_heads, head_dim)`` each."""
        assert self._key_rows is not None
        assert self._value_rows is not None
        return self._key_rows[start:stop], self._value_rows[start:stop]

    def copy(self, capacity: int) -> PreallocatedLayer:
        """Return an independent copy with room for `capacity` tokens."""
        twin = PreallocatedLayer(max(capacity, self._length))
        if self._length:
            keys, values = self.rows(0, self._length)
            new_keys, new_values = twin.reserve(self._length, keys[0], values[0])
            new_keys.copy_(keys)
            new_values.copy_(values)
        return twin

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: recurrent states beside these keys and values could not be cut back."""
        raise RuntimeError("A hybrid model's cache cannot be cut back.")

    def reset(self) -> None:
        """Refused, as `crop` is."""
        raise RuntimeError("Make a new cache instead.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: one sequence."""
        raise RuntimeError("A preallocated layer holds one sequence.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: one sequence."""
        raise RuntimeError("A preallocated layer holds one sequence.")

    def _grown(self, rows: torch.Tensor | None, needed: int, token: torch.Tensor) -> torch.Tensor:
        if rows is not None and rows.shape[0] >= needed:
            return rows
        size = self._capacity if rows is None else 2 * rows.shape[0]
        grown = torch.empty((max(size, needed), *token.shape), dtype=token.dtype, device=token.device)
        if rows is not None:
            grown[: self._length] = rows[: self._length]
        return grown
