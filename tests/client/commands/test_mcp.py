"""``kestrel-grpc mcp`` driven by the protocol's own client, over standard input and output and over HTTP."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.code_blocks import ROOT
from tests.forking.process import ForkedProcess
from tests.ports import free_port
from tests.waiting import until

# Its import takes a second, which every process that collects tests would spend.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mcp"), reason="mcp is not installed")
TOOLS = {"query", "caption", "detect", "point", "segment", "gaze"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    Image.new("RGB", (60, 40), (200, 200, 200)).save(tmp_path / "root/grey.png")
    (tmp_path / "secret.png").write_bytes((tmp_path / "root/grey.png").read_bytes())
    (tmp_path / "root/link.png").symlink_to(tmp_path / "secret.png")
    return tmp_path / "root"


def command(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kestrel_grpc", "mcp", "--server", address, *flags]


@pytest.mark.slow
async def test_six_tools_answer_over_standard_input(serve, folder: Path):
    import mcp
    from mcp.client.stdio import stdio_client

    served = await serve()
    program, *arguments = command(served.server.addresses[0], "--root", str(folder))
    parameters = mcp.StdioServerParameters(
        command=program, args=arguments, cwd=ROOT, env=dict(os.environ)
    )
    async with mcp.Client(stdio_client(parameters)) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS
        assert all(tool.description for tool in tools)
        asked = {"image": "grey.png", "question": "What?"}
        found = await client.call_tool("query", asked)
        assert not found.is_error and json.loads(found.content[0].text)["answer"]
        found = await client.call_tool("detect", {"image": "grey.png", "objects": ["dot"]})
        assert json.loads(found.content[0].text)["objects"] is not None
        assert [part.type for part in found.content] == ["text", "image"]
        several = {"image": "grey.png", "objects": ["dot", "line"]}
        found = await client.call_tool("point", several)
        searches = json.loads(found.content[0].text)["searches"]
        assert [each["object"] for each in searches] == ["dot", "line"]
        assert [part.type for part in found.content] == ["text", "image"]
        found = await client.call_tool("gaze", {"image": "grey.png", "eye": [0.25, 0.5]})
        (gaze,) = json.loads(found.content[0].text)["gazes"]
        assert gaze["eye"] == {"x": 0.25, "y": 0.5} and "target" in gaze
        refused = await client.call_tool("gaze", {"image": "grey.png", "eye": [0.25, 7]})
        assert refused.is_error and "gaze.eyes[0]" in refused.content[0].text
        found = await client.call_tool("query", {**asked, "presupposes": ["dog"]})
        assert json.loads(found.content[0].text)["presupposed"][0]["object"] == "dog"
        asked["stop"] = [""]
        refused = await client.call_tool("query", asked)
        assert refused.is_error and "stop[0]" in refused.content[0].text
        for image, part in (
            ("../secret.png", "is not below"),
            (str(folder.parent / "secret.png"), "is not below"),
            ("link.png", "is not below"),
            ("none.png", "no such file"),
            ("http://example.org/a.png", "is not fetched"),
            ("data:image/png;base64,!", "base64"),
            ("img_unknown", "image"),
        ):
            refused = await client.call_tool("caption", {"image": image})
            assert refused.is_error and part in refused.content[0].text, refused.content


@pytest.mark.slow
async def test_http_answers_as_standard_input_does(serve):
    import mcp

    served = await serve()
    port = free_port()
    process = ForkedProcess(
        command(served.server.addresses[0], "--http", str(port)),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def listens():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await until(listens)
        async with mcp.Client(f"http://127.0.0.1:{port}/mcp") as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
            refused = await client.call_tool("caption", {"image": "grey.png"})
            assert refused.is_error and "--root" in refused.content[0].text
    finally:
        process.terminate()
        process.communicate(timeout=60)
