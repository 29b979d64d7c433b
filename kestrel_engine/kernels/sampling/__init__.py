"""Kernels that sample tokens and read coordinate bins."""
