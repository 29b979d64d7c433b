"""The span attributes of calls, requests and steps. This module does not import OpenTelemetry.

Only ``content`` returns questions and answers. Callers use it only if the operator has enabled content.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from kestrel_engine import EngineMetrics, ImageEvent, RequestEvent, StepEvent

from ..edge.calls.call import Call
from . import names

Value: TypeAlias = str | int | float | bool | tuple[str, ...]
Attributes: TypeAlias = dict[str, Value]

SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that count as errors of the server. OpenTelemetry's convention attributes the others to the caller."""

_TEXT_SKILLS = ("query", "caption")
_EMBED = "embed"
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
"""Fields of ``Sampling`` or of the task."""


def of_call(call: Call) -> Attributes:
    """The attributes of a finished call."""
    attributes: Attributes = {
        names.RPC_SYSTEM: "grpc",
        names.RPC_METHOD: call.method.removeprefix("/"),
        names.RPC_STATUS: call.code.name,
        "rpc.status_code": call.code.name,  # Its name in the next release of the conventions.
        "kestrel.request.id": call.request_id,
        **_of_peer(call.peer),
    }
    if call.principal.name:
        attributes["kestrel.principal"] = call.principal.name
    if call.frame:
        attributes["kestrel.outcome"] = call.frame
    if call.code in SERVER_ERRORS:
        attributes[names.ERROR_TYPE] = call.code.name
    return attributes


