"""Triton kernels, one family in each module. A kernel computes in one launch what takes several lines of torch.

Importing a module loads Triton, so only `runtime.gpu` may import one. With TRITON_INTERPRET=1, set before the import,
all kernels run on CPU tensors, as in the tests.
"""
