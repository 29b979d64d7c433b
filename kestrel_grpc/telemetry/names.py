"""Every name that telemetry gives away: spans, attributes, metrics with their units and buckets.

Names of OpenTelemetry's conventions for rpc (release candidate) and generative AI (development) as of November 2026;
what has no convention begins with ``kestrel.``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCOPE = "kestrel_grpc"

# Spans. The server's is named like its method, the generation's "generate_content MODEL".
GENERATE = "generate_content"
IMAGE_PREPROCESS = "image.preprocess"
QUEUE = "queue"
VISION = "vision.encode"
PREFILL = "prefill"
DECODE = "decode"
POSTPROCESS = "postprocess"
STEP = "step"

# Events of the server's span.
CANCELLED = "cancelled"
DEADLINE_EXCEEDED = "deadline_exceeded"

# rpc.*
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
RPC_STATUS_NEXT = "rpc.status_code"
"""What the next release of the conventions calls RPC_STATUS; spans carry both."""
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
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
IMAGE_TOKENS = "gen_ai.usage.image.input_tokens"
OUTPUT_TYPE = "gen_ai.output.type"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOKEN_TYPE = "gen_ai.token.type"

# Ours.
REQUEST_ID = "kestrel.request.id"
PRINCIPAL = "kestrel.principal"
SKILL = "kestrel.skill"
FINISH_REASON = "kestrel.finish_reason"
IMAGE_WIDTH = "kestrel.image.width"
IMAGE_HEIGHT = "kestrel.image.height"
IMAGE_CROPS = "kestrel.image.crops"
PREPROCESS_SECONDS = "kestrel.image.preprocess_s"
STEP_ID = "kestrel.step.id"
STEP_REQUESTS = "kestrel.step.requests"
STEP_CROPS = "kestrel.step.crops"
STEP_PREFILL = "kestrel.step.prefill_positions"
STEP_DECODE = "kestrel.step.decode_rows"
STEP_VISION_S = "kestrel.step.vision_s"
STEP_PREFILL_S = "kestrel.step.prefill_s"
STEP_DECODE_S = "kestrel.step.decode_s"
STEP_RUNNING = "kestrel.step.running"
STEP_WAITING = "kestrel.step.waiting"
PHASE = "kestrel.phase"
PAGE_STATE = "kestrel.kv.state"
FAILED = "kestrel.failed"
CACHED = "kestrel.cached"
REASON = "kestrel.reason"


@dataclass(frozen=True, slots=True)
class Metric:
    """``buckets``: upper bounds of a histogram. ``attributes``: all that its points may have."""

    name: str
    kind: Literal["histogram", "counter", "gauge"]
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As the Prometheus endpoint calls it; a histogram's series add _bucket, _sum and _count."""
        name = self.name.replace(".", "_")
        if self.unit == "s":
            name += "_seconds"
        return name + "_total" if self.kind == "counter" else name


_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds of a whole request: the convention's, and more above."""
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)  # fmt: skip
_TOKEN = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
_PHASE = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

_GEN_AI = (OPERATION, PROVIDER, REQUEST_MODEL, SKILL)

