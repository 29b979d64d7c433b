"""Every exported name of telemetry: spans, attributes, and metrics with their units and buckets.

The names follow OpenTelemetry's conventions for rpc (release candidate) and generative AI (development) as of November
2026. Names without a convention begin with ``kestrel.``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCOPE = "kestrel_grpc"

# Spans. The name of a call's span is its method; a request's span is named "generate_content MODEL".
GENERATE = "generate_content"
EMBED = "embeddings"
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
RPC_STATUS_NEXT = "rpc.status_code"
"""The name of RPC_STATUS in the next release of the conventions. Spans have both."""
ERROR_TYPE = "error.type"
PEER_ADDRESS = "network.peer.address"
PEER_PORT = "network.peer.port"

# gen_ai.*
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
PROVIDER_VALUE = "moondream"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
IMAGE_TOKENS = "gen_ai.usage.image.input_tokens"
OUTPUT_TYPE = "gen_ai.output.type"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOKEN_TYPE = "gen_ai.token.type"

# kestrel.*
REQUEST_ID = "kestrel.request.id"
PRINCIPAL = "kestrel.principal"
SKILL = "kestrel.skill"
FINISH_REASON = "kestrel.finish_reason"
IMAGE_WIDTH = "kestrel.image.width"
IMAGE_HEIGHT = "kestrel.image.height"
IMAGE_CROPS = "kestrel.image.crops"
IMAGE_REUSED_CROPS = "kestrel.image.reused_crops"
PREPROCESS_SECONDS = "kestrel.image.preprocess_s"
STEP_ID = "kestrel.step.id"
STEP_REQUESTS = "kestrel.step.requests"
STEP_CROPS = "kestrel.step.crops"
STEP_REUSED_CROPS = "kestrel.step.reused_crops"
STEP_PREFILL = "kestrel.step.prefill_positions"
STEP_DECODE = "kestrel.step.decode_rows"
STEP_SHARED_ROWS = "kestrel.step.shared_rows"
STEP_SHARED_GROUPS = "kestrel.step.shared_groups"
STEP_MASKED_ROWS = "kestrel.step.masked_rows"
STEP_VISION_S = "kestrel.step.vision_s"
STEP_PREFILL_S = "kestrel.step.prefill_s"
STEP_DECODE_S = "kestrel.step.decode_s"
STEP_RUNNING = "kestrel.step.running"
STEP_WAITING = "kestrel.step.waiting"
PHASE = "kestrel.phase"
PAGE_STATE = "kestrel.kv.state"
FAILED = "kestrel.failed"
ADAPTER = "kestrel.adapter"
MEMORY_KIND = "kestrel.memory"
MAX_LORA, RUNNING_LORA, WAITING_LORA = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
"""Labels that routers of inference gateways read."""
CACHED = "kestrel.cached"
REASON = "kestrel.reason"
OUTCOME = "kestrel.outcome"
OPERATION_OF_STORE = "kestrel.operation"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``buckets``: upper bounds of a histogram. ``attributes``: all attributes that its points may have."""

    name: str
    kind: Literal["histogram", "counter", "gauge"]
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


def _histogram(
    name: str, description: str, buckets: tuple[float, ...], attributes: tuple[str, ...] = ()
) -> Metric:
    """Of durations, in seconds."""
    return Metric(name, "histogram", "s", description, attributes, buckets)


