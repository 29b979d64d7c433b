"""Painting results on images."""
