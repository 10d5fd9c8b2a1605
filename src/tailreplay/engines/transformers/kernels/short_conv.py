"""The depthwise causal convolution on CPU."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Convolve each channel with what came before. Mutates nothing.

    As a two-dimensional convolution over token-major memory ("channels last"), for which oneDNN has a vectorised
    depthwise kernel: some 30 times as quick as the one-dimensional convolution over channel-major memory.

    Parameters
    ----------
    inputs : torch.Tensor
        Shape ``(batch, channels, tokens)``; no copy is made if it is the transpose of contiguous memory.
    weight : torch.Tensor
        Shape ``(channels, width)``.

    Returns
    -------
    torch.Tensor
        Shape ``(batch, channels, tokens)``, token-major: channels are next to each other.
    """
    batch, channels, tokens = inputs.shape
    token_major = inputs.transpose(1, 2).contiguous()
    width = weight.shape[1]
    # Strides of a channels-last image of one row, whatever the batch.
    image = token_major.view(batch, 1, tokens, channels).permute(0, 3, 1, 2)
    result = functional.conv2d(image, weight[:, None, None], bias, padding=(0, width - 1), groups=channels)
    return result[:, :, 0, :tokens]
