"""Converts drawn scenes to the crops that the model reads."""
