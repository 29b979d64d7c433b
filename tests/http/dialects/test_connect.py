"""The Connect protocol over the fake runtime: the same messages, statuses and details as by gRPC."""

import asyncio
import base64
import gzip
import struct
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2

from kestrel_client._pb.kestrel.v1 import image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2 import LoadModelRequest
from kestrel_engine import InvalidRequest
from kestrel_grpc.edge.messages.incoming import MAX_RATIO
from kestrel_grpc.http.dialects.connect import _Envelopes
from kestrel_grpc.http.dialects.proto_json import parse_json
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of
from kestrel_grpc.settings.security import SecurityConfig
from tests.http.conftest import data_url
from tests.http.dialects.test_grpc_web import IMAGE, SETTINGS, VISION, frames
from tests.http.test_rude_http import connect
from tests.service.conftest import NO_END, EndlessRuntime
from tests.waiting import until

JSON, PROTO = {"content-type": "application/json"}, {"content-type": "application/proto"}
MODELS = "/kestrel.v1.ModelService/"
QUESTION = {"query": {"question": "What?", **SETTINGS}}


def asked(**query: Any) -> pb.QueryRequest:
    return pb.QueryRequest(images=[IMAGE], query={"question": "What?", **SETTINGS, **query})


def parsed(response: Any, kind: Any) -> Any:
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/proto":
        return kind.FromString(response.content)
    return json_format.Parse(response.content, kind())


def same(answer: Any) -> Any:
    answer.ClearField("timings")
    answer.usage.ClearField("cached_tokens")
    return answer


async def test_a_unary_call_answers_as_grpc_does_in_both_forms(http):
    served, client = await http()
    request = asked()
    request.options.request_id = "mine"
    expected = same(await served.vision.Query(request))
    assert expected.answers[0].text
    text = orjson.dumps(json_format.MessageToDict(request))
    data = request.SerializeToString()
    for headers, body in (
        (JSON, text),
        ({"content-type": "application/json; charset=utf-8"}, text),
        (PROTO, data),
        ({**JSON, "content-encoding": "gzip"}, gzip.compress(text)),
        (
            {**PROTO, "content-encoding": "gzip", "connect-protocol-version": "1"},
            gzip.compress(data),
        ),
    ):
        response = await client.post(f"{VISION}Query", content=body, headers=headers)
        assert response.headers["content-type"] == headers["content-type"].partition(";")[0]
        assert response.headers["x-request-id"] == "mine"
        assert same(parsed(response, pb.QueryResponse)) == expected
    assert served.server.guard.held_bytes == 0


async def test_json_takes_both_forms_of_names_and_a_data_url(http):
    _, client = await http()
    body = {
        "image": {"encoded": data_url(), "maxCrops": 1},
        "caption": {"max_tokens": 3},
        "options": {"priority": "PRIORITY_LOW", "requestId": "mine"},
    }
    response = await client.post(f"{VISION}Caption", json=body)
    assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
    assert response.json()["usage"]["outputTokens"] == 3


WRONG = [
    ({"query": {"question": 5}}, "query.question", "must be a string, got 5"),
    ({"query": {"questoin": ""}}, "query.questoin", "is unknown; did you mean question?"),
    ({"image": {}}, "image", "is unknown; did you mean images?"),
    ({"images": {}}, "images", "must be a list, got an object"),
    ({"images": [{}, 3]}, "images[1]", "must be an object, got 3"),
    ({"images": [{"encoded": "!"}]}, "images[0].encoded", "is not valid base64"),
    ({"images": [{"encoded": 1}]}, "images[0].encoded", "must be text in base64, got 1"),
    (
        {"images": [{"features": {"data": "!"}}]},
        "images[0].features.data",
        'must be text in base64, got "!"',
    ),
    ({"images": [{"encoded": "", "image_id": ""}]}, "images[0]", "only one of encoded, image_id"),
    ({"query": {"maxTokens": 1, "max_tokens": 1}}, "query", "only one of maxTokens, max_tokens"),
    ({"query": {"max_tokens": 2**31}}, "query.max_tokens", "number of 32 bits, got 2147483648"),
    ({"query": {"history": [{}] * 99 + [{"answer": []}]}}, "query.history[99].answer", "a string"),
    ({"options": {"priority": 1.5}}, "options.priority", "PRIORITY_HIGH, got 1.5"),
    (
        {"query": {"sampling": {"topP": True}}},
        "query.sampling.top_p",
        "must be a number, got true",
    ),
    ({"query": {"question": True}}, "query.question", "must be a string, got true"),
    ({"options": {"priority": "HIGH"}}, "options.priority", 'PRIORITY_HIGH, got "HIGH"'),
    ({"query": {"question": "?", "sampling": {"topP": 1.5}}}, "query.sampling.top_p", "1.5"),
]
"""Fields, the path in the error, and what it says."""


