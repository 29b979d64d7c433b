"""Encoded images to pixels: formats, colours, limits and costs. Runs in a decoder process."""