def _of_peer(peer: str) -> Attributes:
    """The attributes of a peer in grpc's form: "ipv4:1.2.3.4:50", "ipv6:%5B::1%5D:50" or "unix:PATH"."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return {names.PEER_ADDRESS: rest} if rest else {}
    return {names.PEER_ADDRESS: host.strip("[]"), "network.peer.port": int(port)}


def of_request(
    event: RequestEvent, call: Call, *, model: str, image_positions: int, streaming: bool
) -> Attributes:
    """The attributes of a finished request of the engine, which ``call`` made."""
    metrics, task = event.metrics, _task(call, event.skill)
    attributes: Attributes = {
        names.OPERATION: operation_of(event.skill),
        names.PROVIDER: names.PROVIDER_VALUE,
        names.REQUEST_MODEL: model,
        "gen_ai.request.stream": streaming,
        "gen_ai.response.model": model,
        "gen_ai.response.id": event.request_id,
        names.SKILL: event.skill,
        "gen_ai.usage.input_tokens": metrics.input_tokens,
        "gen_ai.usage.output_tokens": metrics.output_tokens,
        "gen_ai.usage.reasoning.output_tokens": metrics.reasoning_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
        **_of_modalities(metrics, event.skill),
        **_of_sampling(task),
    }
    if getattr(task, "reasoning", False):
        attributes["gen_ai.request.reasoning.level"] = "on"
    if generates(event.skill):
        attributes["gen_ai.output.type"] = "text" if event.skill in _TEXT_SKILLS else "json"
    if event.adapter:
        attributes[names.ADAPTER] = event.adapter
    if event.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (event.finish_reason,)
    if event.error:
        attributes[names.ERROR_TYPE] = event.error
    if event.first_token_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = event.first_token_at - event.accepted_at
    if event.image_size is not None:
        attributes[names.IMAGE_WIDTH], attributes[names.IMAGE_HEIGHT] = event.image_size
        attributes[names.IMAGE_CROPS] = event.num_crops
        attributes["kestrel.image.reused_crops"] = metrics.reused_crops
    return attributes | _for_routers(event, image_positions)


def _of_modalities(metrics: EngineMetrics, skill: str) -> Attributes:
    """The tokens by modality. The convention wants those that are not 0."""
    counts = {
        "gen_ai.usage.text.input_tokens": metrics.input_tokens - metrics.image_tokens,
        "gen_ai.usage.image.input_tokens": metrics.image_tokens,
        "gen_ai.usage.text.cache_read.input_tokens": metrics.cached_tokens
        - metrics.cached_image_tokens,
        "gen_ai.usage.image.cache_read.input_tokens": metrics.cached_image_tokens,
        "gen_ai.usage.text.output_tokens": metrics.output_tokens if skill in _TEXT_SKILLS else 0,
    }
    return {name: count for name, count in counts.items() if count}


def _for_routers(event: RequestEvent, image_positions: int) -> Attributes:
    """The attributes that llm-d's router gives its spans: the modalities, the images, and whether one of them was in a
    cache of this server."""
    if event.image_size is None:
        return {"mm.modality": "none", "mm.hash_count": 0}
    metrics = event.metrics
    count = metrics.image_tokens // image_positions if metrics.image_tokens else 1
    hit = metrics.encoded_crops == 0 or metrics.cached_image_tokens > 0
    return {"mm.modality": "image", "mm.hash_count": count, "mm.hit": hit}


def generates(skill: str) -> bool:
    """Whether the requests of a skill generate tokens."""
    return skill != _EMBED


def operation_of(skill: str) -> str:
    """The name of a request's operation in OpenTelemetry's conventions."""
    return "generate_content" if generates(skill) else "embeddings"


def of_image(event: ImageEvent) -> Attributes:
    """The attributes of an image that was prepared before its requests."""
    attributes: Attributes = {names.PREPROCESS_SECONDS: event.seconds}
    if event.error:
        attributes[names.ERROR_TYPE] = event.error
    if event.size is not None:
        attributes[names.IMAGE_WIDTH], attributes[names.IMAGE_HEIGHT] = event.size
        attributes[names.IMAGE_CROPS] = event.num_crops
    return attributes


def _task(call: Call, skill: str | None = None) -> Any:
    """The task of a skill in the call's request, such as its QueryTask, or the only task; None if there is none or more
    than one. For a stream of frames, the message that opened it has the tasks."""
    tasks = _tasks(call.message if call.opening is None else call.opening)
    found = [task for name, task in tasks if skill in (None, name)]
    return found[0] if len(found) == 1 else None


def _tasks(message: Any) -> list[tuple[str, Any]]:
    """All tasks, each with the name of its skill."""
    if not isinstance(message, Message):
        return []
    request: Any = message
    names = message.DESCRIPTOR.fields_by_name
    if "config" in names:
        return _tasks(request.config)
    holders = request.tasks if "tasks" in names else [request]
    found = []
    for holder in holders:
        for field, value in holder.ListFields():
            if field.message_type is not None and field.message_type.name.endswith("Task"):
                found.append((value.name if field.name == "skill" else field.name, value))
    return found


def _of_sampling(task: Any) -> Attributes:
    if task is None:
        return {}
    holders = [task, task.sampling] if "sampling" in task.DESCRIPTOR.fields_by_name else []
    return {
        f"gen_ai.request.{field}": getattr(holder, field)
        for field in _SAMPLING
        for holder in holders
        if field in holder.DESCRIPTOR.fields_by_name and holder.HasField(field)
    }


def of_step(event: StepEvent) -> Attributes:
    return {
        "kestrel.step.id": event.step_id,
        "kestrel.step.requests": len(event.request_ids),
        "kestrel.step.crops": event.num_crops,
        "kestrel.step.reused_crops": event.num_reused_crops,
        "kestrel.step.prefill_positions": event.num_prefill_positions,
        "kestrel.step.decode_rows": event.num_decode,
        "kestrel.step.shared_rows": sum(event.shared_groups),
        "kestrel.step.shared_groups": len(event.shared_groups),
        "kestrel.step.masked_rows": event.num_masked,
        "kestrel.step.vision_s": event.vision_s,
        "kestrel.step.prefill_s": event.prefill_s,
        "kestrel.step.decode_s": event.decode_s,
        "kestrel.step.running": event.stats.running,
        "kestrel.step.waiting": event.stats.waiting,
        names.FAILED: event.failed,
    }


def content(call: Call) -> Attributes:
    """The question or the objects of a request, and the answer, as JSON in the form of OpenTelemetry's convention."""
    task = _task(call)
    question = getattr(task, "question", "") or ", ".join(getattr(task, "objects", ()))
    attributes: Attributes = {}
    if question:
        attributes["gen_ai.input.messages"] = _messages("user", question)
    if call.result is not None and call.result.output:
        output = call.result.output
        text = output.get("answer", output.get("caption"))
        answer = text if isinstance(text, str) else json.dumps(output, default=_shown)
        attributes["gen_ai.output.messages"] = _messages("assistant", answer)
    return attributes


def _shown(value: object) -> str:
    """Arrays by their shape alone."""
    shape = getattr(value, "shape", None)
    return str(value) if shape is None else f"array of shape {shape}"


def _messages(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])
