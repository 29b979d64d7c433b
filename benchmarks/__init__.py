"""What Kestrel's speed is measured with: programs run as ``python -m benchmarks.<name>``."""
