"""Prefill: which rows of prompt tokens go together, and the pass that takes them."""
