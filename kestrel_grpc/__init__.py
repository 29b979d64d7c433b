"""Kestrel's gRPC service. Importing it loads neither grpc nor torch."""

from importlib import metadata

try:
    __version__ = metadata.version("kestrel-grpc")
except metadata.PackageNotFoundError:
    __version__ = "0+source"
    """Run from a source tree that was never installed."""

__all__ = ["__version__"]
