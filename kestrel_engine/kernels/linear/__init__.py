"""Kernels of matrix products, and of activations that are stored in eight bits for them."""
