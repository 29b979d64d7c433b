"""The model names in HTTP requests. Owns the names that stand for the default model, and those of adapters."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_client._pb.kestrel.v1 import common_pb2

from ...served_model import ALIASES

_TAG = ":latest"
"""Clients of Ollama may add it to every name."""


def served_name(name: str, names: Sequence[str]) -> str:
    """Returns the default model for an alias, else ``name``, which the service checks. ``names``: those of the served
    models, the default first."""
    if name in names:
        return name
    untagged = name.removesuffix(_TAG)
    if untagged in names:
        return untagged
    return names[0] if name.partition(":")[0] in ALIASES else name


def set_model(options: common_pb2.RequestOptions, name: str, names: Sequence[str]) -> None:
    """Sets model and adapter. ``name``: a model's, or with an adapter's behind it, MODEL/ADAPTER. Behind an alias, the
    adapter's name must have a step (moondream3-preview/ID@STEP) or be a repository of the hub (moondream3/ORG/REPO),
    because moondream/moondream2 is a repository. ``names``: as for ``served_name``."""
    base, adapter = _split(name, names)
    if adapter:
        options.adapter = adapter.removesuffix(_TAG)
    options.model = served_name(base, names)


def _split(name: str, names: Sequence[str]) -> tuple[str, str]:
    """The name of a model, and that of an adapter or ""."""
    if name in names:
        return name, ""
    for base in sorted(names, key=len, reverse=True):
        if name.startswith(f"{base}/"):
            return base, name.removeprefix(f"{base}/")
    base, _, adapter = name.partition("/")
    if base in ALIASES and ("@" in adapter or "/" in adapter):
        return base, adapter
    return name, ""
