"""Attention of each kind of pass: decode, prefill, and the patches of a crop."""
