"""How log records look, as text or JSON, and the events of the server's life.

Owns the process's log handler. Imports no gRPC: a supervisor of workers logs too. A record that is written while a call
is handled bears the call's ids; those of the engine's threads, which serve many calls at once, don't.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from ..edge.current_call import find_call
from ..settings.logs import DEFAULT_BUFFER_BYTES, log_levels
from .writer import LogWriter

Format = Literal["text", "json"]
LifeEvent = Literal[
    "listening", "ready", "leaving", "draining", "stopped", "failed", "worker_ready", "worker_ended"
]

_lifecycle = logging.getLogger("kestrel_grpc.lifecycle")


def set_up_logging(
    levels: str,
    format: Format,
    stream: TextIO | None = None,
    *,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    worker: int | None = None,
) -> None:
    """Replaces the root logger's handlers; without ``stream`` records go to standard error, and nobody waits for that.
    ``levels`` as --log-level has them; raises ValueError for others. Records of a ``worker`` bear its index."""
    handler: logging.Handler
    if stream is None:
        handler = LogWriter(sys.stderr.fileno(), buffer_bytes)
    else:
        handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(worker) if format == "json" else TextFormatter(worker))
    logging.basicConfig(handlers=[handler], force=True)
    # libvips tells of every pipeline it builds, and warns of what is odd in callers' pictures.
    logging.getLogger("pyvips").setLevel(logging.ERROR)
    for module, level in log_levels(levels).items():
        logging.getLogger(module).setLevel(level.upper())


def lost_records() -> int:
    """How many records of this process were dropped, or could not be written."""
    writers = (each for each in logging.getLogger().handlers if isinstance(each, LogWriter))
    return sum(writer.lost for writer in writers)


def flush_log() -> None:
    """Before something else is written to standard error: what was logged so far comes first, if it can be written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def tell_lifecycle(event: LifeEvent, **fields: Any) -> None:
    """Logs what has become of the server; a failure as an error."""
    level = logging.ERROR if "error" in fields else logging.INFO
    text = " ".join((event, *(f"{name}={_plain(value)}" for name, value in fields.items())))
    _lifecycle.log(level, "%s", text, extra=structured(event, fields))


def structured(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    """``extra`` of a record that JSON has in fields instead of words."""
    return {"kestrel_event": event, "kestrel_fields": fields}


class TextFormatter(logging.Formatter):
    """One line, and a traceback's after it."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker = "" if worker is None else f" worker={worker}"
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        ids = "".join(
            f" {name}={value}" for name, value in _ids().items() if value not in record.message
        )
        return f"{line}{ids}{self._worker}"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, the worker if there are several, then message, or event with its
    fields; the call's ids; and for an exception its traceback."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker = {} if worker is None else {"worker": worker}
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        told: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._worker,
        }
        event = getattr(record, "kestrel_event", None)
        if event is None:
            told["message"] = record.getMessage()
        else:
            told |= {"event": event, **getattr(record, "kestrel_fields", {})}
        told = {**told, **_ids()}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = self.formatStack(record.stack_info)
        return _encode(told)


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
"""Made once: ``json.dumps`` makes an encoder for each record."""


def _ids() -> dict[str, str]:
    """Of the call that is being handled; empty outside of one."""
    call = find_call()
    if call is None:
        return {}
    ids = {"request_id": call.request_id, "trace_id": call.trace_id}
    return {name: value for name, value in ids.items() if value}


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
