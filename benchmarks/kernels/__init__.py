"""Times the kernels of a decode step on a GPU, and variants of them."""
