"""Fused CPU kernels of the training run, and the plain oracles that they are checked against."""
