"""Loaded models and hand-made work for the benchmarks."""
