"""The parts of benchmarks.soak: its server, its traffic and its malformed connections."""
