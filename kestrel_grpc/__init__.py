"""Kestrel's gRPC service. Importing it loads neither grpc nor torch."""

from importlib import metadata

try:
    __version__ = metadata.version("kestrel-grpc")
except metadata.PackageNotFoundError:
    __version__ = "0+source"
    """The package runs from a source tree without installation."""

__all__ = ["__version__"]
