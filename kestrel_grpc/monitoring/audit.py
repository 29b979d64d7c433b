"""AuditLog: one record for each administrative call, which no log level silences. Owns the records not yet written.

A record is one line of JSON in ASCII, so that no text of a caller can end a line or control a terminal. It is written
before a successful call ends, and right after the status of a refused one. If it cannot be written, it waits in memory
and goes to the log, and further administrative calls are refused until it is written.
"""

from __future__ import annotations

import json
import logging
import re
import select
from collections import deque
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from kestrel_engine import ConfigError, clock

from ..edge.calls.call import Call
from ..edge.failures.errors import AuditUnavailable
from ..logs.appending import LineFile, stamp
from ..security.identity.principal import Scope, is_administrative

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Limit on the records in memory. Beyond it, the oldest is in the log only."""
ATTEMPTS = 60
"""Records a minute of callers without the scope admin. Others are counted, so that strangers can't fill the disk."""
_LONGEST = 512
"""Characters of a text in a record, or fewer if the record has many long texts."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")


class AuditLog:
    """The records in the file ``path``, "-" for standard output. ``worker``: the index of this worker, None without
    workers. Runs on the event loop. Raises ConfigError if the file cannot be used."""

    def __init__(self, path: str, worker: int | None = None) -> None:
        self._path, self._worker = path, {} if worker is None else {"worker": worker}
        self._file, self._waiting = LineFile(path), deque[bytes](maxlen=MOST_WAITING)
        self._attempts, self._attempts_since, self._unrecorded = 0, clock.now(), 0
        try:
            self._file.check()
        except OSError as error:
            raise ConfigError("audit_log", path, f"{error.strerror or error}") from None

    @property
    def waiting(self) -> int:
        """Number of records that could not be written yet."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises AuditUnavailable if an administrative call would not be recorded."""
        try:
            self._file.check()
            self._write()
        except OSError as error:
            raise AuditUnavailable(
                f"administrative calls can't be recorded in --audit-log now: {error.strerror or error}"
            ) from None

    def __call__(self, call: Call) -> None:
        """Records a call that has ended, if it is administrative."""
        if not is_administrative(call.method):
            return
        unrecorded = 0
        if Scope.ADMIN not in call.principal.scopes:
            if not self._may_record_attempt():
                self._unrecorded += 1
                return
            unrecorded, self._unrecorded = self._unrecorded, 0
        line = _line(
            {**_fields(call), **({"unrecorded": unrecorded} if unrecorded else {}), **self._worker}
        )
        if len(self._waiting) == MOST_WAITING:
            logger.error("the oldest audit record is dropped; an earlier line of this log has it")
        self._waiting.append(line)
        try:
            self._write()
        except OSError as error:
            logger.error(
                "an audit record waits, because --audit-log=%s can't be written (%s): %s",
                *(self._path, error.strerror or error, line.decode().rstrip()),
            )

    def _may_record_attempt(self) -> bool:
        now = clock.now()
        if now - self._attempts_since >= 60.0:
            self._attempts, self._attempts_since = 0, now
        self._attempts += 1
        return self._attempts <= ATTEMPTS

    def _write(self) -> None:
        """Writes the records that wait. Raises OSError."""
        while self._waiting:
            self._file.write(self._waiting[0])
            self._waiting.popleft()


def _fields(call: Call) -> dict[str, Any]:
    before, after = call.change
    is_told = isinstance(call.message, Message)
    return {
        "time": stamp(clock.wall()),
        "method": call.method.removeprefix("/"),
        "principal": call.principal.name,
        "peer": call.peer,
        "request_id": call.request_id,
        **({"trace_id": call.trace_id} if call.trace_id else {}),
        "request": json_format.MessageToDict(call.message, preserving_proto_field_name=True)
        if is_told
        else None,
        "before": before,
        "after": after,
        "status": call.code.name,
        **({"reason": call.reason} if call.reason else {}),
        "ms": round(call.duration_ms, 1),
    }


def _line(fields: dict[str, Any]) -> bytes:
    """The record as one line, of at most PIPE_BUF bytes if that holds all of its fields."""
    most = _LONGEST
    while True:
        shown = {name: _bounded(value, most) for name, value in fields.items()}
        line = json.dumps(shown).encode() + b"\n"
        if len(line) <= select.PIPE_BUF or not most:
            return line
        most //= 2


def _bounded(value: Any, most: int) -> Any:
    """``value`` with texts of ``most`` characters and lists of ``most`` items at most, and without passwords in
    addresses."""
    if isinstance(value, str):
        text = _USER_INFO.sub("(hidden)@", value)
        return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    if isinstance(value, dict):
        return {
            _bounded(key, most): _bounded(each, most) for key, each in list(value.items())[:most]
        }
    if isinstance(value, (list, tuple)):
        left = [f"and {len(value) - most} more"] if len(value) > most else []
        return [*(_bounded(each, most) for each in value[:most]), *left]
    return value
