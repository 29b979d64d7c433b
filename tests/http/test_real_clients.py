"""The unmodified packages of Moondream, OpenAI and Ollama, each in its own environment, against the bundled model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.code_blocks import ROOT
from tests.environments import python_with
from tests.forking.process import ForkedProcess

pytestmark = pytest.mark.slow
KEY = "k" * 40
FLAGS = ("--device", "cpu", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
IMAGE = ROOT / "kestrel_grpc/cli/demo.jpg"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """kestrel-tiny behind HTTP, served by a process that knows one key."""
    server = ForkedProcess(
        [sys.executable, "-m", "kestrel_grpc", "serve", *FLAGS],
        cwd=ROOT,
        env={**os.environ, "KESTREL_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stderr is not None and server.stdout is not None
        listening = re.search(r"addresses=(\S+) protocol=http", server.stderr.readline())
        assert listening is not None
        assert "kestrel-grpc ready" in server.stdout.readline()
        yield f"http://{listening[1]}/v1"
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def run(folder: Path, packages: list[str], program: str, endpoint: str) -> dict[str, Any]:
    """What the program prints in a fresh environment with ``packages``."""
    python = python_with(folder, *packages)
    done = subprocess.run(
        [python, ROOT / "tests/http" / program, endpoint, KEY, IMAGE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def test_moondream(endpoint: str, tmp_path: Path):
    # Its dependencies are engines for a GPU, which a client of a server does not need.
    packages = ["--no-deps moondream==2.6.1", "pillow>=11"]
    out = run(tmp_path, packages, "moondream_program.py", endpoint)
    assert out["query"] == {"answer": "0"} and out["stream"] == "0"
    assert out["reasoning"]["reasoning"]["text"] == "I see no red circles."
    assert "two green crescents" in out["caption"]["caption"]
    assert out["caption_stream"] == out["caption"]["caption"]
    assert len(out["detect"]["objects"]) == len(out["point"]["points"]) == 2
    assert out["detect"]["objects"][0].keys() == {"x_min", "y_min", "x_max", "y_max", "score"}
    assert out["refs"].keys() == {"points"}
    assert out["chat"]["message"]["content"] == out["chat_stream"] == "0"


def test_openai(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["openai>=2,<4"], "openai_program.py", endpoint)
    assert out["answer"] == out["stream"] == "0" and out["finish_reason"] == "stop"
    assert out["tokens"] == out["stream_tokens"] == 1
    assert (
        out["scored"] == out["described"] and -1 < min(out["logprobs"]) <= max(out["logprobs"]) <= 0
    )
    assert out["described"].partition("two")[0] == out["stopped"] != out["described"]
    assert out["choices"] == ["0", "0", "0"]
    assert [box["label"] for box in out["boxes"]] == ["green crescent"] * 2
    assert out["models"] == ["kestrel-tiny"]
    assert out["bad_request"] == ["n", 400] and out["wrong_key"] == "credentials_invalid"


def test_ollama(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["ollama>=0.6,<1"], "ollama_program.py", endpoint)
    assert out["generate"] == out["chat"] == "0" and out["done_reason"] == "stop"
    assert out["eval_count"] == 1 and out["models"] == ["kestrel-tiny"]
    assert "vision" in out["capabilities"] and out["load"] == "load"
    assert out["wrong_model"] == [404, True]
