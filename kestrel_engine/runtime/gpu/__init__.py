"""The GPU runtime: Triton kernels, attention, and captured passes. The entry point is `runtime.py`."""
