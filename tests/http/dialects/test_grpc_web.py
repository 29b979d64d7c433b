"""gRPC-Web over the fake runtime: the same messages and statuses as by gRPC, and what pages of other origins may do."""

import base64
import struct
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import settings_of
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of
from kestrel_grpc.settings.flags import parser_of
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import SecurityConfig
from tests.http.conftest import data_url
from tests.service.conftest import NO_END, EndlessRuntime

TYPE = {"content-type": "application/grpc-web+proto"}
VISION = "/kestrel.v1.VisionService/"
IMAGE = common_pb2.Image(encoded=base64.b64decode(data_url().partition(",")[2]))
SETTINGS = {"max_tokens": 12, "sampling": {"temperature": 0, "seed": 1}}


def frame(message: Any) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def frames(body: bytes) -> list[tuple[int, bytes]]:
    """Flags and content of each frame."""
    found = []
    while body:
        flags, length = struct.unpack_from(">BI", body)
        assert len(body) >= 5 + length, "a whole frame"
        found.append((flags, body[5 : 5 + length]))
        body = body[5 + length :]
    return found


async def call(client, path: str, message: Any, kind: Any = None, **headers: str):
    """The messages and the trailers of a call, whose HTTP status is always 200."""
    response = await client.post(path, content=frame(message), headers={**TYPE, **headers})
    assert response.status_code == 200 and response.headers["content-type"] == TYPE["content-type"]
    *messages, (flags, trailers) = frames(response.content)
    assert flags == 0x80 and all(each == 0 for each, _ in messages)
    lines = dict(line.split(": ", 1) for line in trailers.decode().splitlines())
    return [kind.FromString(data) for _, data in messages], lines, response.headers


def details(trailers: dict[str, str]) -> status_pb2.Status:
    return status_pb2.Status.FromString(base64.b64decode(trailers["grpc-status-details-bin"]))


async def test_a_unary_call_and_a_stream_answer_as_grpc_does(http):
    served, client = await http()
    request = pb.QueryRequest(images=[IMAGE], query={"question": "What?", **SETTINGS})
    request.options.request_id = "mine"
    (answer,), trailers, headers = await call(client, f"{VISION}Query", request, pb.QueryResponse)
    expected = await served.vision.Query(request)
    assert trailers["grpc-status"] == "0" and headers["x-request-id"] == "mine"
    for message in (answer, expected):
        message.ClearField("timings")
        message.usage.ClearField("cached_tokens")
    assert answer == expected and answer.answers[0].text

    events, trailers, _ = await call(
        client, f"{VISION}StreamQuery", request, pb.StreamQueryResponse
    )
    assert trailers["grpc-status"] == "0"
    assert [each.WhichOneof("event") for each in (events[0], events[-1])] == ["started", "final"]
    text = "".join(each.text_delta.text for each in events)
    assert text == events[-1].final.answers[0].text == answer.answers[0].text


