"""Lanes: what the steps of each kind compute, and which of them are out (types.step.Lane)."""
