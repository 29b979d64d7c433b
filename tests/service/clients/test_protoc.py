"""The lines of docs/use/clients.md for protoc and grpcio-tools: run as written in a folder that has only ``protos``.
The generated code compiles, and calls a live server."""

import re
import shutil
import subprocess

import pytest

from tests.code_blocks import ROOT, code_blocks
from tests.environments import python_with
from tests.service.clients.test_languages import (
    DEBIAN_GO,
    DEBIAN_JARS,
    PATH,
    address,
    check,
    require,
    shell,
)

__all__ = ["address"]
pytestmark = pytest.mark.slow
BLOCKS = code_blocks(ROOT / "docs/use/clients.md")
(PROTOC,) = [block.text for block in BLOCKS if block.text.startswith("mkdir -p gen/cpp")]
(GRPCIO_TOOLS,) = [block.text for block in BLOCKS if "-m grpc_tools.protoc" in block.text]
(CLIENT,) = [block.text for block in BLOCKS if 'append("gen/python")' in block.text]


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    return tmp_path


def lines_for(language):
    """The lines that make and fill ``gen/LANGUAGE``."""
    first, *commands = re.sub(r"\\\n\s*", "", PROTOC).splitlines()
    (command,) = [line for line in commands if f"gen/{language}" in line]
    return f"{first}\n{command}"


def test_cpp(address, folder):
    require("g++", "protoc", "grpc_cpp_plugin", "pkg-config")
    shell(lines_for("cpp"), folder)
    shutil.copy(ROOT / "examples/cpp/ask.cc", folder)
    # Without the stubs of the operators' service, which the client does not call.
    names = (
        "buf/validate/validate.pb google/rpc/status.pb kestrel/v1/common.pb"
        " kestrel/v1/vision_service{.pb,.grpc.pb}"
    )
    sources = " ".join(f"gen/cpp/{name}.cc" for name in names.split())
    flags = "$(pkg-config --cflags --libs grpc++ protobuf)"
    shell(f"g++ -std=c++17 -O0 -I gen/cpp ask.cc {sources} -o ask {flags}", folder)
    check("./ask", address, folder)


def test_java(address, folder):
    require("javac", "protoc", "grpc_java_plugin", files=[DEBIAN_JARS / "grpc-netty.jar"])
    shell(lines_for("java"), folder)
    shutil.copy(ROOT / "examples/java/Ask.java", folder)
    path = f"{DEBIAN_JARS}/*"
    shell(f"find gen -name '*.java' > all; javac -nowarn -cp '{path}' -d out @all Ask.java", folder)
    check(f"java -cp 'out:{path}' Ask", address, folder)


def test_go(address, folder):
    require("go", "protoc-gen-go", "protoc-gen-go-grpc", files=[DEBIAN_GO])
    shell(lines_for("go"), folder)
    # Debian has no package of the rules, which `go get` would fetch.
    rules = "protos/third_party/buf/validate/validate.proto"
    shell(f"protoc -I protos/third_party --go_out=gen/go {rules}", folder)
    (folder / "gen/go").rename(folder / "src")
    client = (ROOT / "examples/go/ask.go").read_text()
    ours = '"example.org/gen/go/kestrel/v1"'
    assert ours in client
    (folder / "ask.go").write_text(client.replace(ours, '"kestrel/v1"'))
    debian = {"GO111MODULE": "off", "GOPATH": f"{folder}:{DEBIAN_GO}", "GOFLAGS": "-p=1"}
    shell("go build -o ask ask.go", folder, **debian)
    check("./ask", address, folder)


def test_grpcio_tools(address, folder):
    python = python_with(folder)
    path = f"{python.parent}:{PATH}"
    install, *rest = GRPCIO_TOOLS.splitlines(keepends=True)
    if subprocess.run(["bash", "-c", install], cwd=folder, env={"PATH": path}).returncode:
        pytest.skip("grpcio-tools can't be installed here")
    shell("".join(rest), folder, PATH=path)
    (folder / "client.py").write_text(CLIENT.replace("127.0.0.1:50051", address))
    assert "limits" in shell("python client.py", folder, PATH=path)


def test_the_descriptors_of_a_release_replace_the_files(folder):
    require("protoc")
    shutil.rmtree(folder / "protos")
    shutil.copy(ROOT / "kestrel_grpc/services/kestrel.v1.binpb", folder)
    files = "kestrel/v1/{common,vision_service}.proto buf/validate/validate.proto google/rpc/status.proto"
    shell(f"protoc --descriptor_set_in=kestrel.v1.binpb --cpp_out=. {files}", folder)
    assert (folder / "kestrel/v1/vision_service.pb.cc").exists()
