"""/v2 by HTTP: metadata, JSON and binary tensors, and errors in Triton's form."""

import base64
import json
import struct
from typing import Any

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.http.conftest import http
from tests.kserve.conftest import infer, jpeg, output, raw_form

__all__ = ["http"]
URL = "/v2/models/moondream/infer"
LENGTH = "inference-header-content-length"


def tensor(name: str, datatype: str, *data: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": list(data), **more}


QUESTION = [tensor("SKILL", "BYTES", "query"), tensor("QUESTION", "BYTES", "What?")]
SETTINGS = [tensor("TEMPERATURE", "FP32", 0), tensor("MAX_TOKENS", "INT32", 4)]


async def test_what_is_known_about_server_and_model(http):
    _, client = await http(load=False)
    assert (await client.get("/v2/health/live")).status_code == 200
    for path in ("/v2/health/ready", "/v2/models/moondream/ready"):
        assert (await client.get(path)).status_code == 503
    _, client = await http()
    assert (await client.get("/v2/health/ready")).status_code == 200
    assert (await client.get("/v2/models/moondream/versions/1/ready")).status_code == 200
    assert (await client.get("/v2")).json()["name"] == "kestrel"
    metadata = (await client.get("/v2/models/moondream")).json()
    assert metadata["inputs"][0] == {"name": "SKILL", "datatype": "BYTES", "shape": [1]}
    config = (await client.get("/v2/models/moondream/config")).json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["output"] == [{"name": "TEXT_OUTPUT", "data_type": "TYPE_STRING", "dims": [1]}]
    stats = (await client.get("/v2/models/moondream/stats")).json()["model_stats"]
    assert stats[0]["inference_count"] == 0
    assert (await client.get("/v2/models/stats")).json()["model_stats"] == stats
    index = (await client.post("/v2/repository/index", content=b"")).json()
    assert index == [{"name": "moondream", "version": "1", "state": "READY", "reason": ""}]
    missing = await client.get("/v2/models/llava")
    assert missing.status_code == 404 and missing.json()["error"].startswith("name: 'llava'")
    unknown = await client.get("/v2/nope")
    assert (unknown.status_code, unknown.json()) == (404, {"error": "there is no path '/v2/nope'"})
    for verb, path in (
        ("POST", "/v2/repository/models/moondream/load"),
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/logging"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/cudasharedmemory/region/a/register"),
    ):
        refused = await client.request(verb, path, content=b"" if verb == "GET" else b"{}")
        assert refused.status_code == 501 and len(refused.json()["error"]) > 30


async def test_json_and_binary_tensors_answer_as_grpc_does(http):
    served, client = await http()
    stub = GRPCInferenceServiceStub(served.channel)
    asked = {"SKILL": "query", "QUESTION": "What?", "TEMPERATURE": 0.0, "MAX_TOKENS": 4}
    answer = output(await stub.ModelInfer(infer(**asked)))["answer"]

    body = {"id": "a1", "inputs": QUESTION + SETTINGS}
    got = (await client.post(URL, json=body)).json()
    assert (got["model_name"], got["model_version"], got["id"]) == ("moondream", "1", "a1")
    (text,) = got["outputs"][0]["data"]
    assert json.loads(text)["answer"] == answer

    image = raw_form("BYTES", jpeg())
    answer = output(await stub.ModelInfer(infer(IMAGE=jpeg(), **asked)))["answer"]
    shape = {"name": "IMAGE", "datatype": "BYTES", "shape": [1]}
    body["inputs"] = [
        {**shape, "parameters": {"binary_data_size": len(image)}},
        *QUESTION,
        {**shape, "name": "MAX_TOKENS", "datatype": "INT32", "parameters": {"binary_data_size": 4}},
        SETTINGS[0],
    ]
    body["outputs"] = [{"name": "TEXT_OUTPUT", "parameters": {"binary_data": True}}]
    head = json.dumps(body).encode()
    content = head + image + struct.pack("<i", 4)
    response = await client.post(URL, content=content, headers={LENGTH: str(len(head))})
    assert response.status_code == 200, response.text
    length = int(response.headers[LENGTH])
    told, raw = json.loads(response.content[:length]), response.content[length:]
    (described,) = told["outputs"]
    assert described["parameters"] == {"binary_data_size": len(raw)} and "data" not in described
    whole = pb.ModelInferResponse.InferOutputTensor(
        name=described["name"], datatype=described["datatype"], shape=described["shape"]
    )
    values = output(pb.ModelInferResponse(outputs=[whole], raw_output_contents=[raw]))
    assert values["answer"] == answer


