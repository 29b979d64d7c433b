"""An image that a server does not know is sent in place of its id, or put first if it is too large for that."""

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.calls.restoring import IMAGE_NOT_FOUND, Restoring
from kestrel_client.errors import NotFoundError
from kestrel_client.images.image_forms import ImageHandle
from kestrel_client.images.known import KnownImages

UNKNOWN = NotFoundError(grpc.StatusCode.NOT_FOUND, "not stored", reason=IMAGE_NOT_FOUND)
FILE = b"x" * 5000


def by_id(*ids: str) -> pb.QueryRequest:
    return pb.QueryRequest(
        query=pb.QueryTask(question="?"),
        images=[common_pb2.Image(image_id=each, background="#ffffff") for each in ids],
    )


def restoring(known: KnownImages, request: pb.QueryRequest, most_bytes: int = 100_000) -> Restoring:
    return Restoring(known, request, {}, lambda image, timeout: image, most_bytes)  # type: ignore[arg-type, return-value]


@pytest.fixture
def known() -> KnownImages:
    known = KnownImages(100_000)
    known.learn("a", common_pb2.Image(encoded=FILE))
    return known


def test_the_request_holds_the_image(known: KnownImages) -> None:
    request = by_id("a", "a", "b")
    found = restoring(known, request)
    assert not list(found.puts(UNKNOWN, None))
    assert request.images[0].encoded == request.images[1].encoded == FILE
    assert request.images[0].background == "#ffffff" and request.images[2].image_id == "b"
    found.answered(request.images[2], "other")
    assert known.current_id("a") == "a"
    found.answered(request.images[0], "new")
    assert known.current_id("a") == "new" and known.key(by_id("a").images[0]) == known.key(
        request.images[0]
    )
    # The server lacks the other image, which this client has never seen.
    with pytest.raises(NotFoundError):
        list(found.puts(UNKNOWN, None))
    assert request.images[0].encoded == FILE


def test_an_image_without_room_is_put(known: KnownImages) -> None:
    request = by_id("a", "a")
    found = restoring(known, request, 2 * len(FILE))
    for attempt in range(3):
        ((given, put),) = found.puts(UNKNOWN, None)
        assert given == "a" and put.encoded == FILE  # type: ignore[attr-defined]
        found.stored("a", ImageHandle(f"new-{attempt}"))
        assert request.images[0].image_id == request.images[1].image_id == f"new-{attempt}"
    with pytest.raises(NotFoundError):
        list(found.puts(UNKNOWN, None))


def test_other_errors_are_the_caller_s(known: KnownImages) -> None:
    request = by_id("a")
    other = NotFoundError(grpc.StatusCode.NOT_FOUND, "no such model", reason="MODEL_NOT_FOUND")
    with pytest.raises(NotFoundError, match="no such model"):
        list(restoring(known, request).puts(other, None))
    assert request.images[0].image_id == "a"