async def test_every_method_is_there_that_takes_one_message(http):
    _, client = await http()
    names = []
    for file in (pb, image_service_pb2, model_service_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                response = await client.post(path, content=b"", headers=TYPE)
                if method.client_streaming:
                    assert response.status_code == (404 if method.server_streaming else 415), path
                else:
                    names.append(method.name)
                    assert b"grpc-status: 3" in response.content, path
    assert {"Query", "StreamEmbed", "PutImage", "GetLoad"} <= set(names)
    response = await client.post("/kestrel.v1.AdminService/Drain", content=b"", headers=TYPE)
    assert response.status_code == 404


async def test_images_are_stored_and_an_empty_request_is_a_request(http):
    _, client = await http()
    put = image_service_pb2.PutImageRequest(image=IMAGE)
    path = "/kestrel.v1.ImageService/PutImage"
    (stored,), *_ = await call(client, path, put, image_service_pb2.PutImageResponse)
    image = common_pb2.Image(image_id=stored.image.image_id)
    request = pb.CaptionRequest(image=image, caption=SETTINGS)
    (caption,), *_ = await call(client, f"{VISION}Caption", request, pb.CaptionResponse)
    assert caption.info.images[0].image_id == stored.image.image_id
    path = "/kestrel.v1.ModelService/GetLoad"
    (load,), *_ = await call(
        client, path, model_service_pb2.GetLoadRequest(), model_service_pb2.GetLoadResponse
    )
    assert load.ready


async def test_a_failed_call_has_the_status_and_the_details_of_grpc(http):
    _, client = await http()
    request = pb.QueryRequest(images=[IMAGE], query={"question": "What?"})
    request.query.sampling.top_p = 1.5
    for method in ("Query", "StreamQuery"):
        messages, trailers, headers = await call(client, VISION + method, request)
        assert not messages and trailers["grpc-status"] == "3"
        bad = error_details_pb2.BadRequest()
        assert any(each.Unpack(bad) for each in details(trailers).details)
        assert bad.field_violations[0].field == "query.sampling.top_p"
        assert trailers["grpc-message"].startswith("query.sampling.top_p: ")
        assert headers["x-request-id"]
    request.query.sampling.top_p = 1
    request.options.model = "50 % größer\n"
    _, trailers, _ = await call(client, f"{VISION}Query", request)
    assert trailers["grpc-status"] == "5" and "50 %25 gr%C3%B6%C3%9Fer" in trailers["grpc-message"]


MALFORMED = [
    (b"", {}, "no whole frame"),
    (b"\0\0\0\0", {}, "no whole frame"),
    (b"\0\0\0\0\1", {}, "announces 1 bytes, but 0 follow"),
    (b"\0\0\0\0\0\0\0\0\0\0", {}, "announces 0 bytes, but 5 follow"),
    (b"\0\xff\xff\xff\xff", {}, "the message has 4294967295 bytes; the limit is 1000000"),
    (b"\1\0\0\0\0", {}, "is compressed"),
    (b"\0\0\0\0\1\xff", {}, "not a valid message"),
    (b"\0\0\0\0\0", {"content-type": "application/grpc-web-text"}, "needs the header content-type"),
    (b"\0\0\0\0\0", {"grpc-timeout": "soon"}, "grpc-timeout must be"),
    (b"\0\0\0\0\0", {"grpc-timeout": "123456789S"}, "grpc-timeout must be"),
    (b"\0\0\0\0\0", {"content-encoding": "gzip"}, "takes no compressed bodies"),
]
"""Bodies and headers, and what the answer says."""


async def test_a_malformed_call_is_refused(http):
    served, client = await http(server_config={"max_message_bytes": 1_000_000})
    for body, headers, said in MALFORMED:
        response = await client.post(f"{VISION}Query", content=body, headers={**TYPE, **headers})
        if "content-type" in headers:
            assert response.status_code == 415 and said in response.json()["message"]
            continue
        assert response.status_code == 200
        ((flags, trailers),) = frames(response.content)
        assert flags == 0x80 and said.encode() in trailers
        assert trailers.startswith((b"grpc-status: 3", b"grpc-status: 8"))
    assert served.server.guard.held_bytes == 0


async def test_the_deadline_of_the_call_ends_its_request(http):
    served, client = await http(runtime=EndlessRuntime())
    request = pb.QueryRequest(images=[IMAGE], query={"question": "What?"})
    request.query.max_tokens = NO_END
    for method in ("Query", "StreamQuery"):
        _, trailers, _ = await call(
            *(client, VISION + method, request, pb.StreamQueryResponse), **{"grpc-timeout": "300m"}
        )
        assert trailers["grpc-status"] == "4"
    assert served.server.guard.held_bytes == 0


async def test_a_call_needs_a_token_and_the_scope_of_its_priority(http, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of("someone", [Scope.INFER], "k" * 40))
    security = SecurityConfig(auth_tokens=str(tokens))
    _, client = await http(server_config={"security": security})
    request = pb.QueryRequest(images=[IMAGE], query={"question": "What?", **SETTINGS})
    _, trailers, _ = await call(client, f"{VISION}Query", request)
    assert trailers["grpc-status"] == "16"
    known = {"authorization": f"Bearer {'k' * 40}"}
    _, trailers, _ = await call(client, f"{VISION}Query", request, pb.QueryResponse, **known)
    assert trailers["grpc-status"] == "0"
    request.options.priority = common_pb2.PRIORITY_HIGH
    _, trailers, _ = await call(client, f"{VISION}Query", request, **known)
    assert trailers["grpc-status"] == "7"


async def test_pages_of_allowed_origins_only_may_call(http):
    asks = {
        "origin": "https://app.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,grpc-timeout,x-grpc-web",
    }
    _, client = await http()
    assert (await client.options(f"{VISION}Query", headers=asks)).status_code == 405
    config = HttpConfig(
        http_listen=("127.0.0.1:0",), http_allow_origins=("https://app.example.org",)
    )
    _, client = await http(server_config={"http": config})
    response = await client.options(f"{VISION}Query", headers=asks)
    assert response.headers["access-control-allow-origin"] == asks["origin"]
    assert "grpc-timeout" in response.headers["access-control-allow-headers"]
    request = frame(pb.QueryRequest(query={"question": "What?", **SETTINGS}))
    response = await client.post(
        f"{VISION}Query", content=request, headers={**TYPE, "origin": asks["origin"]}
    )
    assert response.headers["access-control-allow-origin"] == asks["origin"]
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    other = {**asks, "origin": "https://evil.example.org"}
    response = await client.options(f"{VISION}Query", headers=other)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origin", ["app.example.org", "https://a.org/", "https://a.org/x", "ftp://a.org", "*.a.org", ""]
)
def test_an_origin_has_a_scheme_and_no_path(origin):
    origins = parser_of(settings_of(HttpConfig)["http_allow_origins"])
    assert origins("https://App.example.org, http://[::1]:8080,*") == [
        *("https://app.example.org", "http://[::1]:8080", "*")
    ]
    with pytest.raises(ValueError, match="SCHEME://HOST"):
        origins(origin)
