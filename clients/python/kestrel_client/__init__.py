"""Typed Python client of the Kestrel vision service: KestrelClient and AsyncKestrelClient, and for administration
KestrelAdmin and AsyncKestrelAdmin.

The first use of a name loads all of them, with gRPC and protobuf, but not numpy, Pillow or torch. Importing the package
loads nothing, so that the commands can first choose what gRPC logs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .version import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = importlib.import_module(f"{__name__}.api")
    if name == "__all__":
        return [*(each for each in vars(api) if each[0].isupper()), "__version__"]
    if hasattr(api, name):
        return getattr(api, name)
    if name in globals():  # A module of the package, which has just been loaded.
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
