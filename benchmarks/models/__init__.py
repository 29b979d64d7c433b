"""Loading models for benchmarks, and steps and skills for them."""

TINY = "tests/models/kestrel-tiny"
"""The tests' model. Benchmarks run in the repository's root."""
