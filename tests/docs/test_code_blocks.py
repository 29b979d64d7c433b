"""Every code block of README and docs is run as written, or its commands are parsed, or EXCEPTIONS says why not.

tests/service/clients runs the lines of grpcurl and buf curl (test_documented_calls.py), the clients in Go, Java, C++
and Rust (test_languages.py), and the blocks of the TypeScript client's README (test_typescript.py).
tests/client/test_readme.py runs the blocks of the Python client's README.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from kestrel_grpc.cli.program import COMMANDS, main, whole_parser
from tests.code_blocks import PAGES, ROOT, Block, code_blocks
from tests.forking.process import ForkedProcess
from tests.tiny import TINY

BLOCKS = [block for page in PAGES for block in code_blocks(page)]

EXCEPTIONS = {
    'import { KestrelClient } from "kestrel-client";': "as the programs of clients/typescript/README.md, which are run",
    "buf generate ": "generates stubs, as tests/service/clients/test_languages.py does",
    "pip install ": "installs packages",
    'KestrelClient("kestrel.example.org': "names servers that don't exist",
    'KestrelClient(["10.0.0.7': "names servers that don't exist",
    "step thread ": "a drawing",
    "card = ": "a formula",
    "kestrel-grpc serve: error: ": "error messages",
    "max-queue = 9  # variable": "what --print-config prints",
    "RUN kestrel-grpc": "a Dockerfile",
    "startupProbe:": "Kubernetes",
    "# name   scopes": "a token file",
    "method=kestrel.v1": "a line of the access log",
    "query    What is": "what make demo prints, compared by tests/training/test_samples.py",
    "kestrel.v1.VisionService/Query     SERVER": "a tree of spans",
    "make ": "targets, see test_make_targets_exist",
    "python -m ": "modules, see test_modules_exist",
    "openssl ": "needs an authority's files",
    "OTEL_EXPORTER": "needs a collector; tests/service/telemetry has one",
    '"""yes_no': "served by the fixture `address`",
    "engine = await InferenceEngine.create(skills=SkillRegistry(": "a fragment of an async function",
    "apt-get update": "run by tests/deploy/test_install.py",
    "install -": "run by tests/deploy/test_install.py",
    "/opt/kestrel/bin/": "run by tests/deploy/test_install.py",
    "systemctl status": "run by tests/deploy/test_install.py",
    "export KESTREL_TOKEN=…": "run by tests/deploy/test_install.py",
    "tracker = ObjectTracker()": "another package; tests/client/values/test_tracking.py runs ObjectTracker",
    "import ollama": "another package's client, run by tests/http/real_clients/test_real_clients.py",
    "import moondream": "another package's client, run by tests/http/real_clients/test_real_clients.py",
    "from base64 import": "another package's client, run by tests/http/real_clients/test_real_clients.py",
    "from llama_index": "another package's client, run by tests/http/real_clients/test_real_clients.py",
    "OPENAI_API_KEY=the-token lmms-eval": "needs the hub; tests/http/dialects/test_openai.py sends its requests",
    "lm_eval ": "as tests/http/real_clients/test_real_clients.py does",
    "import json\nimport time\nfrom openai": "run by tests/http/real_clients/test_real_clients.py",
    "import OpenAI": "another package's client, run by tests/http/real_clients/test_real_clients.py",
    "curl -s ": "run by tests/http/real_clients/test_real_clients.py",
    "curl -sf ": "run by tests/service/clients/test_documented_calls.py",
    '[{"bbox_2d"': "an answer",
    '{"request_id"': "an answer",
    "all and sure: ": "what eval prints",
    '{"image": "a.png", "question"': "read by tests/engine/teaching/test_folder.py",
    "import json\n\nimport numpy as np\nimport tritonclient": "run by tests/kserve/test_tritonclient.py",
    "import fiftyone": "another package; tests/tools/test_fiftyone.py runs the models",
    "<View>": "a configuration, as in tests/tools/test_label_studio.py",
    "action: ai_task": "of a Home Assistant that needs a newer Python; tests/tools/test_home.py sends its request",
    "homeassistant:": "as tests/tools/with_homeassistant.py has it",
    "ln -s ": "needs ComfyUI; tests/tools/test_comfyui.py runs the nodes",
    "grpcurl ": "run by tests/service/clients/test_documented_calls.py",
    "buf curl ": "run by tests/service/clients/test_documented_calls.py",
    "mkdir -p gen": "run by tests/service/clients/test_protoc.py",
    "import sys\n\nimport grpc\n\nsys.path": "run by tests/service/clients/test_protoc.py",
}
"""How a block begins, and why it is not run here."""


def is_python(block: Block) -> bool:
    return block.language == "python" or re.match(r"(from|import) \w+", block.text) is not None


def is_commands(block: Block) -> bool:
    return (
        re.match(
            r"(KESTREL_TOKEN=\S+ |HF_TOKEN=\S+ |MOONDREAM_API_KEY=\S+ |cp |\.venv/bin/)*kestrel(-grpc)? |cp ",
            block.text,
        )
        is not None
    )


def is_toml(block: Block) -> bool:
    return block.text.startswith("[")


def left_out(block: Block) -> bool:
    return block.page == "clients/python/README.md" or block.text.startswith(tuple(EXCEPTIONS))


