"""The model names in requests. Owns the names that stand for the default model, and those of adapters behind a model's.

A request may name an adapter in its model: MODEL/ADAPTER, such as moondream3-preview/01J5@1000. A name of the hub has a
slash too, so only the names of the served models tell what such a name means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kestrel_engine import InvalidRequest, checked_adapter_name

if TYPE_CHECKING:  # served_model.py, which has these names too, uses no protobuf.
    from kestrel_client._pb.kestrel.v1 import common_pb2

ALIASES = frozenset(
    {
        *("moondream", "moondream2", "moondream3", "moondream3-preview", "moondream-2b"),
        *("vikhyatk/moondream2", "moondream/moondream2", "moondream/moondream3-preview"),
    }
)
"""Names that clients send by default, in lower case: those of Moondream's, Ollama's and the hub's models. In a request
they stand for the default model, unless a served model has such a name."""


def is_alias(name: str) -> bool:
    return name.lower() in ALIASES


_LONGEST_FIRST = sorted(ALIASES, key=len, reverse=True)

MOST_CHARACTERS = 512
"""Limit on the name of a model in a request, with that of an adapter behind it."""


def split_name(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Returns the name of a model, and that of an adapter or "". ``names``: those of the served models.

    Behind an alias, the adapter's name must have a step (moondream3-preview/ID@STEP) or be a repository of the hub
    (moondream3/ORG/REPO), because moondream/NAME may be a repository.
    """
    if name in names:
        return name, ""
    for base in sorted(names, key=len, reverse=True):
        if name.startswith(f"{base}/"):
            return base, name.removeprefix(f"{base}/")
    for base in _LONGEST_FIRST:
        adapter = name[len(base) + 1 :]
        if name.lower().startswith(f"{base}/") and ("@" in adapter or "/" in adapter):
            return base, adapter
    return name, ""


def split_model(options: common_pb2.RequestOptions | None, names: Sequence[str]) -> None:
    """Moves an adapter's name from the field model to the field adapter. ``names``: as for `split_name`. Raises
    InvalidRequest."""
    if options is None or len(options.model) > MOST_CHARACTERS:  # The service refuses it.
        return
    base, adapter = split_name(options.model, names)
    if not adapter:
        return
    if options.HasField("adapter"):
        raise InvalidRequest(
            "model",
            f"{options.model!r} names an adapter, and the field adapter names {options.adapter!r}; name one adapter",
        )
    try:
        options.adapter = checked_adapter_name(adapter)
    except InvalidRequest as error:
        raise InvalidRequest("model", f"{options.model!r}: {error.message}") from None
    options.model = base
