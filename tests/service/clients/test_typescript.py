"""The TypeScript SDK: built, its own tests and the programs of its README run against live servers, packed, and in a
browser. It is built in its folder, where npm keeps the packages, so that only the first run needs a registry."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.abuse.processes.commanded_servers import CommandedServers
from tests.browser import CHROMIUM, imports_of, told_by_page
from tests.code_blocks import ROOT
from tests.forking.process import ForkedProcess
from tests.service.certificates import authority, server_pair
from tests.service.clients.test_languages import IMAGE, require, shell

__all__ = ["authority", "server_pair"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SDK = ROOT / "clients/typescript"
KEY = "k" * 40


@pytest.fixture(scope="module")
def built() -> Path:
    """The SDK's folder with the compiled package and tests."""
    require("node", "npm")
    lock, installed = SDK / "package-lock.json", SDK / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        install = ["npm", "ci", "--no-audit", "--no-fund"]
        if subprocess.run(install, cwd=SDK, capture_output=True).returncode != 0:
            pytest.skip("npm can't install the SDK's packages here")
    shell("npm run --silent build", SDK)
    return SDK


@pytest.fixture(scope="module")
def servers(authority, server_pair, tmp_path_factory) -> Iterator[dict[str, str]]:
    """kestrel-tiny on both ports, and once more with TLS and a key; as the variables that the SDK's tests read."""
    plain = ("--http-listen", "127.0.0.1:0", "--http-allow-origins", "*")
    plain += ("--batches", tmp_path_factory.mktemp("batches") / "batches.db")
    secure = ("--tls-cert", server_pair.cert, "--tls-key", server_pair.key)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                ForkedProcess(
                    [sys.executable, "-m", "kestrel_grpc", "serve", "--listen", "127.0.0.1:0"]
                    + [str(flag) for flag in flags],
                    cwd=ROOT,
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for flags, environment in ((plain, {}), (secure, {"KESTREL_API_KEY": KEY}))
        ]
        http_address = re.search(r"addresses=(\S+) protocol=http", started[0].stderr.readline())
        drains = [threading.Thread(target=each.stderr.read) for each in started]
        for each in drains:
            each.start()
        ready = [re.search(r"listening on (\S+),", each.stdout.readline()) for each in started]
        assert http_address and all(ready)
        yield {
            "KESTREL_GRPC": ready[0][1],
            "KESTREL_HTTP": http_address[1],
            "KESTREL_IMAGE": str(IMAGE),
            "KESTREL_SECURE": ready[1][1],
            "KESTREL_CA": str(authority.ca.cert),
            "KESTREL_TOKEN": KEY,
        }
        for each in started:
            each.send_signal(signal.SIGTERM)
        for drain in drains:
            drain.join(60)


def test_the_tests_of_the_package(built: Path, servers: dict[str, str]):
    printed = shell("npm run --silent test", built, **servers)
    assert re.search(r"# pass [1-9]\d+\n# fail 0\n# cancelled 0\n# skipped 0", printed), printed


def test_several_servers(built: Path, tmp_path: Path):
    """Three processes with the fake runtime, which the tests list, kill and restart."""
    with CommandedServers(tmp_path) as commanded:
        shell(
            "node --test build/tests/several.test.js",
            built,
            KESTREL_SERVERS=",".join(commanded.servers.addresses),
            KESTREL_DIRECTORY=str(commanded.directory),
            KESTREL_COMMANDS=commanded.url,
        )