CALL_DURATION = Metric(
    "rpc.server.call.duration",
    "histogram",
    "s",
    "Calls of kestrel.v1 from first byte to status, and refused ones of other services; _OTHER: no such method",
    (RPC_SYSTEM, RPC_METHOD, RPC_STATUS, ERROR_TYPE),
    _LONG,
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "Requests of the engine, accepted to ended",
    (*_GEN_AI, ERROR_TYPE),
    _LONG,
)
FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "Accepted to first token",
    _GEN_AI,
    _FIRST,
)
PER_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "Mean time between the tokens of one request after its first",
    _GEN_AI,
    _TOKEN,
)
TOKEN_GAP = Metric(
    "kestrel.token.gap.duration",
    "histogram",
    "s",
    "Every gap between two tokens of a request, as the step thread sees them come",
    (),
    _TOKEN,
)
QUEUE_DURATION = Metric(
    "kestrel.request.queue.duration",
    "histogram",
    "s",
    "Waiting for a place in the batch, preprocessing not counted",
    (SKILL,),
    _PHASE,
)
PREPROCESS_DURATION = Metric(
    "kestrel.request.preprocess.duration",
    "histogram",
    "s",
    "Decoding and tiling a picture; no skill where that is done ahead of its requests: Analyze, PutImage, UploadImage",
    (SKILL,),
    _PHASE,
)
PREFILL_DURATION = Metric(
    "kestrel.request.prefill.duration",
    "histogram",
    "s",
    "First scheduled to first token, vision included",
    (SKILL,),
    _PHASE,
)
DECODE_DURATION = Metric(
    "kestrel.request.decode.duration", "histogram", "s", "First token to last", (SKILL,), _LONG
)
STEP_DURATION = Metric(
    "kestrel.step.phase.duration",
    "histogram",
    "s",
    "The device's time in one phase of a step that has it: vision, prefill or decode",
    (PHASE,),
    _PHASE,
)
REQUESTS = Metric(
    "kestrel.requests",
    "counter",
    "{request}",
    "Requests of the engine that ended, by how: stop, length, cancelled or error",
    (SKILL, FINISH_REASON, ERROR_TYPE),
)
TOKENS = Metric(
    "kestrel.tokens",
    "counter",
    "{token}",
    "Tokens of ended requests: input (positions, pictures included) and output",
    (TOKEN_TYPE,),
)
PRINCIPAL_CALLS = Metric(
    "kestrel.principal.calls",
    "counter",
    "{call}",
    "Calls by who made them: the first 100 principals by name, the others as one, empty where nobody is asked",
    (PRINCIPAL,),
)
PRINCIPAL_TOKENS = Metric(
    "kestrel.principal.tokens",
    "counter",
    "{token}",
    "Tokens of the calls that ended well, by who made them",
    (PRINCIPAL, TOKEN_TYPE),
)
REFUSED_CALLS = Metric(
    "kestrel.calls.refused",
    "counter",
    "{call}",
    "Calls that ended with UNAUTHENTICATED or PERMISSION_DENIED, by the reason that their callers were told",
    (REASON,),
)
STEP_TOKENS = Metric(
    "kestrel.step.tokens",
    "counter",
    "{token}",
    "Tokens as steps sample them, whatever becomes of their requests",
)
STEPS = Metric("kestrel.steps", "counter", "{step}", "Steps that came back", (FAILED,))
CROPS = Metric("kestrel.crops", "counter", "{crop}", "Crops of pictures encoded")
PREFILL_POSITIONS = Metric(
    "kestrel.prefill.positions", "counter", "{position}", "Prompt positions computed"
)
PROMPT_POSITIONS = Metric(
    "kestrel.prompt.positions", "counter", "{position}", "Prompt positions of admitted requests"
)
CACHED_POSITIONS = Metric(
    "kestrel.prefix_cache.hit.positions",
    "counter",
    "{position}",
    "Prompt positions taken over from the prefix cache",
)
PREEMPTIONS = Metric(
    "kestrel.preemptions", "counter", "{preemption}", "Requests put back for want of pages"
)
RUNNING = Metric("kestrel.requests.running", "gauge", "{request}", "Requests in the batch")
WAITING = Metric(
    "kestrel.requests.waiting", "gauge", "{request}", "Requests accepted and not in the batch"
)
PRINCIPALS = Metric(
    "kestrel.principals.active", "gauge", "{principal}", "Principals that have requests accepted"
)
LARGEST_SHARE = Metric(
    "kestrel.places.largest",
    "gauge",
    "1",
    "Share of all places for requests that one principal holds, of the one that holds most",
)
DISPLACED = Metric(
    "kestrel.requests.displaced",
    "counter",
    "{request}",
    "Requests that waited and gave their place to another",
)
CALLS = Metric("kestrel.calls.active", "gauge", "{call}", "Calls that are being handled")
CONNECTIONS = Metric(
    "kestrel.connections.open",
    "gauge",
    "{connection}",
    "TCP connections to --listen; on Linux only",
)
CONNECTIONS_LIMIT = Metric(
    "kestrel.connections.limit",
    "gauge",
    "{connection}",
    "Connections that there may be (--max-connections); absent without a limit",
)
STREAMS = Metric(
    "kestrel.streams.open",
    "gauge",
    "{call}",
    "Calls in progress of all services, those that watch health or ask reflection included",
)
STREAMS_LIMIT = Metric(
    "kestrel.streams.limit",
    "gauge",
    "{call}",
    "Calls that may be in progress on one connection (--max-streams)",
)
FILES = Metric(
    "kestrel.files.open",
    "gauge",
    "{file}",
    "Files that this process has open: connections, and some dozens of its own",
)
FILES_LIMIT = Metric(
    "kestrel.files.limit",
    "gauge",
    "{file}",
    "Files that it may have open (RLIMIT_NOFILE); absent without a limit",
)
KV_PAGES = Metric(
    "kestrel.kv.pages",
    "gauge",
    "{page}",
    "Pages of the KV cache: free, cached (in the prefix cache, in use or not), private (of running requests alone)",
    (PAGE_STATE,),
)
LOAD_DURATION = Metric("kestrel.model.load.duration", "gauge", "s", "What loading the model took")
LOAD_PHASE = Metric(
    "kestrel.model.load.phase.duration",
    "gauge",
    "s",
    "Of that: weights, build (packing, KV pool), capture (CUDA graphs, kernels compiled for them), warm_up (the rest)",
    (PHASE,),
)
KERNELS = Metric(
    "kestrel.kernels",
    "counter",
    "{kernel}",
    "Kernels that Triton made ready since the process began: compiled, or found compiled on the disk",
    (CACHED,),
)
COMPILE_TIME = Metric(
    "kestrel.kernels.compile.time",
    "counter",
    "s",
    "What that took; while serving, steps wait for it",
)
LOST_RECORDS = Metric(
    "kestrel.log.lost",
    "counter",
    "{record}",
    "Log records that were dropped because nobody read them fast enough, or could not be written",
)
READY = Metric("kestrel.ready", "gauge", "1", "1 while requests are taken, else 0")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""
