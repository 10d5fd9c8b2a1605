"""Inverses of many small unit lower triangular matrices."""

from __future__ import annotations

import torch

_BASE = 16


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """Return ``(I + L)^-1`` for each strictly lower triangular L. Only what is below the diagonal is read.

    By halves: ``[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]``. That is forward substitution by blocks, so it
    is as stable, and most of it is matrix products. A power series would be quicker still, but cancels badly where keys
    resemble each other.

    Parameters
    ----------
    strict : torch.Tensor
        Shape ``(matrices, n, n)``.

    Returns
    -------
    torch.Tensor
        Shape ``(matrices, n, n)``, new memory.
    """
    count, size, _ = strict.shape
    if size <= _BASE or size % 2:
        unit = torch.eye(size, dtype=strict.dtype, device=strict.device).expand(count, size, size)
        solved: torch.Tensor = torch.linalg.solve_triangular(strict, unit, upper=False, unitriangular=True)
        return solved
    half = size // 2
    corners = torch.cat((strict[:, :half, :half], strict[:, half:, half:]))
    first, second = unit_lower_inverse(corners).split(count)
    inverse = torch.zeros_like(strict)
    inverse[:, :half, :half] = first
    inverse[:, half:, half:] = second
    inverse[:, half:, :half] = torch.bmm(torch.bmm(second, strict[:, half:, :half]), first).neg_()
    return inverse
