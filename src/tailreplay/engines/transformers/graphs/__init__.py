"""Replays recorded as CUDA graphs: one launch instead of thousands of small kernels'."""