PYTHON = [block for block in BLOCKS if not left_out(block) and is_python(block)]
COMMAND_BLOCKS = [block for block in BLOCKS if not left_out(block) and is_commands(block)]
TOML = [block for block in BLOCKS if not left_out(block) and is_toml(block)]


def test_no_block_is_forgotten():
    known = {*PYTHON, *COMMAND_BLOCKS, *TOML}
    assert [str(b) for b in BLOCKS if b not in known and not left_out(b)] == []
    unused = [start for start in EXCEPTIONS if not any(b.text.startswith(start) for b in BLOCKS)]
    assert unused == []
    assert PYTHON and COMMAND_BLOCKS and TOML


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pages' images, and what a checkout after `make` has that the README's commands name."""
    folder = tmp_path_factory.mktemp("checkout")
    commands = "clients/python/kestrel_client/commands"
    shutil.copytree(ROOT / commands / "pictures", folder / commands / "pictures")
    shutil.copytree(ROOT / commands / "pictures", folder, dirs_exist_ok=True)
    shutil.copy(ROOT / commands / "demo.jpg", folder / "picture.jpg")
    shutil.copy(TINY / "sample.jpg", folder / "other.jpg")
    (folder / ".venv/bin").mkdir(parents=True)
    for name, module in (
        ("kestrel-grpc", "kestrel_grpc"),
        ("kestrel", "kestrel_client.commands.program"),
    ):
        program = folder / ".venv/bin" / name
        worker = ROOT / "tests/forking/worker.py"
        fork = shlex.join([sys.executable, "-S", str(worker), "-u", "-m", module])
        program.write_text(f'#!/bin/sh\nexec {fork} "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    """The default model with the plug-in of docs/develop/skills.md, as the page serves it."""
    (plugin,) = [b for b in BLOCKS if b.text.startswith('"""yes_no')]
    (folder / "yes_no.py").write_text(plugin.text)
    server = ForkedProcess(
        [sys.executable, "-m", "kestrel_grpc", "serve", "--listen", "127.0.0.1:0", "--skill", "yes_no:YesNoSkill",
         "--batches", "batches.db"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={
            **os.environ, "KESTREL_MODEL": "", "KESTREL_DRAIN_DELAY": "0",
            "PYTHONPATH": f"{ROOT}:{ROOT}/clients/python:{folder}",
        },
    )  # fmt: skip
    with server:
        yield re.search(r"listening on (\S+),", server.stdout.readline())[1]
        server.terminate()


@pytest.mark.parametrize(
    "block",
    [
        block if block.page == "README.md" else pytest.param(block, marks=pytest.mark.slow)
        for block in PYTHON
    ],
    ids=str,
)
def test_python_runs_as_written(block, request, folder, monkeypatch):
    """As a script: a block may neither await at its top nor lean on another block."""
    code = block.text
    if "127.0.0.1:50051" in code:
        code = code.replace("127.0.0.1:50051", request.getfixturevalue("address"))
    monkeypatch.chdir(folder)
    exec(compile(code, str(block), "exec"), {"__name__": "__main__"})


def commands(block):
    """Its commands as lists of words, without variables, comments and what … stands for."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words and words[0].endswith(("kestrel", "kestrel-grpc")):
            yield [word for word in words[1:] if word != "…"]


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=str)
def test_commands_are_ones_that_there_are(block, tmp_path, monkeypatch):
    """Flags and words are parsed. Nothing is served, as that may need a GPU, certificates or a hub."""
    for variable in [name for name in os.environ if name.startswith("KESTREL_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "kestrel.toml").touch()
    for words in commands(block):
        if words == ["--help"]:
            continue
        words = [word.replace("/etc/kestrel", str(tmp_path)) for word in words]
        parser, _, _ = whole_parser({words[0]})
        args, rest = parser.parse_known_args(words)
        assert args.command in COMMANDS and (not rest or hasattr(args, "words")), words


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run_as_written(address, folder):
    """Apart from the length of the load test."""
    (block,) = [b for b in COMMAND_BLOCKS if b.text.startswith("cp clients")]
    commands = block.text.replace("bench --seconds 5", "bench --seconds 0.3")
    assert commands != block.text
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, capture_output=True, text=True, timeout=200,
        env={**os.environ, "KESTREL_SERVER": address, "PYTHONPATH": f"{ROOT}:{ROOT}/clients/python"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "requests/s" in done.stdout and (folder / "boxes.png").exists()


def test_a_plug_in_answers_as_its_page_says(address, folder, monkeypatch, capsys):
    (block,) = [b for b in COMMAND_BLOCKS if "run yes_no" in b.text]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KESTREL_SERVER", address)
    for words in commands(block):
        assert main(words) == 0
    assert "yes" in capsys.readouterr().out


@pytest.mark.parametrize("block", TOML, ids=str)
def test_configuration_files_are_valid(block, tmp_path, monkeypatch):
    tomllib.loads(block.text)
    file = tmp_path / "kestrel.toml"
    file.write_text(block.text)
    parser, _, _ = whole_parser({"serve"})
    args = parser.parse_args(["serve", "--config", str(file)])
    assert any(origin.kind == "file" for origin in args.sources.values())


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for b in BLOCKS for t in re.findall(r"^make ([a-z-]+)", b.text, re.MULTILINE)}
    assert named and named <= targets


def test_modules_exist():
    named = {
        m for b in BLOCKS for m in re.findall(r"-m ((?:benchmarks|training|kestrel)[\w.]+)", b.text)
    }
    assert named
    for module in named:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