async def test_a_wrong_field_is_named_as_it_was_written(http):
    _, client = await http()
    for fields, path, said in WRONG:
        response = await client.post(f"{VISION}Query", json={**QUESTION, **fields})
        told = response.json()
        assert response.status_code == 400 and told["code"] == "invalid_argument"
        assert told["message"].startswith(f"{path}: ") and said in told["message"]
        details = {each["type"]: each for each in told["details"]}
        violations = details["google.rpc.BadRequest"]["debug"]["fieldViolations"]
        assert violations[0]["field"] == path
        info = error_details_pb2.ErrorInfo.FromString(
            base64.b64decode(details["google.rpc.ErrorInfo"]["value"] + "==")
        )
        assert info.metadata["field"] == path and response.headers["x-request-id"]


def test_a_map_that_is_a_list_is_refused():
    for wrong in ([], [{"precision": "int8"}]):
        with pytest.raises(InvalidRequest, match=r"^settings: must be an object, got a list$"):
            parse_json(orjson.dumps({"settings": wrong}), LoadModelRequest())


def nested(depth: int) -> bytes:
    arguments = b'{"a":' * depth + b"1" + b"}" * depth
    return b'{"skill":{"name":"query","arguments":%b}}' % arguments


BOMB = gzip.compress(b" " * 3_000_000)
MALFORMED = [
    ("Query", b"", JSON, 400, "invalid_argument", "not valid JSON"),
    ("Query", b"[]", JSON, 400, "invalid_argument", "must be a JSON object"),
    ("Query", b"[" * 90_000, JSON, 400, "invalid_argument", "more than 20000 values"),
    ("RunSkill", nested(900), JSON, 400, "invalid_argument", "skill.arguments: must be"),
    ("RunSkill", nested(9000), JSON, 400, "invalid_argument", "not valid JSON"),
    ("Query", b"\xff", PROTO, 400, "invalid_argument", "not a valid message"),
    (
        "Query",
        BOMB,
        {**JSON, "content-encoding": "gzip"},
        400,
        "invalid_argument",
        f"{MAX_RATIO} times",
    ),
    ("Query", b"{}", {**JSON, "content-encoding": "gzip"}, 400, "invalid_argument", "decompress"),
    (
        "Query",
        b"{}",
        {**JSON, "content-encoding": "br"},
        501,
        "unimplemented",
        "takes gzip and identity",
    ),
    ("Query", b"\n" * 1_200_000, PROTO, 429, "resource_exhausted", "more than 20000 fields"),
    ("Query", b" " * 3_000_000, JSON, 429, "resource_exhausted", "the limit is 2381909"),
    (
        "Query",
        b"{}",
        {**JSON, "connect-protocol-version": "2"},
        400,
        "invalid_argument",
        "must be 1",
    ),
    (
        "Query",
        b"{}",
        {**JSON, "connect-timeout-ms": "soon"},
        400,
        "invalid_argument",
        "1 to 10 digits",
    ),
    (
        "Query",
        b"{}",
        {"content-type": "application/xml"},
        415,
        "invalid_argument",
        "application/proto",
    ),
    (
        "Query",
        b"\0\0\0\0\0",
        {"content-type": "application/connect+json"},
        415,
        "invalid_argument",
        "json",
    ),
    ("StreamQuery", b"{}", JSON, 415, "invalid_argument", "application/connect+json"),
]
"""A method, a body, headers, and the status, the code and words of the answer."""


async def test_a_malformed_call_is_refused(http):
    served, client = await http(server_config={"max_message_bytes": 1_000_000})
    for method, body, headers, status, code, said in MALFORMED:
        response = await client.post(VISION + method, content=body, headers=headers)
        told = response.json()
        assert (response.status_code, told["code"]) == (status, code), (body[:20], told)
        assert said in told["message"], told["message"]
        if status == 415:
            assert "application/grpc-web+proto" in response.headers["accept-post"]
        assert served.server.guard.held_bytes == 0
    assert served.engine.stats.prompt_positions == 0


