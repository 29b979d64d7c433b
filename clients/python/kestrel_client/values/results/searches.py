"""ObjectSearch: how the search for the objects of one name ended."""

from __future__ import annotations

from dataclasses import dataclass

from ..._pb.kestrel.v1 import vision_service_pb2
from ...errors import RpcError, from_rpc_status
from .base import FinishReason, read_finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSearch:
    """How the search for the objects of one name ended."""

    object: str
    """The name, as in the call."""
    absence: float | None = None
    """The probability that the image has no such object, in [0, 1]; None for ``segment`` and with an error."""
    finish_reason: FinishReason = "unknown"
    """Why generation ended; "unknown" with an error, and for what a question presupposes."""
    error: RpcError | None = None
    """Why this search failed. The only search of a call fails the call."""
    omitted_score: float | None = None
    """The score of an outline that ``min_score`` omitted."""


def read_search(message: vision_service_pb2.ObjectSearch) -> ObjectSearch:
    return ObjectSearch(
        object=message.object,
        absence=message.absence if message.HasField("absence") else None,
        finish_reason=read_finish_reason(message.finish_reason),
        error=from_rpc_status(message.error) if message.HasField("error") else None,
        omitted_score=message.omitted_score if message.HasField("omitted_score") else None,
    )
