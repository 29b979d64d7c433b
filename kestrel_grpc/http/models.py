"""The model names in HTTP requests. Owns the names that stand for the served model."""

from __future__ import annotations

from kestrel_engine import InvalidRequest

ALIASES = frozenset({"moondream", "moondream2", "moondream3", "moondream3-preview"})
"""Names that clients send by default. They stand for the served model, whichever it is."""


def served_name(name: str, served: str) -> str:
    """Returns ``served`` for an alias, else ``name``, which the service checks. Raises InvalidRequest."""
    if "/" in name and "@" in name and name != served:
        raise InvalidRequest("model", f"{name!r} names an adapter, and this server has none")
    return served if name.partition(":")[0] in ALIASES else name  # Ollama's names may have a tag.