BAD = [
    ([tensor("SKILL", "BYTES", "smell")], {}, "SKILL: 'smell' is not one of"),
    ([tensor("SKILL", "BYTES", 7)], {}, "SKILL: data must be strings"),
    ([tensor("SKILL", "BYTES", "a", "b")], {}, "SKILL: has 10 bytes"),
    ([*QUESTION, tensor("MAX_TOKENS", "INT32", "x")], {}, "MAX_TOKENS: data must be numbers"),
    ([*QUESTION, tensor("MAX_TOKENS", "INT32", 2**40)], {}, "MAX_TOKENS: data must be numbers"),
    ([*QUESTION, tensor("TOP_P", "FP32", 7)], {}, "TOP_P: 7.0 is not in (0, 1]"),
    ([*QUESTION, tensor("TOP_P", "FP99", 7)], {}, "TOP_P: has datatype 'FP99'"),
    ([tensor("SKILL", "BYTES", "query", shape=[-1])], {}, "SKILL: shape must be"),
    ([tensor("SKILL", "BYTES", "query", shape="1")], {}, "inputs[0].shape: must be a list"),
    ([tensor("SKILL", "BYTES", [[[[[[[[["query"]]]]]]]]])], {}, "SKILL: data must have at most 8"),
    ([tensor("SKILL", "BYTES", parameters={"binary_data_size": 9})], {}, "SKILL: has binary_data_size 9, but 0 bytes"),
    ([tensor("SKILL", "BYTES", parameters={"shared_memory_region": "a"})], {}, "SKILL: this server shares no memory"),
    (["x"], {}, "inputs[0]: must be an object"),
    (QUESTION, {"outputs": [{"name": "LOGITS"}]}, "outputs: 'LOGITS' is not TEXT_OUTPUT"),
    (QUESTION, {"parameters": {"timeout": [1]}}, "parameters.timeout: must be"),
    (QUESTION, {"parameters": {"sequence_id": 2}}, "parameters.sequence_id: the model has no"),
]  # fmt: skip


async def test_bad_input_is_refused_by_name(http):
    _, client = await http()
    for inputs, more, words in BAD:
        response = await client.post(URL, json={"inputs": inputs, **more})
        assert response.status_code == 400
        assert response.json().keys() == {"error"}
        assert response.json()["error"].startswith(words), response.text


async def test_broken_bodies_are_refused(http):
    _, client = await http()
    for headers, body, words in (
        ({LENGTH: "999"}, b"{}", "Inference-Header-Content-Length must be in [0, 2]"),
        ({LENGTH: "-1"}, b"{}", "Inference-Header-Content-Length must be in [0, 2]"),
        ({LENGTH: "2"}, b"{}abc", "3 bytes follow the last binary tensor"),
        ({"content-encoding": "gzip"}, b"{}", "the body is compressed"),
        ({}, b"[]", "the body must be a JSON object"),
        ({}, b"{}", "SKILL: is required"),
    ):
        response = await client.post(URL, content=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"].startswith(words), response.text


async def test_an_image_in_base64_and_whole_numbers_as_floats(http):
    """As MLServer's clients send them."""
    served, client = await http()
    stub = GRPCInferenceServiceStub(served.channel)
    asked = {"SKILL": "query", "QUESTION": "What?", "TEMPERATURE": 0.0, "MAX_TOKENS": 4}
    answer = output(await stub.ModelInfer(infer(IMAGE=jpeg(), **asked)))["answer"]
    text = base64.b64encode(jpeg()).decode()
    limit = tensor("MAX_TOKENS", "INT32", 4.0, shape=[1.0])
    settings = [SETTINGS[0], limit, tensor("REASONING", "BOOL", False)]
    for form in (text, text.rstrip("="), f"data:image/jpeg;base64,{text}"):
        image = tensor("IMAGE", "BYTES", form, parameters={"content_type": "base64"})
        body = {"inputs": [*QUESTION, image, *settings]}
        got = (await client.post(URL, json=body)).json()
        assert json.loads(got["outputs"][0]["data"][0])["answer"] == answer
    image["data"] = ["*"]
    refused = await client.post(URL, json=body)
    assert refused.status_code == 400 and refused.json()["error"].startswith("IMAGE: is not valid")
    limit["data"] = [4.5]
    assert (await client.post(URL, json={"inputs": [*QUESTION, limit]})).status_code == 400
