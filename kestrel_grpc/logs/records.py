"""The format of log records, as text or JSON, and the records of the server's lifecycle.

This module sets up the process's log handler. It does not import gRPC, because the supervisor of workers uses it too.
A record that is made while a call is handled holds the call's ids. Records of the engine's threads do not, because
these threads serve many calls at once.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from typing import Any, Literal, TextIO

from ..edge.calls.current import current
from ..settings.logs import DEFAULT_BUFFER_BYTES, log_levels
from .appending import stamp
from .writer import LogWriter

Format = Literal["text", "json"]
LifeEvent = Literal[
    "listening",
    "loaded",
    "unloaded",
    "ready",
    "leaving",
    "draining",
    "stopped",
    "failed",
    "worker_ready",
    "worker_ended",
    "template_started",
    "template_ended",
    "front_started",
    "front_ended",
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
    """Replaces the root logger's handlers. Raises ValueError for invalid ``levels``.

    ``levels``: the value of --log-level. ``stream``: receives the records; None writes them to standard error on a
    separate thread. ``buffer_bytes``: limit on the bytes that wait for that thread. ``worker``: the index of this
    worker, which every record holds; None without workers.
    """
    handler: logging.Handler
    if stream is None:
        handler = LogWriter(sys.stderr.fileno(), buffer_bytes)
    else:
        handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(worker) if format == "json" else TextFormatter(worker))
    logging.basicConfig(handlers=[handler], force=True)
    # libvips logs every pipeline that it builds, and warns about oddities of callers' images.
    logging.getLogger("pyvips").setLevel(logging.ERROR)
    # The hub's transport logs the address of every file, and some addresses are signed.
    for transport in ("httpx", "httpx2"):
        logging.getLogger(transport).setLevel(logging.WARNING)
    for module, level in log_levels(levels).items():
        logging.getLogger(module).setLevel(level.upper())


def lost_records() -> int:
    """Number of records of this process that were dropped or could not be written."""
    writers = (each for each in logging.getLogger().handlers if isinstance(each, LogWriter))
    return sum(writer.lost for writer in writers)


def flush_log() -> None:
    """Writes all waiting records, as far as possible. Call this before other output to standard error."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_lifecycle(event: LifeEvent, **fields: Any) -> None:
    """Logs an event of the server's lifecycle. An event with the field ``error`` is logged as an error."""
    level = logging.ERROR if "error" in fields else logging.INFO
    text = " ".join((event, *(f"{name}={_plain(value)}" for name, value in fields.items())))
    _lifecycle.log(level, "%s", text, extra=structured(event, fields))


def structured(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The ``extra`` of a record that the JSON format writes as fields instead of a message."""
    return {"kestrel_event": event, "kestrel_fields": fields}


_IN_TEXT = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_IN_TEXT |= {0x2028: "\\u2028", 0x2029: "\\u2029"}
_IN_LINES = {code: text for code, text in _IN_TEXT.items() if chr(code) != "\n"}
_IN_MESSAGE = _IN_TEXT | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Characters that end a line or control a terminal, as they are written: a record may hold text of a caller, which
must not look like another record. JSON escapes the others itself."""


class TextFormatter(logging.Formatter):
    """Formats a record as one line, followed by its traceback, whose lines begin with blanks."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker = "" if worker is None else f" worker={worker}"
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        ids = "".join(
            f" {name}={value}" for name, value in _ids().items() if value not in record.message
        )
        return f"{line}{ids}{self._worker}".translate(_IN_MESSAGE)

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time (UTC), level, logger, the worker's index if there are workers, the
    message or the event with its fields, the call's ids, and the traceback of an exception."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker = {} if worker is None else {"worker": worker}
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": stamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            **self._worker,
        }
        event = getattr(record, "kestrel_event", None)
        if event is None:
            entry["message"] = record.getMessage()
        else:
            entry |= {"event": event, **getattr(record, "kestrel_fields", {})}
        entry = {**entry, **_ids()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return _encode(entry).translate(_IN_JSON)


def _indented(text: str) -> str:
    return textwrap.indent(text.translate(_IN_LINES), "    ")


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
"""One encoder for all records. ``json.dumps`` would create one for each."""


def _ids() -> dict[str, str]:
    """The ids of the current call; empty outside a call."""
    call = current.get(None)
    if call is None:
        return {}
    ids = {"request_id": call.request_id, "trace_id": call.trace_id}
    return {name: value for name, value in ids.items() if value}


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
