"""Adapters on the device: the layout of their slabs, and which slabs the rows of a pass use."""
