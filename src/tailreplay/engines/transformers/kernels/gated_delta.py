"""The gated delta rule on CPU, in float32: many tokens by chunks, or one.

    S_i = alpha_i (I - beta_i k_i k_i^T) S_{i-1} + beta_i k_i v_i^T,   o_i = S_i^T q_i / sqrt(d)

as `tailreplay.naive` computes it token by token. Within a chunk the corrections
``u_i = beta_i (v_i - alpha_i S_{i-1}^T k_i)`` depend on each other by a triangular system,
``(I + L) U = beta (V - decay K S)`` (Gated Delta Networks, arXiv 2412.06464): its inverse is made for all chunks at
once, and only what needs the state is done chunk by chunk.

Chunks of 32 tokens: on CPU, where nothing is gained from larger tiles, the work within chunks is then small beside that
with the state. Tokens are worked off in segments, whose buffers stay in the processor's cache and are used again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailreplay.engines.transformers.kernels.triangular import unit_lower_inverse

CHUNK = 32
SEGMENT = 256
EPSILON = 1e-6


def gated_delta_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over all tokens. Mutates nothing.

    Parameters
    ----------
    query, key : torch.Tensor
        Shape ``(batch, tokens, heads, key_dim)``, at least one token; L2-normalised here.
    value : torch.Tensor
        Shape ``(batch, tokens, heads, value_dim)``.
    log_decay, beta : torch.Tensor
        Shape ``(batch, tokens, heads)``: log of the forget gate (at most 0), and the write strength.
    initial : torch.Tensor, optional
        State before the first token, ``(batch, heads, key_dim, value_dim)``; zero if not given.

    Returns
    -------
    output : torch.Tensor
        Shape of `value`, dtype of `query`.
    state : torch.Tensor
        State after the last token, ``(batch, heads, key_dim, value_dim)``, float32, new memory.
    """
    batch, tokens, heads, key_dim = key.shape
    value_dim = value.shape[-1]
    chunks = -(-tokens // CHUNK)
    # Of equal length, so that as little as possible is padded; a multiple of 8 keeps the matrix products quick.
    chunk = min(CHUNK, -(-tokens // chunks // 8) * 8)
    buffers = _Buffers.of(min(chunks, SEGMENT // CHUNK), batch, heads, chunk, key_dim, value_dim)
    output = value.new_empty(value.shape, dtype=query.dtype)
    state = value.new_zeros((batch * heads, key_dim, value_dim), dtype=torch.float32)
    if initial is not None:
        state.copy_(initial.reshape(state.shape))
    empty = initial is None
    for start in range(0, tokens, buffers.tokens):
        part = slice(start, start + buffers.tokens)
        segment = buffers.filled(query[:, part], key[:, part], value[:, part], log_decay[:, part], beta[:, part])
        segment.advance(state, empty)
        segment.write(output[:, part])
        empty = False
    return output, state.view(batch, heads, key_dim, value_dim)


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over one token. Takes and returns what `gated_delta_chunks` does. Mutates nothing."""
    batch, _, heads, key_dim = key.shape
    rows = batch * heads
    pair = torch.stack((key, query), dim=3).view(rows, 2, key_dim).float()
    pair = pair * _inverse_norm(pair)
    pair[:, 1] *= key_dim**-0.5
    alpha = log_decay.float().exp().view(rows, 1, 1)
    state = initial.reshape(rows, key_dim, -1).to(torch.float32)
    # One read of the state for both: q^T (alpha S + k u^T) = alpha q^T S + (q^T k) u^T.
    recalled, read = (torch.bmm(pair, state) * alpha).split(1, dim=1)
    correction = (value.reshape(rows, 1, -1).float() - recalled) * beta.view(rows, 1, 1)
    overlap = (pair[:, 0] * pair[:, 1]).sum(-1).view(rows, 1, 1)
    output = (read + overlap * correction).view(batch, 1, heads, -1).to(query.dtype)
    state = (state * alpha).addcmul_(pair[:, 0, :, None], correction)
    return output, state.view(batch, heads, key_dim, -1)


@dataclass(frozen=True)
class _Buffers:
    """One segment: n chunks of c tokens, by chunk, then batch and head.

    Attributes
    ----------
    keys_queries : torch.Tensor
        Shape ``(n, batch, heads, 2 c, key_dim)``: the keys of each chunk, then its queries.
    values, outputs : torch.Tensor
        Shape ``(n, batch, heads, c, value_dim)``.
    gates : torch.Tensor
        Shape ``(2, n, batch, heads, c, 1)``: logs of the decay, then betas.
    length : int
        Tokens held. What is left of the last chunk is zero, which neither writes to a state nor lets it decay.
    """

    keys_queries: torch.Tensor
    values: torch.Tensor
    outputs: torch.Tensor
    gates: torch.Tensor
    length: int

    @classmethod
    def of(cls, count: int, batch: int, heads: int, chunk: int, key_dim: int, value_dim: int) -> _Buffers:
        lead = (count, batch, heads)
        # The device and the dtype by name: a caller may have changed torch's defaults.
        pairs, values, outputs, gates = (
            torch.empty(shape, dtype=torch.float32, device="cpu")
            for shape in (
                (*lead, 2 * chunk, key_dim),
                (*lead, chunk, value_dim),
                (*lead, chunk, value_dim),
                (2, *lead, chunk, 1),
            )
        )
        return cls(pairs, values, outputs, gates, 0)

    @property
    def tokens(self) -> int:
        """Room."""
        return self.values.shape[0] * self.values.shape[3]

    def filled(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
    ) -> _Buffers:
        """Copy at most `tokens` tokens in and return the part that they take. Mutates the buffers."""
        chunk, length = self.values.shape[3], key.shape[1]
        count = -(-length // chunk)
        part = _Buffers(
            self.keys_queries[:count], self.values[:count], self.outputs[:count], self.gates[:, :count], length
        )
        _stage(part.keys_queries[..., :chunk, :], key)
        _stage(part.keys_queries[..., chunk:, :], query)
        _stage(part.values, value)
        _stage(part.gates[0], log_decay[..., None])
        _stage(part.gates[1], beta[..., None])
        return part

    def advance(self, state: torch.Tensor, empty: bool) -> None:
        """Compute the outputs, and move `state` on. Mutates both and what was filled in.

        Parameters
        ----------
        state : torch.Tensor
            Shape ``(batch * heads, key_dim, value_dim)``.
        empty : bool
            Whether it is known to be zero.
        """
        count, chunk, value_dim = self.values.shape[0], *self.values.shape[3:]
        rows = state.shape[0]
        pairs = self.keys_queries.view(count, rows, 2 * chunk, -1)
        values, outputs = self.values.view(count, rows, chunk, -1), self.outputs.view(count, rows, chunk, -1)
        decay, beta = self.gates.view(2, count, rows, chunk, 1)
        decay = decay.cumsum(2)
        norm = _inverse_norm(pairs)
        norm[:, :, chunk:] *= pairs.shape[-1] ** -0.5
        pairs *= norm
        values *= beta
        inverse, attention = _within_chunks(pairs, decay, beta)
        gain = decay.exp()
        read_gain = torch.cat((gain * beta, gain), dim=2)
        write_gain = (decay[:, :, -1:] - decay).exp_()
        read, scratch = state.new_empty((rows, 2 * chunk, value_dim)), state.new_empty((rows, chunk, value_dim))
        for i in range(count):
            if empty and i == 0:
                corrections = torch.bmm(inverse[i], values[i])
                outputs[i].zero_()
            else:
                torch.bmm(pairs[i], state, out=read).mul_(read_gain[i])
                corrections = torch.bmm(inverse[i], torch.sub(values[i], read[:, :chunk], out=scratch))
                outputs[i] = read[:, chunk:]
                state *= gain[i, :, -1:]
            values[i] = corrections
            state.baddbmm_(pairs[i, :, :chunk].transpose(1, 2), torch.mul(corrections, write_gain[i], out=scratch))
        outputs.view(-1, chunk, value_dim).baddbmm_(attention, values.view(-1, chunk, value_dim))

    def write(self, target: torch.Tensor) -> None:
        """Copy the outputs to `target`, ``(batch, length, heads, value_dim)``. Mutates it."""
        count, chunk = self.outputs.shape[0], self.outputs.shape[3]
        by_token = self.outputs.permute(1, 0, 3, 2, 4)
        whole = self.length // chunk
        target[:, : whole * chunk].unflatten(1, (whole, chunk)).copy_(by_token[:, :whole])
        if whole < count:
            target[:, whole * chunk :].copy_(by_token[:, whole, : self.length - whole * chunk])


def _stage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``(batch, tokens, heads, d)`` into chunks ``(n, batch, heads, c, d)``, with zeros after the last token."""
    count, chunk = target.shape[0], target.shape[3]
    whole, rest = divmod(source.shape[1], chunk)
    target[:whole].copy_(source[:, : whole * chunk].unflatten(1, (whole, chunk)).permute(1, 0, 3, 2, 4))
    if whole < count:
        target[whole, :, :, :rest].copy_(source[:, whole * chunk :].transpose(1, 2))
        target[whole, :, :, rest:].zero_()


def _inverse_norm(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()


def _within_chunks(pairs: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what holds within chunks.

    Parameters
    ----------
    pairs : torch.Tensor
        Keys, then queries, ``(n, rows, 2 c, key_dim)``.
    decay, beta : torch.Tensor
        Log of the decay since the chunk's begin, and betas: ``(n, rows, c, 1)``.

    Returns
    -------
    inverse : torch.Tensor
        From what each token wants to write to its correction, ``(n, rows, c, c)``.
    attention : torch.Tensor
        What each token reads of each correction, ``(n * rows, c, c)``.
    """
    count, rows, chunk, _ = decay.shape
    flat = pairs.view(count * rows, 2 * chunk, -1)
    products = torch.bmm(flat, flat[:, :chunk].transpose(1, 2)).view(count, rows, 2, chunk, chunk)
    # Above the diagonal the exponential may overflow; tril_ overwrites it.
    products *= (decay - decay.transpose(2, 3)).exp_().tril_()[:, :, None]
    strict = (products[:, :, 0] * beta).view(-1, chunk, chunk)
    inverse = unit_lower_inverse(strict).view(count, rows, chunk, chunk)
    return inverse, products[:, :, 1].reshape(-1, chunk, chunk)
