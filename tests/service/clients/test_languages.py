"""Stubs in other languages: generated, compiled, and a client built on them calls a live server.

``examples/LANGUAGE`` holds the template or build script, and the client. docs/use/clients.md names the tools of each.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.code_blocks import ROOT
from tests.service.cli.serve_process import served_model

pytestmark = pytest.mark.slow
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
DEBIAN_GO = Path("/usr/share/gocode")
DEBIAN_JARS = Path("/usr/share/java")
DEBIAN_CRATES = Path("/usr/share/cargo/registry")
PROTOS = "--path protos/kestrel --path protos/third_party/google/rpc/status.proto"
CRESCENTS = [(0.601, 0.730), (0.903, 0.275)]
"""Where the points on the image's two green crescents are, as fractions."""


def shell(script, folder, timeout=240, **variables):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env={**os.environ, "PATH": PATH, **variables}, timeout=timeout,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def require(*programs, files=()):
    missing = [name for name in ("buf", *programs) if shutil.which(name, path=PATH) is None]
    missing += [str(file) for file in files if not Path(file).exists()]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def address():
    """kestrel-tiny, served by a process."""
    with served_model() as addresses:
        yield addresses.grpc


@pytest.fixture
def generated(tmp_path):
    """Generates stubs beside a copy of the language's client; gives the folder."""

    def generate(language, folder=tmp_path):
        for source in (ROOT / "examples" / language).iterdir():
            shutil.copy(source, folder)
        shell(f"buf generate --template {folder}/buf.gen.yaml -o {folder}", ROOT)
        return folder

    return generate


def check(command, address, folder, **variables):
    """Runs a client, which prints how many crescents there are, their points, and a description."""
    answer, *lines, caption = shell(
        f"{command} {address} {IMAGE}", folder, **variables
    ).splitlines()
    assert answer == "answer 2"
    words = [line.split() for line in lines]
    assert [word for word, *_ in words] == ["point", "point"]
    points = sorted(tuple(map(float, place)) for _, *place in words)
    assert points == [pytest.approx(point, abs=0.03) for point in CRESCENTS]
    assert "two green crescents" in caption


def test_go(address, generated, tmp_path):
    require("go", "protoc-gen-go", "protoc-gen-go-grpc", files=[DEBIAN_GO])
    module = tmp_path / "src/example.org"
    module.mkdir(parents=True)
    generated("go", module)
    debian = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:{DEBIAN_GO}", "GOFLAGS": "-p=1"}
    shell(f"go build -o {tmp_path}/ask ask.go", module, **debian)
    check("./ask", address, tmp_path)


def test_java(address, generated):
    jars = [
        f"{DEBIAN_JARS}/{name}.jar"
        for name in ("grpc-netty", "netty-all", "protobuf", "perfmark-api")
    ]
    require("javac", "protoc", "grpc_java_plugin", files=jars)
    folder = generated("java")
    path = f"{DEBIAN_JARS}/*"
    shell(f"find gen -name '*.java' | xargs javac -nowarn -cp '{path}' -d classes Ask.java", folder)
    check(f"java -cp 'classes:{path}' Ask", address, folder)


def test_cpp(address, generated):
    require("g++", "protoc", "grpc_cpp_plugin", "pkg-config")
    folder = generated("cpp")
    # Only what the client calls: g++ takes long for each service.
    files = "common.pb.cc vision_service.pb.cc vision_service.grpc.pb.cc"
    sources = " ".join(f"gen/cpp/kestrel/v1/{name}" for name in files.split())
    sources += " gen/cpp/google/rpc/status.pb.cc"
    flags = "$(pkg-config --cflags --libs grpc++ protobuf)"
    shell(f"g++ -std=c++17 -O0 -I gen/cpp ask.cc {sources} -o ask {flags}", folder)
    check("./ask", address, folder)


@pytest.mark.timeout(900)
def test_rust(address, tmp_path):
    require("cargo", files=[DEBIAN_CRATES / "prost-build-0.11.6", DEBIAN_CRATES / "h2-0.3.13"])
    folder = tmp_path / "ask"
    shutil.copytree(ROOT / "examples/rust", folder, ignore=shutil.ignore_patterns("target"))
    shell(f"buf build {PROTOS} --exclude-imports -o {folder}/descriptors.binpb", ROOT)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'source.crates-io.replace-with = "debian"\nsource.debian.directory = "{DEBIAN_CRATES}"\n'
    )
    variables = {"CARGO_HOME": str(home), "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "0"}
    shell("cargo build --offline", folder, 600, PATH=f"/usr/bin:{PATH}", **variables)
    check("target/debug/ask", address, folder)
