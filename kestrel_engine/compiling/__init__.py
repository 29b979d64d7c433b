"""Compiling a model's kernels where there is no GPU: an engine is built on a stand-in for a card, and its launches are
compiled instead of run."""
