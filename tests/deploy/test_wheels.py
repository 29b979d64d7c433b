"""The wheels and sdists of a release: the same bytes from the same sources, metadata, installation, bill of
materials."""

import email
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.environments import python_with

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ("build", "hatchling", "twine", "cyclonedx-bom")
NAMES = ("kestrel_client", "kestrel_grpc")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=800, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checkout(folder):
    """A copy of what git tracks, or would, with other times and rights of its files than here."""
    git = ("git", "-c", "safe.directory=*")  # The clone may be another user's.
    listed = run(*git, "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
            (folder / name).chmod(0o755 if name.startswith(".ci/") else 0o600)
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """An interpreter with the tools of a release."""
    return python_with(tmp_path_factory.mktemp("tools"), f"-c {CONSTRAINTS} {' '.join(TOOLS)}")


@pytest.fixture(scope="module")
def builds(tools, tmp_path_factory):
    """Two folders with everything, built in different places, with different umasks and zones of time."""
    one = checkout(tmp_path_factory.mktemp("one"))
    # Of the first copy, because somebody may work on the sources meanwhile.
    another = shutil.copytree(
        one, tmp_path_factory.mktemp("another") / "place", copy_function=shutil.copyfile
    )
    found = []
    for folder, umask, zone in ((one, "077", "UTC"), (another, "002", "Asia/Kolkata")):
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600", "TZ": zone}
        command = f"umask {umask}; bash .ci/build-wheels {tools} dist --no-isolation"
        run("bash", "-c", command, cwd=folder, env=environment)
        found.append(folder / "dist")
    return found


def wheel_of(builds, name):
    (wheel,) = builds[0].glob(f"{name}-*.whl")
    return wheel


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(builds):
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in build.iterdir()}
        for build in builds
    ]
    assert len(digests[0]) == 4 and digests[0] == digests[1]


@pytest.mark.slow
def test_a_wheel_holds_its_packages_and_their_data_only(builds):
    wheel = wheel_of(builds, "kestrel_grpc")
    assert wheel.stat().st_size < 48_000_000  # of which the model has 45.5
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kestrel_engine", "kestrel_grpc"
    }  # fmt: skip
    for data in (
        "kestrel_grpc/services/kestrel.v1.binpb",
        "kestrel_engine/bundled/kestrel_small/model.safetensors",
        "kestrel_engine/bundled/kestrel_small/sample.jpg",
    ):
        assert data in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    client = zipfile.ZipFile(wheel_of(builds, "kestrel_client")).namelist()
    data = {"py.typed", "commands/demo.jpg", "commands/samples.json", "commands/pictures/icons.png"}
    assert {f"kestrel_client/{name}" for name in data} <= set(client)
    assert {name.partition("/")[0] for name in client} == {
        "kestrel_client", f"kestrel_client-{VERSION}.dist-info"
    }  # fmt: skip
    (sdist,) = builds[0].glob("kestrel_grpc-*.tar.gz")
    with tarfile.open(sdist) as files:
        kept = {Path(name).parts[1] for name in files.getnames() if len(Path(name).parts) > 1}
    assert {"LICENSE", "constraints.txt", "protos", "pyproject.toml"} <= kept
    assert not {"tests", "benchmarks", "docs"} & kept


def metadata_of(builds, name):
    with zipfile.ZipFile(wheel_of(builds, name)) as wheel:
        (path,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(wheel.read(path))


def test_the_extra_all_has_all_extras_but_some():
    """A new extra belongs into it, or into docs/develop/releasing.md and here."""
    extras = PROJECT["optional-dependencies"]
    parts = " ".join(extras["all"]).split("[")[1:]
    named = {name for part in parts for name in part.partition("]")[0].split(",")}
    assert named == set(extras) - {"all", "dev", "flashinfer", "fuzz", "ray"}


@pytest.mark.slow
def test_metadata(builds):
    extras = PROJECT["optional-dependencies"]
    server = metadata_of(builds, "kestrel_grpc")
    assert set(server.get_all("Provides-Extra")) == set(extras)
    for name in NAMES:
        found = metadata_of(builds, name)
        assert found["Version"] == VERSION and found["License-Expression"] == "Apache-2.0"
        assert found["Description-Content-Type"] == "text/markdown"
        assert len(found.get_payload()) > 1000 and found["Requires-Python"] == ">=3.11"
    pinned = [r for r in server.get_all("Requires-Dist") if r.startswith("kestrel-client")]
    own = [f"kestrel-client[{extra}]=={VERSION}" for extra in ("cli", "mcp", "eval", "parquet")]
    assert {requirement.partition(";")[0] for requirement in pinned} == {*own}


@pytest.mark.slow
def test_the_client_installs_alone_and_its_bill_lists_what_it_brings(builds, tools, tmp_path):
    """The description renders, too: release-files asks twine."""
    folder = shutil.copytree(builds[0], tmp_path / "dist")
    told = run(
        ROOT / ".ci/release-files", tools, folder, env={**os.environ, "RELEASE_OF": NAMES[0]}
    )
    assert told.count("PASSED") == 4
    bill = json.loads((folder / "kestrel-client.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["version"] == VERSION
    parts = {part["name"]: part.get("purl", "") for part in bill["components"]}
    assert {"grpcio", "protobuf"} <= set(parts) and len(parts) <= 4
    assert parts["grpcio"].startswith("pkg:pypi/grpcio@")
    assert "file:" not in json.dumps(bill) and str(tmp_path) not in json.dumps(bill)
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert "kestrel.v1.binpb" in sums

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    install = ("-m", "pip", "--python", python, "install", "-q", "-c", CONSTRAINTS)
    run(sys.executable, *install, wheel_of(builds, "kestrel_client"))
    program = (
        "import kestrel_client as k, sys\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "client = k.KestrelClient('127.0.0.1:1', timeout=5)\n"
        "try: client.server_info()\n"
        "except k.UnavailableError: print('no server', k.__version__)\n"
    )
    assert run(python, "-I", "-c", program).strip() == f"no server {VERSION}"


@pytest.mark.slow
def test_the_server_installs_from_its_wheel_and_answers(builds, tmp_path):
    """What the tests' environment has of its dependencies is not installed again."""
    wheels = [wheel_of(builds, name) for name in NAMES]
    python = python_with(tmp_path, "--no-index --no-deps " + " ".join(map(str, wheels)))
    program = python.with_name("kestrel-grpc")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "KESTREL_THREADS": "1"}
    where = (
        "import kestrel_grpc, kestrel_client; print(kestrel_grpc.__file__, kestrel_client.__file__)"
    )
    for path in run(python, "-c", where, cwd=tmp_path, env=environment).split():
        assert Path(path).is_relative_to(tmp_path)
    told = run(program, "--version", cwd=tmp_path, env=environment)
    assert told == f"kestrel-grpc {VERSION}\n"
    run(program, "demo", "--output", tmp_path / "out", cwd=tmp_path, env=environment)
    assert len(list((tmp_path / "out").glob("*.png"))) >= 1
