"""The unmodified packages of Moondream, OpenAI (Python and Node), Anthropic, Ollama, LangChain, LlamaIndex and
EleutherAI's lm-evaluation-harness, each in an environment of its own, against the bundled model."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.code_blocks import ROOT, code_blocks
from tests.environments import python_with
from tests.service.cli.serve_process import served_model

pytestmark = pytest.mark.slow
KEY = "k" * 40
FLAGS = ("--device", "cpu", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
NODE, NPM = shutil.which("node"), shutil.which("npm")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """kestrel-tiny behind HTTP, served by a process that knows one key."""
    batches = str(tmp_path_factory.mktemp("batches") / "batches.db")
    with served_model(KESTREL_API_KEY=KEY, KESTREL_BATCHES=batches) as addresses:
        yield f"http://{addresses.http}/v1"


def run(folder: Path, packages: list[str], program: str, endpoint: str) -> dict[str, Any]:
    """What the program prints in a fresh environment with ``packages``."""
    python = python_with(folder, *packages)
    return printed([python, Path(__file__).with_name(program), endpoint, KEY, IMAGE])


def example(folder: Path, endpoint: str, part: str, command: list[str | Path]) -> str:
    """What the block of docs/use/http.md that holds ``part`` prints, run as written, apart from address and token."""
    (block,) = [each for each in code_blocks(ROOT / "docs/use/http.md") if part in each.text]
    text = block.text.replace("http://127.0.0.1:2020", endpoint.removesuffix("/v1"))
    program = folder / "example.mjs"
    program.write_text(text.replace("the-token", KEY))
    shutil.copy(IMAGE, folder / "picture.jpg")
    done = subprocess.run(
        [*command, program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def printed(command: list[str | Path], **options: Any) -> dict[str, Any]:
    """The JSON that a command prints in its last line."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answered: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answered


def test_moondream(endpoint: str, tmp_path: Path):
    # Its dependencies are engines for a GPU, which a client of a server does not need.
    packages = ["--no-deps moondream==2.6.1", "pillow>=11", "supervision>=0.29,<1"]
    out = run(tmp_path, packages, "moondream_program.py", endpoint)
    assert out["query"] == {"answer": "0"} and out["stream"] == "0"
    assert out["reasoning"]["reasoning"]["text"] == "I see no red circles."
    assert "two green crescents" in out["caption"]["caption"]
    assert out["caption_stream"] == out["caption"]["caption"]
    assert len(out["detect"]["objects"]) == len(out["point"]["points"]) == 2
    assert out["detect"]["objects"][0].keys() == {"x_min", "y_min", "x_max", "y_max", "score"}
    boxes, (width, height) = out["supervision"]
    assert len(boxes) == 2
    for box, (left, top, right, bottom) in zip(out["detect"]["objects"], boxes, strict=True):
        assert (left, top) == pytest.approx((box["x_min"] * width, box["y_min"] * height))
        assert (right, bottom) == pytest.approx((box["x_max"] * width, box["y_max"] * height))
    assert out["refs"].keys() == {"points"}
    assert out["chat"]["message"]["content"] == out["chat_stream"] == "0"
    assert example(tmp_path, endpoint, "import moondream", [tmp_path / "env/bin/python"])


def test_openai(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["openai>=2,<4"], "openai_program.py", endpoint)
    assert out["answer"] == out["stream"] == "0" and out["finish_reason"] == "stop"
    assert out["tokens"] == out["stream_tokens"] == 1
    assert (
        out["scored"] == out["described"] and -1 < min(out["logprobs"]) <= max(out["logprobs"]) <= 0
    )
    assert out["top"] == out["top_stream"] and {len(top) for top in out["top"]} == {3}
    assert [top[0] for top in out["top"]] == out["tokens_scored"]
    number, same, tops, first = out["completed"]
    assert number == same == len(tops) >= 1 and first == 0 and set(tops) <= {2, 3}
    assert out["described"].partition("two")[0] == out["stopped"] != out["described"]
    assert out["choices"] == ["0", "0", "0"]
    assert [box["label"] for box in out["boxes"]] == ["green crescent"] * 2
    assert out["models"] == ["kestrel-tiny"] == [out["model"]]
    assert out["bad_request"] == ["n", 400] and out["wrong_key"] == "credentials_invalid"
    assert (
        example(tmp_path, endpoint, "chat.completions.create(model=", [tmp_path / "env/bin/python"])
        == "2"
    )
    assert example(tmp_path, endpoint, "import BaseModel", [tmp_path / "env/bin/python"]) == "2"


def test_responses(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["openai>=2,<4"], "responses_program.py", endpoint)
    assert out["answer"] == out["stream"] == out["reasoned"] == "0" and out["tokens"] == 1
    assert out["status"] == out["again"] == "completed" and out["last"] == "response.completed"
    assert out["reasoning"] == ["I see no red circles."] and out["parsed"] in (True, False)
    assert "response.reasoning_summary_text.delta" in out["kinds"] and out["valid"] > 12
    assert out["input_tokens"] == out["counted"]
    assert out["cut"] == "response.incomplete" and out["cancelled"] == "response.created"
    assert out["bad_request"] == ["previous_response_id", 400]
    assert out["wrong_key"] == "credentials_invalid"
    python = tmp_path / "env/bin/python"
    assert example(tmp_path, endpoint, "client.responses", [python]) == "2"
    batch = printed([python, Path(__file__).with_name("batch_program.py"), endpoint, KEY, IMAGE])
    assert (batch["created"], batch["status"]) == ("in_progress", "completed")
    count, boxes = batch["texts"]
    assert batch["counts"] == [2, 0] and count == "0" and len(json.loads(boxes)) == 2
    assert batch["batches"] == [True] and batch["files"] == 2
    [line] = example(tmp_path, endpoint, "client.batches", [python]).splitlines()
    assert json.loads(line)["response"]["status_code"] == 200
    assert batch["deleted"] and batch["gone"] == "stored_not_found"


