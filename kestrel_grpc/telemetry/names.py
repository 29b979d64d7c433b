"""Names of telemetry: spans, attributes that several modules set, and all metrics with their units and buckets.

The names follow OpenTelemetry's conventions for rpc (release candidate) and generative AI (development) as of November
2026. Names without a convention begin with ``kestrel.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
OPERATION_OF_STORE = "kestrel.operation"


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
_TABLE = """
histogram rpc.server.call.duration long by rpc.system.name rpc.method rpc.response.status_code error.type: Duration of
    calls from first byte to status: of kestrel.v1, and refused calls of other services; _OTHER: unknown method
histogram gen_ai.server.request.duration long by GEN_AI error.type: Duration of the engine's requests, from acceptance
    to end
histogram gen_ai.server.time_to_first_token first by GEN_AI: Time from acceptance to first token
histogram gen_ai.server.time_per_output_token token by GEN_AI: Mean time between the tokens of a request, after its
    first token
histogram kestrel.token.gap.duration token: Time between two tokens of a request, measured on the step thread
histogram kestrel.request.queue.duration phase by kestrel.skill: Time that a request waits for a place in the batch,
    without preprocessing
histogram kestrel.request.preprocess.duration phase by kestrel.skill: Time to decode and tile an image; without a skill
    for Analyze, PutImage and UploadImage, which prepare it first
histogram kestrel.request.prefill.duration phase by kestrel.skill: Time from the first schedule to the first token,
    including vision
histogram kestrel.request.decode.duration long by kestrel.skill: Time from the first token to the last
histogram kestrel.step.phase.duration phase by kestrel.phase: Time of the device for one phase of a step: vision,
    prefill or decode
counter kestrel.requests {request} by gen_ai.request.model kestrel.adapter kestrel.skill kestrel.finish_reason
    error.type: Finished requests of the engine, by finish reason: stop, length, cancelled or error
counter kestrel.tokens {token} by gen_ai.request.model kestrel.adapter gen_ai.token.type: Tokens of finished requests:
    input (positions, including images) and output
counter kestrel.tokens.reasoning {token}: Output tokens of finished requests that were reasoning
counter kestrel.principal.calls {call} by kestrel.principal: Calls by principal: the first 100 by name, all others as
    'other', callers without credentials as ''
counter kestrel.principal.tokens {token} by kestrel.principal gen_ai.token.type: Tokens of the calls that ended with OK,
    by principal
counter kestrel.usage.tokens {token} by kestrel.principal gen_ai.request.model kestrel.adapter gen_ai.token.type: Tokens
    of the engine's requests that were scheduled, also of cancelled ones: input (positions), image and cached (parts of
    input), and output; after 1000 combinations, further ones have the principal and the adapter 'other'
counter kestrel.usage.device_time s by kestrel.principal gen_ai.request.model kestrel.adapter: Time of the device that
    belongs to these requests: decoding by rows, prefill by positions, vision by crops
counter kestrel.budget.exceeded {request} by kestrel.principal kestrel.window: Requests that were refused because of a
    budget of tokens (--token-budget), or would have been in shadow, by window: minute or day
counter kestrel.calls.unauthorized {call} by kestrel.reason: Calls that ended with UNAUTHENTICATED or PERMISSION_DENIED,
    by the reason in their error
counter kestrel.frames {frame} by kestrel.outcome: Frames of StreamFrames, by outcome: answered, repeated (with the
    results of an equal frame), overview (answered with the overview only), dropped or failed
counter kestrel.shared_images.operations {operation} by kestrel.operation kestrel.outcome: Operations on the shared
    image store, by operation (get, put, delete, check) and outcome: hit, miss, gone (deleted at another server),
    damaged, stored, deleted, too_large, full (too many bytes on the way), failed or paused (not tried after failures)
counter kestrel.shared_images.transferred By by kestrel.operation: Bytes of values that were read from (get) and written
    to (put) the shared image store
histogram kestrel.shared_images.duration phase by kestrel.operation: Time of an operation on the shared image store, if
    it was tried
gauge kestrel.shared_images.used 1: 1 while the shared image store is used, 0 while it is left alone after failures;
    absent without --shared-images
counter kestrel.step.tokens {token}: Tokens that steps have sampled, for finished and unfinished requests
counter kestrel.step.shared.rows {row}: Rows of steps whose positions in common with other rows, such as those of an
    image, were read once for all
counter kestrel.step.shared.groups {group}: Groups of such rows; the mean size of a group is kestrel.step.shared.rows
    divided by this
counter kestrel.masks {mask} by gen_ai.request.model: Masks of the tokens that constraints permit, one for each token of
    a constrained answer except the first
