"""BatchService: batches by gRPC, and the form of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2

from kestrel_client._pb.kestrel.v1 import batch_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.batch_service_pb2_grpc import BatchServiceServicer
from kestrel_engine import InvalidRequest

from ..edge.calls.call import Call, Context
from ..edge.calls.current import current
from ..edge.failures.errors import BatchesNotTaken, ShuttingDown
from ..edge.failures.statuses import complaint
from ..edge.messages.fields import in_range, located
from ..security.admission.message_room import COPIES
from ..service_names import VISION_METHODS, VISION_SERVICE
from ..services.vision import VisionService
from .answering import Answer, Work
from .running import BatchRunner
from .store import BatchStore
from .tables import LONGEST_ID, MOST_REQUESTS, Arriving, NewBatch, Result

ENDPOINT = f"/{VISION_SERVICE}"
_METHODS = {
    each.name: "RunSkill" if each.name == "skill" else each.name.capitalize()
    for each in pb.BatchRequest.DESCRIPTOR.oneofs_by_name["request"].fields
}
"""The method for each field of BatchRequest."""
_ARRIVING_BYTES = 1024 * 1024
"""So many bytes of requests are stored together."""
_MOST_LISTED, _USUALLY_LISTED = 100, 20
_LONGEST_ID = 64
_TOTAL = ("info", "total_requests")
_T = TypeVar("_T")
_INLINE_BYTES = 64 * 1024
_A_MOMENT_S = 0.05
_CODES = {
    "cancelled": code_pb2.CANCELLED,
    "expired": code_pb2.DEADLINE_EXCEEDED,
    "failed": code_pb2.RESOURCE_EXHAUSTED,
}
"""Of requests whose batch ended before, by its status."""


class BatchService(BatchServiceServicer):
    """``runner``: None if the server takes no batches."""

    def __init__(self, runner: BatchRunner | None) -> None:
        self._runner = runner

    @property
    def _taking(self) -> BatchRunner:
        if self._runner is None:
            raise BatchesNotTaken("the server takes no batches; start it with --batches FILE")
        return self._runner

    async def CreateBatch(  # type: ignore[override]
        self, requests: AsyncIterator[pb.CreateBatchRequest], context: Context
    ) -> pb.CreateBatchResponse:
        runner, arriving = self._taking, Arriving(current.get().principal)
        info: pb.BatchInfo | None = None
        held, num_bytes = list[tuple[str, bytes]](), 0  # Requests that are not stored yet.
        try:
            async for message in requests:
                count = arriving.total + len(held)
                if message.WhichOneof("part") == "info":
                    if count or info is not None:
                        raise InvalidRequest("info", "must be the first message, and only that")
                    info = message.info
                    in_range(info, "total_requests", 1, MOST_REQUESTS, 1, ("info",))
                    continue
                held.append(_checked_request(message, count))
                num_bytes += len(held[-1][1])
                if num_bytes >= _ARRIVING_BYTES:
                    await runner.store.add_requests(arriving, held)
                    held, num_bytes = [], 0
            # A cancellation arrives a moment after the last message.
            await asyncio.sleep(_A_MOMENT_S)
            await runner.store.add_requests(arriving, held)
            asked = _new_batch(info or pb.BatchInfo(), arriving.total)
            made = await runner.store.start_batch(arriving, asked)
        except BaseException:
            await runner.store.drop(arriving)
            raise
        runner.wake()
        return pb.CreateBatchResponse(batch=_batch(made))

    async def _about(self, request: Any, work: Callable[..., Awaitable[_T]]) -> _T:
        """What ``work`` of the store does with the caller's batch that ``request`` names."""
        with _naming("batch_id", request.batch_id):
            return await work(self._taking.store, current.get().principal, request.batch_id)

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        return pb.GetBatchResponse(batch=_batch(await self._about(request, BatchStore.batch)))

    async def ListBatches(
        self, request: pb.ListBatchesRequest, context: Context
    ) -> pb.ListBatchesResponse:
        size = in_range(request, "page_size", 1, _MOST_LISTED, _USUALLY_LISTED)
        store, owner = self._taking.store, current.get().principal
        with _naming("page_token", request.page_token, 0):
            found = await store.batches(owner, request.page_token, size + 1)
        token = found[size - 1]["id"] if len(found) > size else ""
        return pb.ListBatchesResponse(batches=map(_batch, found[:size]), next_page_token=token)

    async def CancelBatch(
        self, request: pb.CancelBatchRequest, context: Context
    ) -> pb.CancelBatchResponse:
        found = await self._about(request, BatchStore.cancel)
        return pb.CancelBatchResponse(batch=_batch(found))

    async def DeleteBatch(
        self, request: pb.DeleteBatchRequest, context: Context
    ) -> pb.DeleteBatchResponse:
        await self._about(request, BatchStore.delete_batch)
        return pb.DeleteBatchResponse()

    async def StreamBatchResults(  # type: ignore[override]
        self, request: pb.StreamBatchResultsRequest, context: Context
    ) -> None:
        store, at = self._taking.store, request.start_index
        if at < 0:
            raise InvalidRequest("start_index", f"is {at}; must be 0 or more")
        while True:
            changed = store.changed
            batch, found = await self._about(request, partial(BatchStore.results, at=at))
            if batch["endpoint"] != ENDPOINT:
                raise InvalidRequest(
                    "batch_id",
                    "its requests came by the HTTP port, whose /v1/files has its results",
                )
            if at > batch["total"]:
                total = batch["total"]
                raise InvalidRequest("start_index", f"is {at}; must be 0 to {total}, its requests")
            for each in found:
                if len(each.line) <= _INLINE_BYTES:
                    result = _result(each, batch["status"])
                else:
                    result = await asyncio.to_thread(_result, each, batch["status"])
                await context.write(result)
                at = each.number + 1
            if found:
                continue
            if batch["ended_at"] is not None:
                return
            if store.is_left:
                raise ShuttingDown(
                    f"the server is shutting down; ask a later one from start_index {at} on"
                )
            await changed.wait()


