"""The model names in requests by HTTP, whose clients send names of their own. Owns the names that stand for the default
model, and those of adapters behind a model's.

A request by HTTP may name an adapter in its model: MODEL/ADAPTER, such as moondream3-preview/01J5@1000. A name of the
hub has a slash too, so only the names of the served models tell what such a name means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2

from ...service_names import MODEL_METHODS
from ...services.model import ModelService
from ..edge import Endpoint, ServiceCall
from ..forms import SSE, Form

_TAG = ":latest"
"""Clients of Ollama may add it to every name."""

_ALIASES = frozenset(
    {
        *("moondream", "moondream2", "moondream3", "moondream3-preview", "moondream-2b"),
        *("moondream3.1", "moondream3.1-9b-a2b", "moondream/moondream3.1-9b-a2b"),
        *("vikhyatk/moondream2", "moondream/moondream2", "moondream/moondream3-preview"),
    }
)
"""Names that clients send by default, in lower case: those of Moondream's, Ollama's and the hub's models. In a request
they stand for the served model with the same last part, or else for the default model."""


_LONGEST_FIRST = sorted(_ALIASES, key=len, reverse=True)


def served_name(name: str, names: Sequence[str]) -> str:
    """Returns the model for which an alias stands, else ``name``, which the service checks. ``names``: those of the
    served models, the default first."""
    if name in names:
        return name
    untagged = name.removesuffix(_TAG)
    if untagged in names:
        return untagged
    alias = name.partition(":")[0].lower()
    if alias not in _ALIASES:
        return name
    return next((each for each in names if _last(each.lower()) == _last(alias)), names[0])


def _last(name: str) -> str:
    """The name without the organisation."""
    return name.rpartition("/")[2]


def listing(models: ModelService, answer: Callable[[Any], Any], form: Form = SSE) -> Endpoint:
    """Answers with the list of the served models. ``answer`` converts a ListModelsResponse."""
    request = model_service_pb2.ListModelsRequest()
    return Endpoint(
        f"{MODEL_METHODS}ListModels",
        lambda fields: ServiceCall(request, models.ListModels, answer),
        takes_body=False,
        form=form,
    )


def set_model(options: common_pb2.RequestOptions, name: str, names: Sequence[str]) -> None:
    """Sets model and adapter. ``name``: a model's, or with an adapter's behind it, MODEL/ADAPTER (`_split`).
    ``names``: as for ``served_name``."""
    base, adapter = _split(name, names)
    if adapter:
        options.adapter = adapter.removesuffix(_TAG)
    options.model = served_name(base, names)


def _split(name: str, names: Sequence[str]) -> tuple[str, str]:
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
