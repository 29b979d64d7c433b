"""Kernels of attention over pages, and of what is written there."""
