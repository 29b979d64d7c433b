"""Programs that measure Kestrel's speed. Run one as ``python -m benchmarks.<name>``."""
