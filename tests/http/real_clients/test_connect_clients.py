"""Unmodified clients of the Connect protocol against the bundled model: buf curl, connectrpc for Python, and connect-es
in Node and in a browser, each in an environment of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, imports_of, told_by_page
from tests.code_blocks import ROOT
from tests.environments import python_with
from tests.http.real_clients.test_real_clients import IMAGE, KEY, NODE, NPM, printed
from tests.service.cli.serve_process import served_model

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent
DESCRIPTORS = ROOT / "kestrel_grpc/services/kestrel.v1.binpb"
BUF = Path(sys.executable).with_name("buf")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_model(KESTREL_API_KEY=KEY, KESTREL_HTTP_ALLOW_ORIGINS="*") as addresses:
        yield f"http://{addresses.http}"


def check(found: dict[str, Any]) -> None:
    """What a client found, in any language."""
    assert found["answer"] == "0" and found["streamed"] is True
    assert set(found["models"]) == {"kestrel-tiny"}
    code, message = found["wrong_field"]
    assert code.lower().replace("_", "") == "invalidargument"
    assert message.startswith("query.sampling.top_p: ")
    for key in ("wrong_key", "wrong_stream"):
        assert found[key].lower() == "unauthenticated"
    assert found["too_late"].lower().replace("_", "") == "deadlineexceeded"


@pytest.mark.skipif(not BUF.exists(), reason="needs buf (dev extra)")
def test_buf_curl(address: str):
    """Its protocol is Connect if no flag names another one."""
    command = [BUF, "curl", "--schema", DESCRIPTORS, "-H", f"authorization: Bearer {KEY}"]
    asked = {"query": {"question": "How many red circles are there?", "max_tokens": 5}}

    def call(method: str, fields: dict[str, Any], *flags: str) -> Any:
        path = f"{address}/kestrel.v1.{method}"
        return subprocess.run(
            [*command, *flags, "-d", json.dumps(fields), path], capture_output=True, text=True, timeout=120, check=False
        )  # fmt: skip

    done = call("VisionService/Query", asked)
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)["answers"][0]["text"]
    done = call("VisionService/StreamQuery", asked)
    events = [json.loads(line) for line in done.stdout.replace("}\n{", "}\0{").split("\0")]
    assert "".join(each.get("textDelta", {}).get("text", "") for each in events) == text
    done = call("VisionService/Query", {"query": {"question": ""}})
    assert done.returncode != 0 and json.loads(done.stderr)["code"] == "invalid_argument"
    assert call("ModelService/GetLoad", {}).returncode == 0
    done = call("AdminService/Drain", {})
    assert done.returncode != 0 and json.loads(done.stderr)["code"] == "unimplemented"


@pytest.mark.skipif(not BUF.exists(), reason="needs buf (dev extra)")
def test_connectrpc_for_python(address: str, tmp_path: Path):
    packages = ["connectrpc>=0.13,<0.14", "protoc-gen-py<1", "protoc-gen-connectrpc>=0.13,<0.14"]
    python = python_with(tmp_path, *packages)
    plugins = [
        {"local": [str(python.with_name(f"protoc-gen-{name}"))], "out": str(tmp_path / "generated")}
        for name in ("py", "connectrpc")
    ]
    template = json.dumps({"version": "v2", "plugins": plugins})
    subprocess.run([BUF, "generate", "--template", template, DESCRIPTORS], check=True, timeout=120)
    program = tmp_path / "program.py"
    shutil.copy(PROGRAMS / "connect_program.py", program)
    found: Any = printed([python, program, address, KEY, IMAGE])
    assert len(found) == 4
    for each in found:
        check(each)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with connect-es and the programs beside it, where Node looks for packages."""
    folder = tmp_path_factory.mktemp("connect-es")
    if NODE is None or NPM is None:
        pytest.skip("needs node and npm")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    names = [f"@connectrpc/{name}@~2.1.2" for name in ("connect", "connect-node", "connect-web")]
    install = [NPM, "install", "--silent", "--no-audit", "--no-fund", "@bufbuild/protobuf@^2"]
    if subprocess.run([*install, *names], cwd=folder, timeout=200, check=False).returncode:
        pytest.skip("the npm packages of connect-es can't be installed here")
    for name in ("connect_program.mjs", "connect_node.mjs"):
        shutil.copy(PROGRAMS / name, folder)
    return folder


def test_connect_es_in_node(address: str, packages: Path):
    program = packages / "connect_node.mjs"
    found: Any = printed([str(NODE), program, address, KEY, IMAGE, DESCRIPTORS])
    assert len(found) == 4
    for each in found:
        check(each)


PAGE = """<!doctype html><script type="importmap">{"imports": IMPORTS}</script><script type="module">
import { createConnectTransport } from "@connectrpc/connect-web";
import { run } from "/connect_program.mjs";
const load = async (name) => new Uint8Array(await (await fetch(name)).arrayBuffer());
async function all() {
  const [descriptors, image] = [await load("/descriptors"), await load("/image")];
  const found = [];
  for (const useBinaryFormat of [true, false]) {
    const transport = createConnectTransport({ baseUrl: "ADDRESS", useBinaryFormat, useHttpGet: true });
    found.push(await run(transport, "KEY", descriptors, image, false));
  }
  return found;
}
const found = await all().catch((error) => String(error.stack));
await fetch("/found", { method: "POST", body: JSON.stringify(found) });
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_connect_es_in_a_browser(address: str, packages: Path, tmp_path: Path):
    """From another origin than the server's."""
    page = PAGE.replace("IMPORTS", json.dumps(imports_of(packages)))
    page = page.replace("ADDRESS", address).replace("KEY", KEY)
    files = {"/image": IMAGE, "/descriptors": DESCRIPTORS}
    found = told_by_page(packages, page, files, tmp_path)
    assert len(found) == 2, found
    for each in found:
        check(each)
