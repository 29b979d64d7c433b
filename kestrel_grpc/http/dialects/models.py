"""The model names in HTTP requests."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_client._pb.kestrel.v1 import common_pb2

from ...model_names import is_alias, split_name

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
    return names[0] if is_alias(name.partition(":")[0]) else name


def set_model(options: common_pb2.RequestOptions, name: str, names: Sequence[str]) -> None:
    """Sets model and adapter. ``name``: a model's, or with an adapter's behind it, MODEL/ADAPTER (`split_name`).
    ``names``: as for ``served_name``."""
    base, adapter = split_name(name, names)
    if adapter:
        options.adapter = adapter.removesuffix(_TAG)
    options.model = served_name(base, names)
