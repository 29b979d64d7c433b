"""Kernels for attention over pages, and for storing keys and values."""
