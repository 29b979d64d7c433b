"""Every line of README and docs that calls a method by its path (grpcurl, buf curl, curl), as written, by the real
programs; and what grpcurl describes."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_client._pb.kestrel.v1 import image_service_pb2
from kestrel_grpc.service_names import SERVICES
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.http import HttpConfig
from tests.code_blocks import PAGES, ROOT, code_blocks
from tests.service.conftest import raw_image

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
pytestmark = pytest.mark.skipif(
    not all(shutil.which(program, path=PATH) for program in ("grpcurl", "buf")),
    reason="needs grpcurl and buf (dev extra; grpcurl for x86-64 Linux only)",
)
BLOCKS = [
    block
    for page in PAGES
    for block in code_blocks(page)
    if re.search(r"grpcurl -|buf curl -|curl .*/kestrel\.v1\.", block.text)
]


async def shell(script, folder):
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", script,
        cwd=folder, env={**os.environ, "PATH": PATH}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


def test_the_pages_have_such_lines():
    pages = {block.page for block in BLOCKS}
    uses = ("batches", "clients", "http", "requests", "tokens")
    assert pages == {"README.md", *(f"docs/use/{name}.md" for name in uses)}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
async def test_the_lines_run_as_written(serve, tmp_path, block):
    batches = BatchesConfig(path=str(tmp_path / "batches.db"))
    if re.search(r"(?<!buf )\bcurl ", block.text) and shutil.which("curl", path=PATH) is None:
        pytest.skip("needs curl")
    served = await serve(
        server_config={"http": HttpConfig(http_listen=("127.0.0.1:0",)), "batches": batches}
    )
    commands = ROOT / "clients/python/kestrel_client/commands"
    shutil.copytree(commands / "pictures", tmp_path, dirs_exist_ok=True)
    shutil.copy(commands / "demo.jpg", tmp_path / "picture.jpg")
    shutil.copy(ROOT / "kestrel_grpc/services/kestrel.v1.binpb", tmp_path)
    stored = await served.images.PutImage(image_service_pb2.PutImageRequest(image=raw_image()))
    script = block.text.replace("127.0.0.1:50051", served.server.addresses[0])
    script = script.replace("127.0.0.1:2020", served.server.http_addresses[0])
    status, out, errors = await shell(script.replace("img_…", stored.image.image_id), tmp_path)
    assert status == 0, errors
    assert out


async def test_grpcurl_describes_every_symbol(serve, tmp_path):
    """Also the services of reflection and health themselves."""
    served = await serve()
    grpcurl = f"grpcurl -plaintext {served.server.addresses[0]}"
    symbols = {
        "kestrel.v1.VisionService.Detect": "rpc Detect ( .kestrel.v1.DetectRequest ) returns",
        "kestrel.v1.VisionService.StreamQuery": "returns ( stream .kestrel.v1.StreamQueryResponse",
        "kestrel.v1.Priority.PRIORITY_LOW": "PRIORITY_LOW = 1",
        "grpc.reflection.v1.ServerReflection.ServerReflectionInfo": "stream .grpc.reflection.v1.",
        "grpc.reflection.v1alpha.ServerReflection": "stream .grpc.reflection.v1alpha.",
        "grpc.health.v1.Health.Check": "rpc Check",
    }
    script = "\n".join(f"{grpcurl} describe {symbol}" for symbol in symbols)
    status, out, errors = await shell(f"{grpcurl} list\n{script}", tmp_path)
    assert status == 0, errors
    assert {*SERVICES, "grpc.reflection.v1.ServerReflection"} <= set(out.split())
    for symbol, words in symbols.items():
        assert words in out, symbol
    status, out, errors = await shell(f"{grpcurl} describe kestrel.v1.DetectRequest", tmp_path)
    assert status == 0, errors
    assert re.search(r"^  // .+\n  \.kestrel\.v1\.Image image = 1", out, re.MULTILINE), out
    status, _, errors = await shell(f"{grpcurl} describe kestrel.v1.VisionService.Smell", tmp_path)
    assert status != 0 and "kestrel.v1.VisionService.Smell" in errors
