"""The description of the HTTP port: what it says, and that the port does what it says."""

from __future__ import annotations

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_grpc.http.dialects.known_fields import CHAT, MOONDREAM_SETTINGS
from kestrel_grpc.http.dialects.openai import UNSUPPORTED_PATHS


async def test_the_document_has_what_the_port_reads(http):
    _, client = await http()
    found = (await client.get("/openapi.json")).json()
    paths, schemas = found["paths"], found["components"]["schemas"]
    for path, operations in paths.items():
        assert path not in UNSUPPORTED_PATHS
        for verb in ("get", "post"):
            sample = path.replace("{model}", "no").replace("{version}", "1").replace("{name}", "no")
            response = await client.request(verb.upper(), sample)
            assert (response.status_code == 405) == (verb not in operations), (verb, path)
    for method in model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].methods:
        assert {"get", "post"} <= paths[f"/kestrel.v1.ModelService/{method.name}"].keys()
    sampling = schemas["kestrel.v1.Sampling"]["properties"]
    assert sampling.keys() == {each.json_name for each in common_pb2.Sampling.DESCRIPTOR.fields}
    number, null = sampling["temperature"]["anyOf"]
    assert number["type"] == ["number", "string"] and null == {"type": "null"}
    assert "Default" in sampling["temperature"]["description"]
    assert schemas["kestrel.v1.QueryRequest"]["required"] == ["query"]
    assert schemas["kestrel.v1.QueryTask"]["properties"]["history"]["anyOf"][0]["maxItems"] == 64
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"].keys() == CHAT.honoured
    assert body["schema"]["properties"]["top_p"]["type"] == ["number", "null"]
    assert body["schema"]["x-refused"] == CHAT.refused
    detect = paths["/v1/detect"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    settings = detect["properties"]["settings"]["properties"]
    assert settings.keys() == MOONDREAM_SETTINGS.honoured
    assert settings["max_objects"]["type"] == ["integer", "null"]
