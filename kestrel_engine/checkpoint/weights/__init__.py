"""Weights: which tensors a model needs, where a checkpoint stores them, and their way onto a device."""
