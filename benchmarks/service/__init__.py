"""Benchmarks of a server: shares between principals, several workers, and the cost of telemetry."""
