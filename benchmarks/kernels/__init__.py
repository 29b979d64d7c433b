"""Checks and times candidate configurations of the kernels on a GPU."""