def envelope(content: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(content)) + content


def stream_type(codec: str, **headers: str) -> dict[str, str]:
    return {"content-type": f"application/connect+{codec}", **headers}


async def test_a_stream_answers_as_grpc_does_in_both_forms(http):
    served, client = await http()
    request = asked()
    texts = ["".join([each.text_delta.text async for each in served.vision.StreamQuery(request)])]
    data = {
        "json": orjson.dumps(json_format.MessageToDict(request)),
        "proto": request.SerializeToString(),
    }
    gzipped = {"connect-content-encoding": "gzip"}
    for codec, headers, body in (
        ("json", {}, envelope(data["json"])),
        ("json", gzipped, envelope(gzip.compress(data["json"]), 1)),
        ("proto", gzipped, envelope(data["proto"])),
        ("proto", gzipped, envelope(gzip.compress(data["proto"]), 1)),
    ):
        response = await client.post(
            f"{VISION}StreamQuery", content=body, headers=stream_type(codec, **headers)
        )
        assert response.status_code == 200 and response.headers["x-request-id"]
        assert response.headers["content-type"] == f"application/connect+{codec}"
        *messages, last = frames(response.content)
        assert last == (2, b"{}") and {flags for flags, _ in messages} == {0}
        read = json_format.Parse if codec == "json" else lambda data, into: into.FromString(data)
        events = [read(each, pb.StreamQueryResponse()) for _, each in messages]
        assert [each.WhichOneof("event") for each in (events[0], events[-1])] == [
            "started",
            "final",
        ]
        texts.append("".join(each.text_delta.text for each in events))
        assert texts[-1] == events[-1].final.answers[0].text
    assert len(set(texts)) == 1 and texts[0]
    assert served.server.guard.held_bytes == 0


async def test_an_error_of_a_stream_is_its_last_envelope(http):
    served, client = await http(server_config={"max_message_bytes": 1_000_000})
    wrong = orjson.dumps({**QUESTION, "images": [{"image_id": "img_0"}]})
    large = struct.pack(">BI", 0, 2**32 - 1)
    for body, headers, code, said in (
        (envelope(wrong), {}, "not_found", "images[0]"),
        (envelope(b"{}"), {"connect-protocol-version": "9"}, "invalid_argument", "must be 1"),
        (b"", {}, "invalid_argument", "no whole envelope"),
        (b"\0\0\0\0", {}, "invalid_argument", "no whole envelope"),
        (large, {}, "invalid_argument", "announces 4294967295 bytes, but 0 follow"),
        (envelope(b"{}") * 2, {}, "invalid_argument", "takes one message"),
        (envelope(b"{}", 2), {}, "invalid_argument", "flags 0 or 1, got 2"),
        (envelope(b"{}", 0x80), {}, "invalid_argument", "flags 0 or 1, got 128"),
        (envelope(b"{}", 1), {}, "invalid_argument", "connect-content-encoding is missing"),
        (envelope(b"{}"), {"connect-content-encoding": "br"}, "unimplemented", "takes gzip"),
        (envelope(b"{}"), {"content-encoding": "gzip"}, "invalid_argument", "no compressed bodies"),
        (envelope(BOMB, 1), {"connect-content-encoding": "gzip"}, "invalid_argument", "32 times"),
        (b" " * 3_000_000, {}, "resource_exhausted", "the limit is 2381909"),
    ):
        response = await client.post(
            f"{VISION}StreamQuery", content=body, headers=stream_type("json", **headers)
        )
        assert response.status_code == 200 and response.headers["x-request-id"]
        ((flags, content),) = frames(response.content)
        end = orjson.loads(content)
        assert flags == 2 and end["error"]["code"] == code and said in end["error"]["message"]
        assert end["error"]["details"][0]["type"] == "google.rpc.ErrorInfo"
        assert end["metadata"] == (
            {"grpc-retry-pushback-ms": ["-1"]} if code == "resource_exhausted" else {}
        )
    assert served.server.guard.held_bytes == served.engine.stats.prompt_positions == 0