def test_the_programs_of_the_readme(built: Path, servers: dict[str, str], tmp_path: Path):
    blocks = re.findall(r"```ts\n(.*?)```", (SDK / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    folder = built / "build/readme"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for index, block in enumerate(blocks):
        text = block.replace("127.0.0.1:50051", servers["KESTREL_GRPC"])
        text = text.replace("127.0.0.1:2020", servers["KESTREL_HTTP"])
        (folder / f"{index}.mts").write_text(text)
    options = {"rootDir": ".", "outDir": "out", "declaration": False, "noUnusedLocals": False}
    (folder / "tsconfig.json").write_text(
        json.dumps({"extends": "../../tsconfig.json", "compilerOptions": options, "include": ["."]})
    )
    shell("npx tsc -p build/readme", built)
    shutil.copy(IMAGE, tmp_path / "picture.jpg")
    for index, block in enumerate(blocks):
        if "document." not in block and "example.org" not in block:
            assert shell(f"node {folder}/out/{index}.mjs", tmp_path), block


def test_the_packed_package_installs_alone(built: Path, servers: dict[str, str], tmp_path: Path):
    shell(f"npm pack --silent --pack-destination {tmp_path}", built)
    (packed,) = tmp_path.glob("*.tgz")
    with tarfile.open(packed) as archive:
        names = [name.removeprefix("package/") for name in archive.getnames()]
    others = {name for name in names if not re.fullmatch(r"dist/.+(\.js|\.d\.ts)", name)}
    assert others == {"LICENSE", "README.md", "package.json"}
    exports = json.dumps(json.loads((SDK / "package.json").read_text())["exports"])
    assert set(re.findall(r'"\./(dist/[^"]+)"', exports)) <= set(names)
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", str(packed)]
    if subprocess.run(install, cwd=tmp_path, capture_output=True).returncode != 0:
        pytest.skip("npm can't install the package's dependencies here")
    program = f"""
        import {{ KestrelClient }} from "kestrel-client";
        import {{ KestrelClient as Web }} from "kestrel-client/web";
        import {{ VisionService }} from "kestrel-client/protos";
        for (const client of [
          new KestrelClient("{servers["KESTREL_GRPC"]}"), new Web("http://{servers["KESTREL_HTTP"]}")
        ]) console.log((await client.listModels())[0].name, VisionService.typeName);
    """
    (tmp_path / "typed.mts").write_text(
        'import { KestrelClient } from "kestrel-client";\n'
        'const client = new KestrelClient("127.0.0.1:1");\n'
        'export const found: number = (await client.detect("a.jpg", "car")).detections.length;\n'
    )
    typescript = built / "node_modules/.bin/tsc"
    shell(f"{typescript} --noEmit --strict --module nodenext typed.mts", tmp_path)
    printed = shell(f"node --input-type=module -e '{program}'", tmp_path)
    assert printed == "kestrel-tiny kestrel.v1.VisionService\n" * 2


def test_the_versions_are_one():
    package = json.loads((SDK / "package.json").read_text())
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (SDK / "src/version.ts").read_text()
    assert package["version"] == python["project"]["version"]
    assert f'"{package["version"]}"' in text
    assert '"resolved"' not in (SDK / "package-lock.json").read_text(), "no host of a registry"


PAGE = """<!doctype html>
<script type="importmap">{"imports": IMPORTS}</script>
<script type="module">
  import { InvalidArgumentError, KestrelClient } from "kestrel-client";

  async function run() {
    const client = new KestrelClient("http://ADDRESS");
    const image = await (await fetch("/picture.jpg")).blob();
    const answer = await client.query(image, "How many green crescents are there?", { temperature: 0 });
    const stream = client.streamCaption("/picture.jpg", "long", { temperature: 0 });
    let text = "", events = 0;
    for await (const event of stream) { text += event.value.text; events += 1; }
    const left = client.streamCaption(image, "long", { temperature: 1 });
    for await (const event of left) break;
    const handle = await client.putImage(image);
    const context = new OffscreenCanvas(20, 10).getContext("2d");
    const drawn = await client.caption(context.getImageData(0, 0, 20, 10), "short", { maxTokens: 2 });
    const failed = await client.query(image, "What?", { topP: 2 }).catch((error) => error);
    return {
      answer: answer.answer, several: events > 3, same: text === (await stream.result()).caption,
      points: (await client.point(handle, "pink star")).detections.length, width: drawn.imageSize.width,
      field: failed instanceof InvalidArgumentError && failed.fieldViolations[0].field, id: failed.requestId !== "",
    };
  }

  const found = await run().catch((error) => String(error.stack));
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_in_a_browser(built: Path, servers: dict[str, str], tmp_path: Path):
    """The compiled modules as they are, from another origin than the server's."""
    imports = {"kestrel-client": "/dist/web.js", **imports_of(built)}
    page = PAGE.replace("IMPORTS", json.dumps(imports)).replace("ADDRESS", servers["KESTREL_HTTP"])
    told = told_by_page(built, page, {"/picture.jpg": IMAGE}, tmp_path)
    expected = {"answer": "2", "several": True, "same": True, "points": 1, "width": 20}
    assert told == {**expected, "field": "query.sampling.top_p", "id": True}
