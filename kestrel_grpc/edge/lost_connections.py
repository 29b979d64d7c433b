"""Removes gRPC's log records about responses that cannot be sent because the connection is lost.

gRPC sends the end of a call after its handler has returned. If that fails before gRPC has noticed the lost connection,
gRPC logs a traceback for each call. This happens with clients that open no window and disappear.
"""

from __future__ import annotations

import logging

import grpc

_GRPC_LOGGER = "grpc._cython.cygrpc"


def _is_other_record(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


def silence_lost_connections() -> None:
    """Filters these records from the log. Idempotent."""
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_other_record)
