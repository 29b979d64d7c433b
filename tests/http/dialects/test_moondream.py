"""Moondream's REST interface over the fake runtime: the same answers as by gRPC, and clear errors."""

import base64
import dataclasses
import json
from typing import Any

import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from tests.fake_runtime import FakeRuntime
from tests.http.conftest import data_url, question_with_stop
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime
from tests.service.services.test_skills import segment_script

SETTINGS = {"temperature": 0, "max_tokens": 12}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def test_every_skill_answers_as_grpc_does(http):
    served, client = await http()
    url = data_url()
    image = common_pb2.Image(encoded=base64.b64decode(url.partition(",")[2]))
    settings: Any = {"max_tokens": 12, "sampling": {"temperature": 0}}
    dot = {"objects": ["dot"], **settings}
    asked = {"image_url": url, "settings": SETTINGS}

    body = (await client.post("/v1/query", json={**asked, "question": "What?"})).json()
    response = await served.vision.Query(
        pb.QueryRequest(images=[image], query={"question": "What?", **settings})
    )
    assert body["answer"] == response.answers[0].text and body["answer"]
    assert body["metrics"]["output_tokens"] == response.usage.output_tokens
    assert body["finish_reason"] in ("stop", "length") and body["request_id"]

    body = (await client.post("/v1/caption", json={**asked, "length": "short"})).json()
    short = pb.CaptionTask(length=pb.CAPTION_LENGTH_SHORT, **settings)
    caption = await served.vision.Caption(pb.CaptionRequest(image=image, caption=short))
    assert body["caption"] == caption.captions[0].text

    body = (await client.post("/v1/point", json={**asked, "object": "dot"})).json()
    points = await served.vision.Point(pb.PointRequest(image=image, point=dot))
    assert body["points"] == [
        {"x": each.point.x, "y": each.point.y, "score": each.score} for each in points.detections
    ]
    assert body["count"] == len(points.detections)
    assert body["absence"] == points.searches[0].absence

    body = (await client.post("/v1/detect", json={**asked, "object": "dot"})).json()
    found = await served.vision.Detect(pb.DetectRequest(image=image, detect=dot))
    left = [each.box.x_min for each in found.detections]
    assert [box["x_min"] for box in body["objects"]] == left
    assert 0 <= body["absence"] == found.searches[0].absence <= 1

    body = (await client.post("/v1/segment", json={**asked, "object": "dot"})).json()
    outlines = await served.vision.Segment(pb.SegmentRequest(image=image, segment=dot))
    assert body["path"] == "".join(each.outline.svg_path for each in outlines.detections)


async def test_gazes_are_those_of_grpc(http):
    served, client = await http()
    url = data_url()
    image = common_pb2.Image(encoded=base64.b64decode(url.partition(",")[2]))
    face = {"x_min": 0.25, "y_min": 0.25, "x_max": 0.5, "y_max": 0.75}

    async def ask(**fields: Any) -> Any:
        body = {"image_url": url, "settings": {"seed": 3}, **fields}
        return (await client.post("/v1/gaze", json=body)).json()

    async def by_grpc(**fields: Any) -> Any:
        gaze = pb.GazeTask(**fields, sampling={"seed": 3})
        return await served.vision.Gaze(pb.GazeRequest(image=image, gaze=gaze))

    def values(gaze: pb.Gaze) -> Any:
        return {"x": gaze.target.x, "y": gaze.target.y, "score": gaze.score}

    for asked, fields in (
        ({"eye": [0.25, 0.5]}, {"eyes": [common_pb2.Point(x=0.25, y=0.5)]}),
        ({"face": face}, {"faces": [common_pb2.Box(**face)]}),
        ({"face": {**face, "score": 0.5}, "accurate": True}, {"faces": [face], "accurate": True}),
    ):
        body, (gaze,) = await ask(**asked), (await by_grpc(**fields)).gazes
        assert (body["gaze"], body["absence"]) == (values(gaze), gaze.absence)
        assert body["finish_reason"] == "stop" and body["metrics"]["output_tokens"] > 0
    body, response = await ask(max_faces=2), await by_grpc(max_faces=2)
    assert body["count"] == len(body["gazes"]) == len(response.gazes) > 0
    assert body["face_absence"] == response.search.absence
    for told, gaze in zip(body["gazes"], response.gazes, strict=True):
        assert told["gaze"] == values(gaze)
        assert told["eye"] == {"x": gaze.eye.x, "y": gaze.eye.y}
        assert told["face"]["x_max"] == gaze.face.x_max
    for wrong, param, words in (
        ({"eye": [0.5]}, "eye", "must have 2 numbers, got 1"),
        ({"eye": [0.5, 1.5]}, "eye", "1.5 is not a number in [0, 1]"),
        ({"eye": [0.5, "x"]}, "eye[1]", "must be a number"),
        ({"eye": "x"}, "eye", "must be a list"),
        ({"eye": [0, 0], "face": face}, "face", "beside an eye"),
        ({"eye": [0, 0], "accurate": True}, "accurate", "face"),
        ({"face": [0, 0, 1, 1]}, "face", "must be an object"),
        ({"face": {"x_min": 0}}, "face.y_min", "is required"),
        ({"face": {**face, "x_min": 2}}, "face.x_min", "2.0 is not"),
        ({"face": {**face, "x_min": 0.75}}, "face", "x_min <= x_max"),
        ({"max_faces": 0}, "max_faces", "must be in [1, 256]"),
        ({"object": "dot"}, "object", "is not a field of /v1/gaze"),
    ):
        error = (await ask(**wrong))["error"]
        assert error["param"] == param and words in error["message"], error


