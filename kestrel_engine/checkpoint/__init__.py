"""Checkpoints: finding, downloading, checking and loading a model's weights. Entry: ``open.py``."""
