"""Kernels that add the changes of adapters (LoRA) to linear layers, for rows with different adapters."""
