"""AccessLog: writes one log line per finished call, as text or JSON."""

from __future__ import annotations

import json
import logging
from typing import Any

from ..edge.calls.call import Call
from ..logs.records import structured

logger = logging.getLogger("kestrel_grpc.access")


class AccessLog:
    """Logs finished calls. The server calls this object with every finished call."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json

    def __call__(self, call: Call) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = _fields(call)
        line = _Line(fields, self._is_json)
        logger.info("%s", line, extra=structured("call", fields))


class _Line:
    """The line of a call. It is formatted only when needed, because a log in JSON uses the fields instead."""

    __slots__ = ("_as_json", "_fields")

    def __init__(self, fields: dict[str, Any], as_json: bool) -> None:
        self._fields, self._as_json = fields, as_json

    def __str__(self) -> str:
        if self._as_json:
            return json.dumps(self._fields)
        return " ".join(f"{name}={_word(value)}" for name, value in self._fields.items())


def _word(value: Any) -> str:
    """The value as one word. A name from a certificate may hold any characters, so it may need quotes."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _fields(call: Call) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": call.method.removeprefix("/"),
        **({"asked": call.asked} if call.asked else {}),
        "code": call.code.name,
        **({"reason": call.reason} if call.reason else {}),
        **({"frame": call.frame} if call.frame else {}),
        "request_id": call.request_id,
        **({"trace_id": call.trace_id} if call.trace_id else {}),
        "ms": round(call.duration_ms, 1),
        "peer": call.peer,
        **({"principal": call.principal.name} if call.principal.name else {}),
    }
    if call.result is not None:
        metrics = call.result.metrics
        fields |= {
            "input_tokens": metrics.input_tokens,
            "output_tokens": metrics.output_tokens,
            "queue_ms": round(metrics.queue_time_ms, 1),
            "ttft_ms": round(metrics.ttft_ms, 1),
        }
    return fields
