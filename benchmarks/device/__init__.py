"""Measurements of a device: rates, traces, and the work that a model needs."""