async def test_a_gaze_out_of_the_image_is_null(http):
    _, client = await http(runtime=FakeRuntime(LIMITS, lambda fed: 0))
    body = (await client.post("/v1/gaze", json={"image_url": data_url(), "eye": [0, 1]})).json()
    assert body["gaze"] is None and 0 <= body["absence"] <= 1
    body = (await client.post("/v1/gaze", json={"image_url": data_url()})).json()
    assert (body["gazes"], body["count"]) == ([], 0)


async def test_an_outline_is_refined_unless_the_request_says_no(http):
    path = [100 + b for b in b"M00" + b"l90" * 80 + b"l09" * 80 + b"z"]
    limits = dataclasses.replace(LIMITS, refines=True, max_seq_length=1200, num_pages=1300)
    _, client = await http(runtime=FakeRuntime(limits, segment_script(path)))
    asked = {"image_url": data_url(), "object": "dot"}
    refined = (await client.post("/v1/segment", json=asked)).json()
    coarse = (await client.post("/v1/segment", json={**asked, "refine": False})).json()
    assert coarse["path"] == refined["coarse_path"] != refined["path"]
    assert "coarse_path" not in coarse
    error = (await client.post("/v1/segment", json={**asked, "refine": 3})).json()["error"]
    assert error["param"] == "refine"