def upload(codec: str, *parts: dict[str, Any]) -> list[bytes]:
    messages = [image_service_pb2.UploadImageRequest(**part) for part in parts]
    if codec == "proto":
        return [each.SerializeToString() for each in messages]
    return [orjson.dumps(json_format.MessageToDict(each)) for each in messages]


async def test_an_upload_is_a_stream_of_messages_of_any_length(http):
    """Also if the network cuts it at other places, and if all messages exceed the limit of one."""
    served, client = await http(server_config={"max_message_bytes": 600})
    path = "/kestrel.v1.ImageService/UploadImage"
    data, ids = IMAGE.encoded, set()
    chunks = [{"chunk": data[i : i + 300]} for i in range(0, len(data), 300)]
    assert len(data) > 600
    for codec in ("json", "proto"):
        for headers, pack in (
            ({}, envelope),
            ({"connect-content-encoding": "gzip"}, lambda each: envelope(gzip.compress(each), 1)),
        ):
            body = b"".join(map(pack, upload(codec, {"info": {}}, *chunks)))

            async def cut(body: bytes = body) -> Any:
                for i in range(0, len(body), 7):
                    yield body[i : i + 7]

            kind = stream_type(codec, **headers)
            response = await client.post(path, content=cut(), headers=kind)
            (flags, message), end = frames(response.content)
            assert flags == 0 and end == (2, b"{}")
            read = image_service_pb2.UploadImageResponse()
            json_format.Parse(message, read) if codec == "json" else read.ParseFromString(message)
            ids.add(read.image.image_id)
    request = pb.CaptionRequest(image={"image_id": ids.pop()}, caption=SETTINGS)
    assert (await served.vision.Caption(request)).captions
    info, chunk = upload("json", {"info": {}}, {"chunk": data[:300]})
    for body, code, said in (
        (b"", "invalid_argument", "info"),
        (envelope(info) + b"\0\0", "invalid_argument", "ends within an envelope"),
        (envelope(info) + envelope(chunk)[:-1], "invalid_argument", "ends within an envelope"),
        (envelope(info) + envelope(chunk, 2), "invalid_argument", "flags 0 or 1"),
        (envelope(info) + envelope(b" " * 601), "resource_exhausted", "the limit is 600"),
        (envelope(info) + envelope(b"{}"), "invalid_argument", "the message is empty"),
        (envelope(info) + envelope(b'{"chunks": 1}'), "invalid_argument", "did you mean chunk?"),
    ):
        response = await client.post(path, content=body, headers=stream_type("json"))
        ((flags, end),) = frames(response.content)
        error = orjson.loads(end)["error"]
        assert flags == 2 and error["code"] == code and said in error["message"], error
    gzipped = stream_type("proto", **{"connect-content-encoding": "gzip"})
    response = await client.post(path, content=envelope(b"\n\0", 1), headers=gzipped)
    assert b"cannot be decompressed" in response.content
    assert served.server.guard.held_bytes == 0


async def test_other_work_runs_between_the_envelopes_of_one_chunk():
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": envelope(b"") * 100}

    envelopes, turns = _Envelopes(receive, 10, False), 0

    async def read_all() -> None:
        for _ in range(100):
            assert await envelopes.read() == b""

    reading = asyncio.create_task(read_all())
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 100


async def test_an_upload_whose_client_leaves_is_given_up(http):
    served, _ = await http()
    _, writer = await connect(served)
    (info,) = upload("proto", {"info": {}})
    writer.write(
        b"POST /kestrel.v1.ImageService/UploadImage HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/connect+proto\r\ntransfer-encoding: chunked\r\n\r\n"
        b"5\r\n" + envelope(info)[:5] + b"\r\n"
    )
    await until(lambda: served.server.guard.held_bytes and served.server.in_flight.count)
    writer.close()
    await until(lambda: not served.server.guard.held_bytes and not served.server.in_flight.count)


async def test_get_is_for_the_methods_that_the_protos_mark_and_none_of_these_computes(http):
    served, client = await http()
    for file in (pb, image_service_pb2, model_service_pb2):
        (service,) = file.DESCRIPTOR.services_by_name.values()
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}?connect=v1&encoding=json&message=%7B%7D"
            response = await client.get(path)
            if file is model_service_pb2:
                # The names are missing that GetModel and ListAdapters need.
                assert response.status_code in (200, 404), (path, response.text)
            elif not method.client_streaming:
                assert response.status_code == 405 and response.headers["allow"] == "POST", path
    response = await client.request("PUT", f"{MODELS}GetLoad")
    assert response.status_code == 405 and set(response.headers["allow"].split(", ")) >= {
        "GET",
        "POST",
    }
    assert served.engine.stats.prompt_positions == 0


