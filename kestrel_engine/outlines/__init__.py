"""Outlines as masks and back: the region of an image around a box, a mask of a path, and the path around a mask."""
