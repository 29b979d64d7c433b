"""Weights: the tensors that a model needs, their names in a checkpoint, and loading them onto a device."""
