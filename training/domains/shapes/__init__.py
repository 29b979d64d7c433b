"""Coloured shapes: renderer, questions and truth."""
