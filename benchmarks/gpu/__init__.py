"""Benchmarks of one GPU's work: vision tower, prefill, quality, startup, and the limits of the machine."""
