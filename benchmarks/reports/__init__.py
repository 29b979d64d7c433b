"""The reports of benchmarks: figures, bars and the machine, as tables and JSON."""