def _counter(name: str, unit: str, description: str, attributes: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", unit, description, attributes)


def _gauge(name: str, unit: str, description: str, attributes: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "gauge", unit, description, attributes)


CALL_DURATION = _histogram(
    "rpc.server.call.duration",
    "Duration of calls from first byte to status: of kestrel.v1, and refused calls of other services; _OTHER: unknown "
    "method",
    _LONG,
    (RPC_SYSTEM, RPC_METHOD, RPC_STATUS, ERROR_TYPE),
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "Duration of the engine's requests, from acceptance to end",
    _LONG,
    (*_GEN_AI, ERROR_TYPE),
)
FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token", "Time from acceptance to first token", _FIRST, _GEN_AI
)
PER_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "Mean time between the tokens of a request, after its first token",
    _TOKEN,
    _GEN_AI,
)
TOKEN_GAP = _histogram(
    "kestrel.token.gap.duration",
    "Time between two tokens of a request, measured on the step thread",
    _TOKEN,
)
QUEUE_DURATION = _histogram(
    "kestrel.request.queue.duration",
    "Time that a request waits for a place in the batch, without preprocessing",
    _PHASE,
    (SKILL,),
)
PREPROCESS_DURATION = _histogram(
    "kestrel.request.preprocess.duration",
    "Time to decode and tile an image; without a skill for Analyze, PutImage and UploadImage, which prepare it first",
    _PHASE,
    (SKILL,),
)
PREFILL_DURATION = _histogram(
    "kestrel.request.prefill.duration",
    "Time from the first schedule to the first token, including vision",
    _PHASE,
    (SKILL,),
)
DECODE_DURATION = _histogram(
    "kestrel.request.decode.duration", "Time from the first token to the last", _LONG, (SKILL,)
)
STEP_DURATION = _histogram(
    "kestrel.step.phase.duration",
    "Time of the device for one phase of a step: vision, prefill or decode",
    _PHASE,
    (PHASE,),
)
REQUESTS = _counter(
    "kestrel.requests",
    "{request}",
    "Finished requests of the engine, by finish reason: stop, length, cancelled or error",
    (REQUEST_MODEL, ADAPTER, SKILL, FINISH_REASON, ERROR_TYPE),
)
TOKENS = _counter(
    "kestrel.tokens",
    "{token}",
    "Tokens of finished requests: input (positions, including images) and output",
    (REQUEST_MODEL, ADAPTER, TOKEN_TYPE),
)
REASONING = _counter(
    "kestrel.tokens.reasoning", "{token}", "Output tokens of finished requests that were reasoning"
)
PRINCIPAL_CALLS = _counter(
    "kestrel.principal.calls",
    "{call}",
    "Calls by principal: the first 100 by name, all others as 'other', callers without credentials as ''",
    (PRINCIPAL,),
)
PRINCIPAL_TOKENS = _counter(
    "kestrel.principal.tokens",
    "{token}",
    "Tokens of the calls that ended with OK, by principal",
    (PRINCIPAL, TOKEN_TYPE),
)
UNAUTHORIZED_CALLS = _counter(
    "kestrel.calls.unauthorized",
    "{call}",
    "Calls that ended with UNAUTHENTICATED or PERMISSION_DENIED, by the reason in their error",
    (REASON,),
)
FRAMES = _counter(
    "kestrel.frames",
    "{frame}",
    "Frames of StreamFrames, by outcome: answered, repeated (with the results of an equal frame), overview (answered "
    "with the overview only), dropped or failed",
    (OUTCOME,),
)
SHARED_IMAGES = _counter(
    "kestrel.shared_images.operations",
    "{operation}",
    "Operations on the shared image store, by operation (get, put, delete, check) and outcome: hit, miss, gone "
    "(deleted at another server), damaged, stored, deleted, too_large, full (too many bytes on the way), failed or "
    "paused (not tried after failures)",
    (OPERATION_OF_STORE, OUTCOME),
)
SHARED_IMAGE_BYTES = _counter(
    "kestrel.shared_images.transferred",
    "By",
    "Bytes of values that were read from (get) and written to (put) the shared image store",
    (OPERATION_OF_STORE,),
)
SHARED_IMAGE_DURATION = _histogram(
    "kestrel.shared_images.duration",
    "Time of an operation on the shared image store, if it was tried",
    _PHASE,
    (OPERATION_OF_STORE,),
)
SHARED_IMAGES_USED = _gauge(
    "kestrel.shared_images.used",
    "1",
    "1 while the shared image store is used, 0 while it is left alone after failures; absent without --shared-images",
)
STEP_TOKENS = _counter(
    "kestrel.step.tokens",
    "{token}",
    "Tokens that steps have sampled, for finished and unfinished requests",
)
SHARED_ROWS = _counter(
    "kestrel.step.shared.rows",
    "{row}",
    "Rows of steps whose positions in common with other rows, such as those of an image, were read once for all",
)
SHARED_GROUPS = _counter(
    "kestrel.step.shared.groups",
    "{group}",
    "Groups of such rows; the mean size of a group is kestrel.step.shared.rows divided by this",
)
MASKS = _counter(
    "kestrel.masks",
    "{mask}",
    "Masks of the tokens that constraints permit, one for each token of a constrained answer except the first",
    (REQUEST_MODEL,),
)
MASK_TIME = _counter(
    "kestrel.masks.time",
    "s",
    "Processor time to follow constraints and to compute their masks",
    (REQUEST_MODEL,),
)
STEPS = _counter("kestrel.steps", "{step}", "Steps that the device has finished", (FAILED,))
CROPS = _counter("kestrel.crops", "{crop}", "Crops of images that were encoded")
REUSED_CROPS = _counter(
    "kestrel.crops.reused", "{crop}", "Crops of images that were equal to earlier crops"
)
PREFILL_POSITIONS = _counter("kestrel.prefill.positions", "{position}", "Prompt positions computed")
PROMPT_POSITIONS = _counter(
    "kestrel.prompt.positions",
    "{position}",
    "Prompt positions of admitted requests",
    (REQUEST_MODEL,),
)
CACHED_POSITIONS = _counter(
    "kestrel.prefix_cache.hit.positions",
    "{position}",
    "Prompt positions that the prefix cache supplied",
    (REQUEST_MODEL,),
)
PREEMPTIONS = _counter(
    "kestrel.preemptions",
    "{preemption}",
    "Requests preempted because no page was free",
    (REQUEST_MODEL,),
)
RUNNING = _gauge("kestrel.requests.running", "{request}", "Requests in the batch", (REQUEST_MODEL,))
WAITING = _gauge(
    "kestrel.requests.waiting",
    "{request}",
    "Accepted requests that are not in the batch",
    (REQUEST_MODEL,),
)
PRINCIPALS = _gauge(
    "kestrel.principals.active",
    "{principal}",
    "Principals with accepted requests",
    (REQUEST_MODEL,),
)
LARGEST_SHARE = _gauge(
    "kestrel.places.largest",
    "1",
    "Largest share of all places for requests that one principal holds",
    (REQUEST_MODEL,),
)
DISPLACED = _counter(
    "kestrel.requests.displaced",
    "{request}",
    "Waiting requests that lost their place to another principal's request",
    (REQUEST_MODEL,),
)
CALLS = _gauge("kestrel.calls.active", "{call}", "Calls in progress")
CONNECTIONS = _gauge(
    "kestrel.connections.open",
    "{connection}",
    "TCP connections to the addresses of --listen; Linux only",
)
CONNECTIONS_LIMIT = _gauge(
    "kestrel.connections.limit",
    "{connection}",
    "Limit on connections (--max-connections); absent without a limit",
)
ENDED_CONNECTIONS = _counter(
    "kestrel.connections.ended",
    "{connection}",
    "Connections that the server ended: address_limit, unexplained_bytes, large_headers or idle (docs/run/security.md)",
    (REASON,),
)
STREAMS = _gauge(
    "kestrel.streams.open",
    "{call}",
    "Calls in progress of all services, including health and reflection",
)
STREAMS_LIMIT = _gauge(
    "kestrel.streams.limit", "{call}", "Limit on calls in progress on one connection"
)
FILES = _gauge(
    "kestrel.files.open", "{file}", "Open files of this process: connections and a few dozen others"
)
FILES_LIMIT = _gauge(
    "kestrel.files.limit",
    "{file}",
    "Limit on open files of this process (RLIMIT_NOFILE); absent without a limit",
)
KV_PAGES = _gauge(
    "kestrel.kv.pages",
    "{page}",
    "Pages of the KV cache: free, cached (in the prefix cache, in use or not), private (of one running request)",
    (REQUEST_MODEL, PAGE_STATE),
)
KV_USAGE = _gauge(
    "kestrel.kv.usage",
    "1",
    "Share of the pages of the KV cache that requests use, from 0 to 1; new requests may take the other pages",
    (REQUEST_MODEL,),
)
LORA_INFO = _gauge(
    "kestrel.lora_requests_info",
    "1",
    "Adapters, for routers. The value is the time of the scrape. The attributes say how many adapters fit, and name up "
    "to 64 that are loaded and up to 64 that are being loaded",
    (REQUEST_MODEL, MAX_LORA, RUNNING_LORA, WAITING_LORA),
)
ADAPTERS = _gauge(
    "kestrel.adapters.loaded", "{adapter}", "Adapters in the memory of the device", (REQUEST_MODEL,)
)
ADAPTERS_USED = _gauge(
    "kestrel.adapters.used", "{adapter}", "Loaded adapters that requests use", (REQUEST_MODEL,)
)
ADAPTER_MEMORY = _gauge(
    "kestrel.adapters.memory",
    "By",
    "Memory of adapters: of the device, or of the host, ready to be copied to the device",
    (REQUEST_MODEL, MEMORY_KIND),
)
ADAPTER_LOADS = _counter(
    "kestrel.adapters.loads",
    "{adapter}",
    "Adapters that were loaded, or could not be",
    (REQUEST_MODEL, FAILED),
)
LOAD_DURATION = _gauge(
    "kestrel.model.load.duration",
    "s",
    "Time to load the model; of the first one, to start the server",
    (REQUEST_MODEL,),
)
LOAD_PHASE = _gauge(
    "kestrel.model.load.phase.duration",
    "s",
    "Parts of the time to load: weights, build (packing, KV pool), capture (CUDA graphs and kernels), warm_up (rest)",
    (REQUEST_MODEL, PHASE),
)
KERNELS = _counter(
    "kestrel.kernels",
    "{kernel}",
    "Kernels that Triton has compiled or loaded from its disk cache since the process began",
    (CACHED,),
)
COMPILE_TIME = _counter(
    "kestrel.kernels.compile.time", "s", "Time to compile or load kernels; steps wait for it"
)
LOST_RECORDS = _counter(
    "kestrel.log.lost",
    "{record}",
    "Log records that were dropped because the reader was too slow, or that could not be written",
)
READY = _gauge("kestrel.ready", "1", "1 while the server accepts requests, else 0")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order above."""
