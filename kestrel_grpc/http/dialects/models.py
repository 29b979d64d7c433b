"""The model names in HTTP requests. Owns the names that stand for the served model, and those of its adapters."""

from __future__ import annotations

from kestrel_client._pb.kestrel.v1 import common_pb2

ALIASES = frozenset({"moondream", "moondream2", "moondream3", "moondream3-preview"})
"""Names that clients send by default. They stand for the served model, whichever it is."""


def served_name(name: str, served: str) -> str:
    """Returns ``served`` for an alias, else ``name``, which the service checks."""
    return served if name.partition(":")[0] in ALIASES else name  # Ollama's names may have a tag.


def set_model(options: common_pb2.RequestOptions, name: str, served: str) -> None:
    """Sets model and adapter. ``name``: a model's, or with an adapter's behind it, MODEL/ADAPTER. Behind an alias, the
    adapter's name must have a step (moondream3-preview/ID@STEP), because moondream/moondream2 is a repository."""
    base, _, adapter = name.rpartition("/")
    if name != served and (base == served or (base in ALIASES and "@" in adapter)):
        name, options.adapter = base, adapter
    options.model = served_name(name, served)
