"""Checkpoints: finding, downloading, checking and loading a model's weights. The entry point is ``open.py``."""