async def test_a_get_takes_its_message_from_the_query(http):
    _, client = await http()
    name = (await client.get(f"{MODELS}ListModels?connect=v1&encoding=json&message={{}}")).json()[
        "models"
    ][0]["name"]
    request = model_service_pb2.GetModelRequest(model=name)
    data = request.SerializeToString()
    text = orjson.dumps({"model": name})

    def url(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode()

    for query in (
        f"encoding=json&message={quote(text)}&other=1&other=2&base64=0",
        f"message={url(text)}&base64=1&encoding=json",
        f"message={quote(url(data))}&base64=1&encoding=proto",
        f"message={url(data).rstrip('=')}&base64=1&encoding=proto&compression=identity",
        f"message={quote(url(gzip.compress(data)))}&base64=1&encoding=proto&compression=gzip",
    ):
        response = await client.get(f"{MODELS}GetModel?connect=v1&{query}")
        assert parsed(response, model_service_pb2.GetModelResponse).model.name == name, query
    bomb = url(gzip.compress(b"\0" * 1_000_000))
    for query, status, said in (
        ("encoding=json&message={}", 400, "connect=v1"),
        ("connect=v2&encoding=json&message={}", 400, "connect=v1"),
        ("connect=v1&encoding=json", 400, "must have message"),
        ("connect=v1&message={}", 400, "must have encoding"),
        ("connect=v1&encoding=xml&message={}", 415, "json"),
        ("connect=v1&encoding=json&message={}&message={}", 400, "twice"),
        ("connect=v1&encoding=json&message=a+b&base64=1", 400, "base64"),
        ("connect=v1&encoding=json&message=a&base64=1", 400, "base64"),
        ("connect=v1&encoding=json&message=%FF", 400, "JSON"),
        ("connect=v1&encoding=json&message={}&compression=br", 501, "takes gzip"),
        (
            f"connect=v1&encoding=json&message={bomb}&base64=1&compression=gzip",
            400,
            "more than 65536",
        ),
    ):
        response = await client.get(f"{MODELS}GetModel?{query}")
        assert response.status_code == status and said in response.json()["message"], query
    response = await client.get(f"{MODELS}GetModel?connect=v1&encoding=json&message={'a' * 16_000}")
    assert response.status_code in (414, 431)


async def test_the_deadline_of_the_call_ends_its_request(http):
    served, client = await http(runtime=EndlessRuntime())
    body = asked(max_tokens=NO_END).SerializeToString()
    limit = {"connect-timeout-ms": "300"}
    response = await client.post(f"{VISION}Query", content=body, headers={**PROTO, **limit})
    assert response.status_code == 504 and response.json()["code"] == "deadline_exceeded"
    headers = stream_type("proto", **limit)
    response = await client.post(f"{VISION}StreamQuery", content=envelope(body), headers=headers)
    *_, (flags, end) = frames(response.content)
    assert flags == 2 and orjson.loads(end)["error"]["code"] == "deadline_exceeded"
    assert served.server.guard.held_bytes == 0


async def test_a_call_needs_a_token_and_says_when_to_come_again(http, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of("someone", [Scope.INFER], "k" * 40))
    security = SecurityConfig(auth_tokens=str(tokens))
    _, client = await http(server_config={"security": security})
    response = await client.post(f"{VISION}Query", json=QUESTION)
    assert response.status_code == 401 and response.json()["code"] == "unauthenticated"
    known = {"authorization": f"Bearer {'k' * 40}"}
    response = await client.post(f"{VISION}Query", json=QUESTION, headers=known)
    assert response.status_code == 200
    high = {**QUESTION, "options": {"priority": "PRIORITY_HIGH"}}
    response = await client.post(f"{VISION}Query", json=high, headers=known)
    assert response.status_code == 403 and response.json()["code"] == "permission_denied"
    response = await client.post("/kestrel.v1.AdminService/Drain", json={}, headers=known)
    assert response.status_code == 404
