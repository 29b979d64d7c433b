"""Attention of the three kinds of passes: decode, prefill, and the patches of a crop."""