async def test_several_objects_and_stop(http):
    _, client = await http()
    asked = {"image_url": data_url(), "settings": SETTINGS}
    for path, key in (("detect", "objects"), ("point", "points")):
        alone = [
            (await client.post(f"/v1/{path}", json={**asked, "object": name})).json()[key]
            for name in ("dot", "line")
        ]
        body = (await client.post(f"/v1/{path}", json={**asked, "objects": ["dot", "line"]})).json()
        assert [each["object"] for each in body["results"]] == ["dot", "line"]
        assert [each[key] for each in body["results"]] == alone
        assert all(0 <= each["absence"] <= 1 for each in body["results"])
        assert body["metrics"]["output_tokens"] > 0 and body["request_id"]
        mixed = {**asked, "objects": ["dot", " "]}
        results = (await client.post(f"/v1/{path}", json=mixed)).json()["results"]
        assert results[0][key] == alone[0] and results[1]["error"]["message"]
        for wrong, name in (
            ({"object": "dot", "objects": ["line"]}, "objects"),
            ({"objects": ["dot", 3]}, "objects[1]"),
            ({"objects": ["dot", "dot"]}, "objects"),
        ):
            refused = await client.post(f"/v1/{path}", json={**asked, **wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name

    async def ask(question: str) -> str:
        body = (await client.post("/v1/query", json={**asked, "question": question})).json()
        return str(body["answer"])

    asked["question"], text, stop = await question_with_stop(ask)
    asked["settings"] = {**SETTINGS, "stop": stop}
    body = (await client.post("/v1/query", json=asked)).json()
    assert body["answer"] == text[: text.index(stop)] and body["finish_reason"] == "stop"
    asked["settings"] = {**SETTINGS, "stop": ["x", 3]}
    error = (await client.post("/v1/query", json=asked)).json()["error"]
    assert error["param"] == "settings.stop[1]"


@pytest.mark.parametrize("path", ["query", "caption"])
async def test_a_stream_ends_with_the_whole_answer(http, path: str):
    _, client = await http()
    asked = {"image_url": data_url(), "settings": SETTINGS}
    asked |= {"question": "What?"} if path == "query" else {}
    whole = (await client.post(f"/v1/{path}", json=asked)).json()
    response = await client.post(f"/v1/{path}", json={**asked, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, final = events(response.text)
    key = {"query": "answer", "caption": "caption"}[path]
    assert pieces and not any(piece["completed"] for piece in pieces)
    assert final["completed"] and final["chunk"] == ""
    assert "".join(piece["chunk"] for piece in pieces) == final[key] == whole[key]


async def test_errors_name_the_json_field(http):
    _, client = await http()
    url = data_url()
    seen = {"image_url": url, "object": "x"}
    cases: list[tuple[str, Any, int, str | None, str]] = [
        ("query", {"question": 3}, 400, "question", "must be a string, got a number"),
        ("query", {}, 400, "question", "is required"),
        ("query", {"question": " "}, 400, "question", ""),
        ("caption", {"image_url": "http://x/y.jpg"}, 400, "image_url", "this server fetches none"),
        ("caption", {"image_url": "data:image/png;base64,!!"}, 400, "image_url", "base64"),
        ("caption", {"image_url": "AAAA"}, 400, "image_url", ""),
        ("caption", {"image_url": url, "length": "tiny"}, 400, "length", "short, normal or long"),
        ("caption", {"image_url": url, "settings": {"temperature": -1}}, 400, "settings.temperature", ""),
        ("detect", {**seen, "settings": {"max_objects": 0}}, 400, "settings.max_objects", "must be in [1,"),
        ("segment", {**seen, "settings": {"min_score": 1.5}}, 400, "settings.min_score", "in [0, 1]"),
        ("detect", {**seen, "settings": {"max_overlap": 2}}, 400, "settings.max_overlap", "above 0 and below 1"),
        (
            "query",
            {"image_url": url, "question": "x", "settings": {"region": [0.5, 0, 0.2, 1]}},
            400,
            "settings.region",
            "needs x_min < x_max",
        ),
        ("query", {"question": "x", "settings": {"region": [0, 0, 1, 1]}}, 400, "settings.region", "image_url"),
        ("point", {**seen, "settings": {"tiles": {"rows": 5, "columns": 5}}}, 400, "settings.tiles", "must be 2 to 16"),
        (
            "point",
            {**seen, "settings": {"tiles": {"rows": 2, "columns": 0}}},
            400,
            "settings.tiles.columns",
            "must be in [1,",
        ),
        ("point", {**seen, "model": "gpt"}, 404, "model", "gpt"),
        ("point", {**seen, "model": "moondream3-preview/ab@1"}, 404, "model", "there is no adapter 'ab@1'"),
        ("point", {**seen, "spatial_refs": [[1]]}, 400, "spatial_refs[0]", "2 or 4"),
        ("query", [1], 400, None, "must be a JSON object"),
        ("query", "x", 400, None, "must be a JSON object"),
    ]  # fmt: skip
    for path, body, status, param, part in cases:
        response = await client.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), (path, body, error)
        assert part in error["message"]
        assert response.headers["x-request-id"]
    response = await client.post(
        "/v1/query", content=b'{"question": ', headers={"content-type": "application/json"}
    )
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]
    assert (await client.get("/v1/query")).status_code == 405
    assert (await client.post("/v1/nothing", json={})).status_code == 404


async def test_callers_are_known_before_their_body_is_read(http, monkeypatch):
    security = SecurityConfig(api_key="k" * 40)
    served, client = await http(server_config={"security": security})
    asked = {"question": "Why?", "settings": SETTINGS}
    refused = await client.post("/v1/query", json=asked)
    assert refused.status_code == 401 and refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "credentials_missing"
    wrong = await client.post("/v1/query", json=asked, headers={"X-Moondream-Auth": "wrong"})
    assert wrong.status_code == 401
    for headers in ({"X-Moondream-Auth": "k" * 40}, {"Authorization": f"Bearer {'k' * 40}"}):
        response = await client.post("/v1/query", json=asked, headers=headers)
        assert response.status_code == 200, response.text
    assert served.server.guard.held_bytes == 0


async def test_too_large_a_body_is_refused_before_it_is_read(http):
    served, client = await http(server_config={"max_message_bytes": 100_000})
    body = {"question": "x" * 2_000_000}
    response = await client.post("/v1/query", json=body)
    assert response.status_code == 413 and "limit" in response.json()["error"]["message"]
    assert served.server.guard.held_bytes == 0


async def test_overload_says_when_to_come_back(http):
    security = SecurityConfig(calls=CallLimits(calls=1))
    _, client = await http(runtime=EndlessRuntime(), server_config={"security": security})
    asked = {"question": "Why?", "stream": True, "settings": {"max_tokens": NO_END}}
    async with client.stream("POST", "/v1/query", json=asked) as response:
        async for _ in response.aiter_lines():
            break
        refused = await client.post("/v1/query", json={"question": "Why?"})
        assert refused.status_code == 429, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0


async def test_health_follows_the_model(http):
    served, client = await http(load=False)
    assert (await client.get("/healthz")).status_code == 503
    unready = await client.post("/v1/query", json={"question": "Why?"})
    assert unready.status_code == 503 and unready.headers["retry-after"]
    await served.server.load()
    assert (await client.get("/healthz")).json() == {"status": "ready"}
    await served.server.drain()
    assert (await client.get("/health")).status_code == 503


async def test_a_region_and_tiles_are_settings(http):
    _, client = await http()
    asked = {"image_url": data_url(), "object": "cat"}
    settings = {"max_objects": 2, "region": [0.5, 0, 1, 1], "tiles": {"rows": 1, "columns": 2}}
    for path, key in (("point", "points"), ("detect", "objects")):
        answer = (await client.post(f"/v1/{path}", json={**asked, "settings": settings})).json()
        alone = (
            await client.post(f"/v1/{path}", json={**asked, "settings": {"max_objects": 2}})
        ).json()
        assert all(place.get("x", place.get("x_min")) >= 0.5 for place in answer[key])
        input_tokens = alone["metrics"]["input_tokens"]
        assert answer["metrics"]["input_tokens"] == 3 * input_tokens
