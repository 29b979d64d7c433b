"""The client's version: here, and in pyproject.toml."""

__version__ = "0.1.0"
