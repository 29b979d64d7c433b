"""The message of a status with its details, for trailers, results and the front. This module loads no engine."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2

DOMAIN = "kestrel.internal"
"""The domain of every ErrorInfo. Reasons are unique within it. The top-level domain "internal" is reserved for private
use (ICANN's board, 29 July 2024), so nobody else can own the name."""


def status_message(code: int, message: str, details: Iterable[Message]) -> status_pb2.Status:
    """``details``: messages of google.rpc."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed: any_pb2.Any = status.details.add()
        packed.Pack(detail)
    return status