def _checked_request(message: pb.CreateBatchRequest, count: int) -> tuple[str, bytes]:
    """The id and the body of the request after ``count`` others. Raises InvalidRequest."""
    request = message.request
    if not message.HasField("request"):
        raise InvalidRequest("", "the message is empty; set info or request")
    if not 1 <= len(request.custom_id) <= LONGEST_ID:
        why = f"of request {count} must have 1 to {LONGEST_ID} characters"
        raise InvalidRequest(("request", "custom_id"), why)
    if request.WhichOneof("request") is None:
        raise InvalidRequest("request", f"{count} is empty; set query, detect or another one")
    if count == MOST_REQUESTS:
        raise InvalidRequest("request", f"there are more than {MOST_REQUESTS}")
    return request.custom_id, request.SerializeToString()


def _new_batch(info: pb.BatchInfo, total: int) -> NewBatch:
    """Raises InvalidRequest unless all requests have arrived."""
    if not total:
        raise InvalidRequest("request", "is required; the batch has no request")
    if info.HasField("total_requests") and total != info.total_requests:
        why = f"is {info.total_requests}, but {total} requests arrived; nothing is stored"
        raise InvalidRequest(_TOTAL, why)
    return NewBatch(ENDPOINT, off_peak=info.off_peak)


class TypedRequests:
    """The requests of batches by gRPC: a Form."""

    copies, caps_max_tokens = COPIES, False

    def __init__(self, vision: VisionService) -> None:
        self._vision = vision

    def method(self, body: bytes) -> str:
        return VISION_METHODS + _METHODS[_kind(pb.BatchRequest.FromString(body))]

    def read(self, body: bytes) -> Work:
        request = pb.BatchRequest.FromString(body)
        kind = _kind(request)
        message, behaviour = getattr(request, kind), getattr(self._vision, _METHODS[kind])

        async def respond(context: Context) -> bytes:
            response = await behaviour(message, context)
            return _json(pb.StreamBatchResultsResponse(**{kind: response}))

        return Work(message, respond)

    def answered(self, body: bytes, call: Call) -> Answer:
        return Answer(True, b'{"request_id": "%s", "body": %s}' % (call.request_id.encode(), body))

    def refused(self, error: Exception, call: Call, work: Work | None) -> Answer:
        status = complaint(error, call.request_id).status
        code = code_pb2.Code.Name(status.code)
        told = json.dumps({"code": code, "message": status.message}).encode()
        body = _json(pb.StreamBatchResultsResponse(error=status))
        return Answer(False, error=told[:-1] + b', "body": ' + body + b"}")


def _kind(request: pb.BatchRequest) -> str:
    kind = request.WhichOneof("request")
    assert kind is not None, "CreateBatch has checked it"
    return kind


def _json(message: pb.StreamBatchResultsResponse) -> bytes:
    return json_format.MessageToJson(message, indent=None).encode()


def _result(stored: Result, status: str) -> pb.StreamBatchResultsResponse:
    """The result in a line. ``status``: of the batch, which may have ended before the request did."""
    result = pb.StreamBatchResultsResponse(custom_id=stored.custom_id, index=stored.number)
    line = json.loads(stored.line)
    told = line["response"] or line["error"]
    if "body" in told:
        json_format.ParseDict(told["body"], result)
    else:
        result.error.code, result.error.message = _CODES[status], told["message"]
    return result


def _batch(stored: dict[str, Any]) -> pb.Batch:
    def time(name: str) -> Timestamp | None:
        return None if stored[name] is None else Timestamp(seconds=stored[name])

    return pb.Batch(
        batch_id=stored["id"],
        state=pb.BatchState.Value(f"BATCH_STATE_{stored['status'].upper()}"),
        done=stored["ended_at"] is not None,
        total_requests=stored["total"],
        completed_requests=stored["completed"],
        failed_requests=stored["failed"],
        create_time=time("created_at"),
        expire_time=time("expires_at"),
        end_time=time("ended_at"),
        delete_time=time("kept_until"),
        endpoint=stored["endpoint"],
        off_peak=bool(stored["off_peak"]),
    )


@contextlib.contextmanager
def _naming(field: str, given: str, fewest: int = 1) -> Iterator[None]:
    """Errors of the block are about ``field``, which names a batch. Raises InvalidRequest."""
    if not fewest <= len(given) <= _LONGEST_ID:
        raise InvalidRequest(field, f"must have {fewest} to {_LONGEST_ID} characters")
    with located(lambda path: (field,)):
        yield
