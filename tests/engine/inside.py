"""What tests see of an engine's inside. The engine keeps its parts to itself; this is the one place that knows them."""

from typing import Any, NamedTuple

from kestrel_engine import InferenceEngine


class Inside(NamedTuple):
    loop: Any
    submitter: Any
    built: Any
    delivery: Any
    lifetime: Any
    open_requests: Any


def inside(engine: InferenceEngine) -> Inside:
    parts = (engine._loop, engine._submitter, engine._built)
    return Inside(*parts, engine._delivery, engine._lifetime, engine._open)
