"""Names of telemetry: spans, attributes that several modules set, and all metrics (metrics.txt) with their buckets.

The names follow OpenTelemetry's conventions for rpc (release candidate) and generative AI (development) as of November
2026. Names without a convention begin with ``kestrel.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

SCOPE = "kestrel_grpc"

# Spans. The name of a call's span is its method; a request's span is named "generate_content MODEL".
IMAGE_PREPROCESS = "image.preprocess"
QUEUE = "queue"
VISION = "vision.encode"
PREFILL = "prefill"
DECODE = "decode"
POSTPROCESS = "postprocess"
STEP = "step"

# Events of a call's span.
CANCELLED = "cancelled"
DEADLINE_EXCEEDED = "deadline_exceeded"

# rpc.*
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
ERROR_TYPE = "error.type"
PEER_ADDRESS = "network.peer.address"

# gen_ai.*
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
PROVIDER_VALUE = "moondream"
REQUEST_MODEL = "gen_ai.request.model"

# kestrel.*
SKILL = "kestrel.skill"
IMAGE_WIDTH = "kestrel.image.width"
IMAGE_HEIGHT = "kestrel.image.height"
IMAGE_CROPS = "kestrel.image.crops"
PREPROCESS_SECONDS = "kestrel.image.preprocess_s"
PHASE = "kestrel.phase"
PAGE_STATE = "kestrel.kv.state"
FAILED = "kestrel.failed"
ADAPTER = "kestrel.adapter"
MEMORY_KIND = "kestrel.memory"
MAX_LORA, RUNNING_LORA, WAITING_LORA = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
"""Labels that routers of inference gateways read."""
CACHED = "kestrel.cached"
REASON = "kestrel.reason"
PRINCIPAL, WINDOW = "kestrel.principal", "kestrel.window"


Kind = Literal["histogram", "counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``buckets``: upper bounds of a histogram. ``attributes``: all attributes that its points may have."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The metric's name in Prometheus. The series of a histogram add _bucket, _sum and _count."""
        name = self.name.replace(".", "_")
        name += {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name + "_total" if self.kind == "counter" else name


_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds of a whole request: the convention's buckets, and larger ones."""
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)  # fmt: skip
_TOKEN = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
_PHASE = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

_GEN_AI = (OPERATION, PROVIDER, REQUEST_MODEL, SKILL, ADAPTER)


_BUCKETS = {"long": _LONG, "first": _FIRST, "token": _TOKEN, "phase": _PHASE}
_TABLE = Path(__file__).with_name("metrics.txt")
"""A metric a row: kind, name, unit (of a histogram, which is in seconds: its buckets), attributes, description. GEN_AI
stands for _GEN_AI."""
_ROW = re.compile(r"(\w+) (\S+) (\S+?)(?: by ([\w. ]+))?: (.+)")


def _metrics() -> Iterator[Metric]:
    for row in _TABLE.read_text("utf-8").strip().replace("\n    ", " ").split("\n"):
        found = _ROW.fullmatch(row)
        assert found is not None and found[1] in get_args(Kind), row
        kind, name, unit, by, text = found.groups("")
        attributes = by.replace("GEN_AI", " ".join(_GEN_AI)).split()
        buckets = _BUCKETS[unit] if kind == "histogram" else ()
        unit = "s" if kind == "histogram" else unit
        yield Metric(name, cast(Kind, kind), unit, text, tuple(attributes), buckets)


METRICS = {metric.name: metric for metric in _metrics()}
"""All metrics by name, in the order above."""
