"""Kernels that make crops and patches of pixels."""
