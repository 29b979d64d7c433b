"""The parts of benchmarks.soak: its server, its traffic, its rude connections."""
