"""Programs that measure Kestrel. Run one as ``python -m benchmarks.<name>``; docs/lab/benchmarks.md lists them.

This folder holds the programs that users run most: those of ``make bench`` and ``make bench-gpu``, the trace, and
the comparison of two runs. ``service`` measures a server process, and ``gpu`` the parts of a GPU's work. The other
folders hold parts that programs share.
"""
