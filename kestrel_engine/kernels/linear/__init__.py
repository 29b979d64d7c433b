"""Kernels for matrix products, and for activations that are stored in FP8 as operands."""
