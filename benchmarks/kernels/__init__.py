"""Kernels on a GPU: candidates, checked and timed."""
