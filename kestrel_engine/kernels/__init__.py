"""Triton kernels, one family a module: each computes what a few lines of torch would, in one launch.

Nothing here knows sequences, requests or steps. A module loads Triton when it is imported, so only `runtime.gpu` may
import it. Under TRITON_INTERPRET=1 (set before the import) every kernel runs on CPU tensors; that is how the tests
compare them with plain torch on a machine without a GPU.
"""
