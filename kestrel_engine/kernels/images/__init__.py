"""Kernels that make crops and patches from pixels."""