def test_anthropic(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["anthropic>=2,<3"], "anthropic_program.py", endpoint)
    assert (
        out["answer"] == out["stream"] == "0" and out["stop_reason"] == out["again"] == "end_turn"
    )
    assert out["tokens"] == 1 < out["stream_tokens"] and out["input_tokens"] == out["counted"]
    assert out["blocks"] == ["thinking", "text"] and out["thinking"] == "I see no red circles."
    assert out["parsed"] in (True, False) and out["request_id"]
    assert out["cut"] == "max_tokens" and out["valid"] > 8
    assert out["cancelled"] == ["message_start", "0"]
    described = out["described"].partition("two")[0]
    assert out["stopped"] == [described, "stop_sequence", "two"] and described != out["described"]
    kind, has_id, message = out["bad_request"]
    assert (kind, has_id) == ("invalid_request_error", True) and message.startswith("tools: ")
    assert out["wrong_key"] == "authentication_error"
    python = tmp_path / "env/bin/python"
    assert example(tmp_path, endpoint, "import Anthropic", [python]) == "2"


def test_ollama(endpoint: str, tmp_path: Path):
    out = run(tmp_path, ["ollama>=0.6,<1"], "ollama_program.py", endpoint)
    assert out["generate"] == out["chat"] == "0" and out["done_reason"] == "stop"
    assert out["eval_count"] == 1 and out["models"] == ["kestrel-tiny"]
    assert "vision" in out["capabilities"] and out["load"] == "load"
    assert out["wrong_model"] == [404, True]
    assert example(tmp_path, endpoint, "import ollama", [tmp_path / "env/bin/python"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(endpoint: str, tmp_path: Path):
    told = json.loads(example(tmp_path, endpoint, "curl -s http", ["bash", "-euo", "pipefail"]))
    assert told["answer"] == "2"


@pytest.mark.skipif(NODE is None or NPM is None, reason="needs node and npm")
def test_openai_in_node(endpoint: str, tmp_path: Path):
    (tmp_path / "package.json").write_text('{"private": true}')
    installed = subprocess.run(
        [str(NPM), "install", "--silent", "--no-audit", "--no-fund", "openai@^6"],
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    if installed.returncode:
        pytest.skip("the npm package openai can't be installed here")
    program = tmp_path / "program.mjs"  # Node looks for packages beside the program.
    shutil.copy(Path(__file__).with_name("openai_program.mjs"), program)
    out = printed([str(NODE), program, endpoint, KEY, IMAGE])
    assert out["answer"] == out["stream"] == "0" and out["finish_reason"] == "stop"
    assert out["tokens"] == out["stream_tokens"] == 1
    assert out["choices"] == ["0", "0", "0"] and out["completions"] == 2
    assert [box["label"] for box in out["boxes"]] == ["green crescent"] * 2
    assert out["models"] == ["kestrel-tiny"]
    assert out["bad_request"] == ["n", 400, True] and out["wrong_key"] == "credentials_invalid"
    assert example(tmp_path, endpoint, 'from "openai"', [str(NODE)]) == "2"


def test_langchain_and_llama_index(endpoint: str, tmp_path: Path):
    packages = ["langchain-openai>=1,<2", "llama-index-llms-openai-like>=0.5,<1"]
    out = run(tmp_path, packages, "langchain_program.py", endpoint)
    assert out["langchain"] == out["langchain_stream"] == "0" and out["langchain_tokens"] == 1
    assert out["llama_index"] == out["llama_index_stream"] == "0"
    for part in ("langchain_openai", "llama_index.core"):
        assert example(tmp_path, endpoint, part, [tmp_path / "env/bin/python"]) == "2"


TASK = """
task: shapes
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 8
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def test_lm_evaluation_harness(endpoint: str, tmp_path: Path):
    """A generation task of two questions; the expected answers are those of the server, one of them changed."""
    python = python_with(tmp_path, "lm_eval[api]>=0.4.9,<0.5")
    questions = ["How many legs has a cat?", "What is red?"]
    client = httpx2.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    asked = {"model": "moondream2", "prompt": questions, "max_tokens": 8, "temperature": 0}
    choices = client.post(f"{endpoint}/completions", json=asked).json()["choices"]
    client.close()
    answers = [choice["text"] for choice in choices]
    rows = zip(questions, [answers[0], f"not {answers[1]}"], strict=True)
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "shapes.yaml").write_text(TASK)
    arguments = (
        f"model=moondream2,base_url={endpoint}/completions,tokenizer_backend=None,num_concurrent=2"
    )
    command = [
        *(python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "shapes", "--include_path", tmp_path, "--batch_size", "2"),
        *("--output_path", tmp_path / "out", "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **offline, "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["shapes"]["exact_match,none"] == 0.5
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [each["filtered_resps"] for each in told] == [[answer] for answer in answers]
