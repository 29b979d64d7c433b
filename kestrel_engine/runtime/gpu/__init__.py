"""The fast runtime: Triton kernels, FlashInfer or SDPA attention, captured decode steps. `runtime.py` is the entry."""
