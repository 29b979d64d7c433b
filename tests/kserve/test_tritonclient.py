"""The unmodified tritonclient, in an environment of its own because it needs an older protobuf, drives every RPC."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from tests.code_blocks import ROOT, code_blocks
from tests.environments import printed, python_with
from tests.service.cli.serve_process import Addresses, served_model

pytestmark = pytest.mark.slow
KEY = "k" * 40
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
QUESTION = "How many green crescents are there?"


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    """Of a server that knows one key."""
    with served_model(KESTREL_API_KEY=KEY) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def address(addresses: Addresses) -> str:
    return addresses.grpc


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return python_with(tmp_path_factory.mktemp("triton"), "tritonclient[grpc,http]>=2.60,<3")


@pytest.fixture(scope="module")
def out(address: str, python: Path) -> Any:
    return json.loads(printed(python, ROOT / "tests/kserve/triton_program.py", address, KEY, IMAGE))


def test_server_and_model(out):
    assert out["live"] and out["ready"] and out["decoupled"]
    assert out["server"]["name"] == "kestrel" and "statistics" in out["server"]["extensions"]
    assert [each["name"] for each in out["model"]["inputs"]] == ["SKILL", *out["optional"]]
    assert out["index"] == [{"name": "moondream", "version": "1", "state": "READY"}]
    assert out["statistics"][0] == "moondream" and out["statistics"][1] >= 6


def test_answers(out):
    whole = out["infer"]
    assert whole["answer"] == "2" and whole["request_id"] == out["infer_id"] == "seven"
    assert out["stream"][-1]["answer"] == "2"
    *pieces, final = out["caption"]
    assert len(pieces) > 3 and "".join(each["chunk"] for each in pieces) == final["caption"]
    (found,), (points,) = out["detect"], out["point"]
    assert len(found["objects"]) == len(points["points"]) == 2
    assert out["pixels"]


def test_errors(out):
    assert out["bad"] == ["StatusCode.INVALID_ARGUMENT", "TEMPERATURE: 200.0 is not in [0, 100]"]
    assert out["other_model"][0] == "StatusCode.NOT_FOUND"
    assert out["no_token"][0] == "StatusCode.UNAUTHENTICATED"
    assert out["between"] == ["first", "third"]
    assert out["error"] == ["INVALID_ARGUMENT: QUESTION: must not be empty"]
    assert len(out["unserved"]) == 12
    for name, (status, words) in out["unserved"].items():
        assert status == "StatusCode.UNIMPLEMENTED" and len(words) > 30, name


def test_our_messages_are_the_clients(out):
    """Field by field, with numbers and types. ModelConfig has fewer fields here."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert len(service.methods) == out["rpcs"] == 20

    def check(message: Any, theirs: dict[str, Any], *, whole: bool) -> None:
        ours = {f"{field.name}={field.number}": field for field in message.fields}
        assert ours.keys() <= theirs.keys() and (ours.keys() == theirs.keys() or not whole)
        for name, field in ours.items():
            assert [field.type, field.is_repeated] == theirs[name][:2], (message.name, name)
            if field.message_type is not None and len(theirs[name]) > 2:
                check(field.message_type, theirs[name][2], whole=field.name != "config")

    for name, theirs in out["messages"].items():
        check(pb.DESCRIPTOR.message_types_by_name[name], theirs, whole=True)


def test_http(addresses: Addresses, python: Path):
    out = json.loads(
        printed(python, "tests/kserve/triton_http_program.py", addresses.http, KEY, IMAGE)
    )
    assert out["live"] and out["ready"] and out["server"] == "kestrel"
    assert out["model"] == [{"name": "TEXT_OUTPUT", "datatype": "BYTES", "shape": [1]}]
    assert out["decoupled"] == {"decoupled": True} and out["index"] == "READY"
    assert out["binary"] == out["json"] == "2" and out["count"] >= 2
    assert out["bad"][0] == "400" and out["bad"][1].startswith("SKILL: 'smell' is not one of")
    assert {out[name][0] for name in ("load", "shared", "log")} == {"501"}


def test_the_page_runs_as_written(python: Path, tmp_path: Path):
    """Against a server that needs no token."""
    (block,) = [
        block
        for block in code_blocks(ROOT / "docs/use/triton.md")
        if block.text.startswith("import json")
    ]
    shutil.copy(IMAGE, tmp_path / "picture.jpg")
    with served_model() as addresses:
        program = block.text.replace("127.0.0.1:50051", addresses.grpc)
        assert printed(python, "-c", program, cwd=tmp_path) == "9\n"


def test_the_client_of_this_repository(address: str, python: Path):
    command = [python, "clients/triton/client.py", "--url", address, "--image", IMAGE]
    command += ["--question", QUESTION, "--object", "green crescent"]
    given: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, env={**os.environ, "KESTREL_TOKEN": KEY}, check=False, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["query"].strip() == "2" and "crescent" in lines["caption"]
    assert lines["detect"].count("x_min") == 2 and lines["point"].count("'x'") == 2
    refused = subprocess.run([*command, "--token", "wrong" * 8], check=False, **given)
    assert refused.returncode == 1 and "UNAUTHENTICATED" in refused.stderr
