"""The description of the HTTP port: what it says, and that the port does what it says."""

import asyncio
import re
from pathlib import Path

import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_grpc.http.dialects.known_fields import CHAT, MOONDREAM_SETTINGS
from kestrel_grpc.http.dialects.openai import UNSUPPORTED_PATHS
from kestrel_grpc.settings.batches import BatchesConfig
from tests.environments import python_with


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
    assert "/v2/models/{model}" in paths and "/v2/logging" not in paths, "it is always refused"
    stream = paths["/kestrel.v1.VisionService/StreamQuery"]["post"]["requestBody"]["content"]
    assert stream.keys() == {"application/connect+proto"}, "an envelope is no JSON"
    assert schemas["kestrel.v1.QueryTask"]["properties"]["history"]["anyOf"][0]["maxItems"] == 64
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"].keys() == CHAT.honoured
    assert body["schema"]["properties"]["top_p"]["type"] == ["number", "null"]
    assert body["schema"]["x-refused"] == CHAT.refused
    detect = paths["/v1/detect"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    settings = detect["properties"]["settings"]["properties"]
    assert settings.keys() == MOONDREAM_SETTINGS.honoured
    assert settings["max_objects"]["type"] == ["integer", "null"]


_TRIED = "^/(v1|v2|api)/|ModelService|PutImage|/(Query|CountTokens)$"
"""The paths that are tried: thousands of requests take a minute. Schemathesis can't make envelopes: streams are left to
tests/abuse/connections/test_every_route.py."""
_CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 406, 411, 413, 414, 415, 422]
"""
"""What is refused for the length of its target is refused."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_port_does_what_the_document_says(http, tmp_path: Path):
    """By schemathesis, with requests that follow the document and requests that don't. What follows it may still be
    refused: no schema says which of two fields may be set, or whether a text is an image. The other methods of
    VisionService have the same messages."""
    python = await asyncio.to_thread(python_with, tmp_path, "schemathesis>=4.32,<5")
    config = {"batches": BatchesConfig(path=str(tmp_path / "batches.db"))}
    served, _ = await http(server_config=config)
    (tmp_path / "schemathesis.toml").write_text(_CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(python.with_name("schemathesis"), "run"),
        f"http://{served.server.http_addresses[0]}/openapi.json",
        *("--phases", "coverage,fuzzing", "-n", "3", "--generation-deterministic"),
        *("--exclude-checks", "positive_data_acceptance", "--continue-on-failure"),
        *("--include-path-regex", _TRIED, "--request-timeout", "60"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-5000:]
    assert re.search(rb"(\d{4}) generated, \1 passed", out)
    assert served.server.guard.held_bytes == 0
