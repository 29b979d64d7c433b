# Generated from asynchronous/batches.py by generate_sync.py. Never edit; run `make protos`.
"""Batches with the synchronous client: requests that the server answers later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

from .._pb.kestrel.v1 import batch_service_pb2 as pb
from .._pb.kestrel.v1.batch_service_pb2_grpc import BatchServiceStub
from ..calls.prepared_call import Method, prepare_call
from ..calls.requests.building import build, whole
from ..calls.requests.options import HandlingOptions
from ..calls.requests.requests import Requests
from ..errors import InvalidRequestError, KestrelError, RpcError
from ..values.batches import (
    Batch,
    BatchRequests,
    BatchResult,
    check_requests,
    read_batch,
    read_batch_result,
)
from .server_facts import ServerFacts


class Batches(ServerFacts):
    """The calls about batches. The server needs ``--batches``."""

    _requests: Requests

    def create_batch(
        self,
        requests: BatchRequests,
        *,
        off_peak: bool = False,
        left_out: dict[str, KestrelError] | None = None,
        **options: Unpack[HandlingOptions],
    ) -> Batch:
        """Leaves requests with the server, like ``{"a": ("a.jpg", CaptionTask()), "b": ("b.jpg", [...])}``, which it
        answers at low priority.

        ``off_peak``: whether the server answers them only while nobody else has asked it for a minute.
        ``options``: of all requests; ``timeout`` is of sending them. Images are read while they are sent. Nothing is
        stored if one cannot be read, unless ``left_out`` is given, which gets the errors of such requests.
        """
        check_requests(requests)
        failed = {} if left_out is None else left_out

        def messages() -> Iterator[pb.CreateBatchRequest]:
            total = len(requests) if left_out is None else None
            yield pb.CreateBatchRequest(info=pb.BatchInfo(total_requests=total, off_peak=off_peak))
            for custom_id, (image, tasks) in requests.items():
                prepare = self._requests.batched
                failed.pop(custom_id, None)  # Of an earlier attempt to send the batch.
                try:
                    yield prepare(custom_id, image, tasks, options)
                except KestrelError as error:
                    failed[custom_id] = error
                    if left_out is None:
                        if isinstance(error, InvalidRequestError):
                            error.args = (f"requests[{custom_id!r:.100}]: {error}",)
                        return  # The server refuses a batch with fewer requests.

        prepared = prepare_call(
            self._connection,
            Method(BatchServiceStub, "CreateBatch"),
            messages,
            lambda response: read_batch(response.batch),
            timeout=options.get("timeout"),
            metadata=options.get("metadata"),
        )
        try:
            return self._channel.send(prepared)
        except RpcError:
            if failed and (left_out is None or len(failed) == len(requests)):
                raise next(iter(failed.values())) from None
            raise

    def get_batch(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """The present state of a batch. Raises NotFoundError, as the others."""
        request = pb.GetBatchRequest(batch_id=batch_id)
        return read_batch((self._about_batch("GetBatch", request, timeout)).batch)

    def list_batches(self, *, timeout: float | None = None) -> tuple[Batch, ...]:
        """The caller's batches, the newest first."""
        request, found = pb.ListBatchesRequest(page_size=100), list[Batch]()
        while True:
            page = self._about_batch("ListBatches", request, timeout)
            found += map(read_batch, page.batches)
            if not page.next_page_token:
                return tuple(found)
            request.page_token = page.next_page_token

    def cancel_batch(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Ends a batch. Its results so far are kept."""
        request = pb.CancelBatchRequest(batch_id=batch_id)
        return read_batch((self._about_batch("CancelBatch", request, timeout)).batch)

    def delete_batch(self, batch_id: str, *, timeout: float | None = None) -> None:
        """Ends a batch, and deletes it with its results."""
        self._about_batch("DeleteBatch", pb.DeleteBatchRequest(batch_id=batch_id), timeout)

    def batch_results(
        self,
        batch_id: str,
        *,
        start_index: int = 0,
        requests: BatchRequests | None = None,
        timeout: float | None = None,
    ) -> Iterator[BatchResult]:
        """The results of a batch in the order of its requests, each as soon as it is there, until the batch is done.

        The end of the iteration does not end the batch: continue with the ``start_index`` after the last result.
        ``requests``: all those of ``create_batch``; results then know their images and questions. Others raise
        InvalidRequestError. ``timeout``: of the whole iteration; default: none.
        """
        if requests is not None:
            check_requests(requests)
        request = build(
            pb.StreamBatchResultsRequest,
            batch_id=batch_id,
            start_index=whole("start_index", start_index, 0),
        )
        method = Method(BatchServiceStub, "", "StreamBatchResults")
        return self._channel.messages(
            method, request, lambda message: read_batch_result(message, requests), timeout
        )

    def _about_batch(self, name: str, request: Any, timeout: float | None) -> Any:
        return self._channel.ask(Method(BatchServiceStub, name), request, timeout)
