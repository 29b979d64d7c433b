"""Benchmarks of a server: shares between principals, several workers, and killed processes."""
