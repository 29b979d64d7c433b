"""Adapters (LoRA): which there are, whether they fit the model, and which of them are loaded."""
