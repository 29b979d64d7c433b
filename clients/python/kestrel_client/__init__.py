"""Typed Python client of the Kestrel vision service."""
