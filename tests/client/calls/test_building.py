"""Messages that are built from other messages."""

import pytest

from kestrel_client import InvalidRequestError
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.calls.requests.building import build


def test_messages_are_copied_as_the_constructor_copies_them() -> None:
    images = [common_pb2.Image(encoded=b"a", max_crops=2), common_pb2.Image()]
    options = common_pb2.RequestOptions(cache_salt="x")
    query = build(pb.QueryRequest, images=images, query=pb.QueryTask(question="?"), options=None)
    assert query == pb.QueryRequest(images=images, query={"question": "?"})
    detect = build(pb.DetectRequest, image=images[1], options=options)
    assert detect == pb.DetectRequest(image=images[1], options=options) and detect.HasField("image")
    detect.image.encoded = b"b"
    assert not images[1].encoded


def test_an_error_names_the_field_of_a_wrong_message() -> None:
    with pytest.raises(InvalidRequestError, match=r"^image: "):
        build(pb.DetectRequest, image=pb.QueryTask())
    with pytest.raises(InvalidRequestError, match=r"^images: "):
        build(pb.QueryRequest, images=[pb.QueryTask()])