counter kestrel.masks.time s by gen_ai.request.model: Processor time to follow constraints and to compute their masks
counter kestrel.steps {step} by kestrel.failed: Steps that the device has finished
counter kestrel.crops {crop}: Crops of images that were encoded
counter kestrel.crops.reused {crop}: Crops of images that were equal to earlier crops
counter kestrel.prefill.positions {position}: Prompt positions computed
counter kestrel.prompt.positions {position} by gen_ai.request.model: Prompt positions of admitted requests
counter kestrel.prefix_cache.hit.positions {position} by gen_ai.request.model: Prompt positions that the prefix cache
    supplied
counter kestrel.preemptions {preemption} by gen_ai.request.model: Requests preempted because no page was free
gauge kestrel.requests.running {request} by gen_ai.request.model: Requests in the batch
gauge kestrel.requests.waiting {request} by gen_ai.request.model: Accepted requests that are not in the batch
gauge kestrel.principals.active {principal} by gen_ai.request.model: Principals with accepted requests
gauge kestrel.places.largest 1 by gen_ai.request.model: Largest share of all places for requests that one principal
    holds
counter kestrel.requests.displaced {request} by gen_ai.request.model: Waiting requests that lost their place to another
    principal's request
gauge kestrel.calls.active {call}: Calls in progress
gauge kestrel.connections.open {connection}: TCP connections to the addresses of --listen; Linux only
gauge kestrel.connections.limit {connection}: Limit on connections (--max-connections); absent without a limit
counter kestrel.connections.ended {connection} by kestrel.reason: Connections that the server ended: address_limit,
    unexplained_bytes, large_headers or idle (docs/run/security.md)
gauge kestrel.streams.open {call}: Calls in progress of all services, including health and reflection
gauge kestrel.streams.limit {call}: Limit on calls in progress on one connection
gauge kestrel.files.open {file}: Open files of this process: connections and a few dozen others
gauge kestrel.files.limit {file}: Limit on open files of this process (RLIMIT_NOFILE); absent without a limit
gauge kestrel.kv.pages {page} by gen_ai.request.model kestrel.kv.state: Pages of the KV cache: free, cached (in the
    prefix cache, in use or not), private (of one running request)
gauge kestrel.kv.usage 1 by gen_ai.request.model: Share of the pages of the KV cache that requests use, from 0 to 1; new
    requests may take the other pages
gauge kestrel.lora_requests_info 1 by gen_ai.request.model max_lora running_lora_adapters waiting_lora_adapters:
    Adapters, for routers. The value is the time of the scrape. The attributes say how many adapters fit, and name up to
    64 that are loaded and up to 64 that are being loaded
gauge kestrel.adapters.loaded {adapter} by gen_ai.request.model: Adapters in the memory of the device
gauge kestrel.adapters.used {adapter} by gen_ai.request.model: Loaded adapters that requests use
gauge kestrel.adapters.memory By by gen_ai.request.model kestrel.memory: Memory of adapters: of the device, or of the
    host, ready to be copied to the device
counter kestrel.adapters.loads {adapter} by gen_ai.request.model kestrel.failed: Adapters that were loaded, or could not
    be
gauge kestrel.model.load.duration s by gen_ai.request.model: Time to load the model; of the first one, to start the
    server
gauge kestrel.model.load.phase.duration s by gen_ai.request.model kestrel.phase: Parts of the time to load: weights,
    build (packing, KV pool), capture (CUDA graphs and kernels), warm_up (rest)
counter kestrel.kernels {kernel} by kestrel.cached: Kernels that Triton has compiled or loaded from its disk cache since
    the process began
counter kestrel.kernels.compile.time s: Time to compile or load kernels; steps wait for it
counter kestrel.log.lost {record}: Log records that were dropped because the reader was too slow, or that could not be
    written
gauge kestrel.audit.waiting {record}: Records of administrative calls that could not be written yet; such calls are
    refused until they are; absent without --audit-log
gauge kestrel.ready 1: 1 while the server accepts requests, else 0
"""
"""A metric a row: kind, name, unit (of a histogram, which is in seconds: its buckets), attributes, description. GEN_AI
stands for _GEN_AI."""
_ROW = re.compile(r"(\w+) (\S+) (\S+?)(?: by ([\w. ]+))?: (.+)")


def _metrics() -> Iterator[Metric]:
    for row in _TABLE.strip().replace("\n    ", " ").split("\n"):
        found = _ROW.fullmatch(row)
        assert found is not None and found[1] in get_args(Kind), row
        kind, name, unit, by, text = found.groups("")
        attributes = by.replace("GEN_AI", " ".join(_GEN_AI)).split()
        buckets = _BUCKETS[unit] if kind == "histogram" else ()
        unit = "s" if kind == "histogram" else unit
        yield Metric(name, cast(Kind, kind), unit, text, tuple(attributes), buckets)


METRICS = {metric.name: metric for metric in _metrics()}
"""All metrics by name, in the order above."""
