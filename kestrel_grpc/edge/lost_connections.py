"""Answers that can't be sent because their connection went: nothing that an operator must read a traceback of.

gRPC sends the end of a call by itself, after its handler has returned. If that fails before gRPC has told the call that
its caller went, as it does for a caller who opens no window and vanishes, it logs a traceback for each.
"""

from __future__ import annotations

import logging

import grpc

_GRPC_LOGGER = "grpc._cython.cygrpc"


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


def silence_lost_connections() -> None:
    """Keeps these records out of the log. Idempotent."""
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_worth_a_line)
