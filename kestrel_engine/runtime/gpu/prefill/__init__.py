"""Prefill: groups rows of prompt tokens into passes, and runs the passes."""
