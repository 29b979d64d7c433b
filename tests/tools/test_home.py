"""deploy/homeassistant and deploy/frigate: what they send, to a real server with HTTP."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml

from tests.code_blocks import ROOT
from tests.environments import printed, python_named
from tests.service.cli.serve_process import served_model

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
HOME_ASSISTANT = ROOT / "deploy/homeassistant"
KEY = "k" * 40


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The HTTP address of a server with the bundled model that knows one key."""
    with served_model(KESTREL_API_KEY=KEY) as addresses:
        yield f"http://{addresses.http}"


def test_the_command_of_home_assistant(address: str, tmp_path: Path):
    program = tmp_path / "kestrel_ask.py"
    program.write_text((HOME_ASSISTANT / "kestrel_ask.py").read_text())

    def ask(*arguments: object) -> tuple[int, dict]:
        done = subprocess.run(
            [sys.executable, "-S", program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    status, answer = ask(address, "detect", IMAGE, "green crescent")
    assert status == 1 and answer["error"].startswith("status 401")
    (tmp_path / "kestrel_token").write_text(KEY + "\n")
    status, answer = ask(address, "detect", IMAGE, "green crescent")
    assert status == 0 and len(answer["objects"]) == 2
    for arguments, part in (
        ((address, "look", IMAGE, "car"), "must be one of"),
        (("file:///etc", "query", IMAGE, "a?"), "http://"),
        ((address, "query", tmp_path / "none.jpg", "a?"), "No such file"),
        ((address, "query"), "argument"),
        ((address, "detect", program, "car"), "status 400"),
        (("http://127.0.0.1:1", "query", IMAGE, "a?"), "refused"),
    ):
        status, answer = ask(*arguments)
        assert status == 1 and part in answer["error"], answer


def test_what_frigate_sends_is_answered(address: str):
    """As frigate/genai/plugins/openai.py and the configuration make it."""
    config = yaml.safe_load((ROOT / "deploy/frigate/config.yml").read_text())
    provider = config["genai"]["kestrel"]
    assert provider["provider"] == "openai" and provider["roles"] == ["descriptions"]
    assert config["objects"]["genai"]["use_snapshot"] is True
    path = provider["base_url"].removeprefix("http://127.0.0.1:2020")
    prompt = config["objects"]["genai"]["prompt"].format(label="person")
    image = base64.b64encode(IMAGE.read_bytes()).decode()
    url = {"url": f"data:image/jpeg;base64,{image}", "detail": "low"}
    content = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": url}]
    body = {"model": provider["model"], "messages": [{"role": "user", "content": content}]}
    response = httpx2.post(
        f"{address}{path}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"].strip()


def test_what_home_assistants_ollama_integration_sends_is_answered(address: str):
    """As homeassistant/components/ollama/entity.py does for an AI task with a camera's image."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=60) as client:
        names = [model["model"] for model in client.get("/api/tags").json()["models"]]
        messages = [
            {"role": "system", "content": "You are a Home Assistant expert."},
            {
                "role": "user",
                "content": "How many green crescents are there?",
                "images": [base64.b64encode(IMAGE.read_bytes()).decode()],
            },
        ]
        body = {
            "model": names[0],
            "messages": messages,
            "tools": [],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 8192},
            "think": False,
        }
        lines = client.post("/api/chat", json=body).text.splitlines()
    parts = [json.loads(line) for line in lines]
    assert parts[-1]["done"] is True
    assert "".join(part["message"]["content"] for part in parts).strip()


def test_what_llm_vision_sends_is_answered(address: str):
    """As custom_components/llmvision/providers.py does with its default settings: limits above the context, and several
    messages of the user in a row."""
    image = base64.b64encode(IMAGE.read_bytes()).decode()
    options = {"temperature": 0.5, "num_ctx": 2048}
    look = [
        {"role": "user", "content": "Image 1:", "images": [image]},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    title = [{"role": "user", "content": "Make a title."}, {"role": "user", "content": "A gate"}]
    url = {"url": f"data:image/jpeg;base64,{image}"}
    parts = [{"type": "text", "text": "Image 1:"}, {"type": "image_url", "image_url": url}]
    with httpx2.Client(
        base_url=address, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    ) as client:
        for messages, most in ((look, 3000), (title, 4096)):
            body = {"model": "moondream", "stream": False, "keep_alive": 5, "messages": messages}
            body["options"] = {**options, "num_predict": most}
            answer = client.post("/api/chat", json=body)
            assert answer.status_code == 200 and answer.json()["message"]["content"], answer.text
        asked = {"model": "moondream2", "max_completion_tokens": 3000, "top_p": 0.9}
        asked["messages"] = [
            {"role": "system", "content": "Describe images."},
            {"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]},
        ]
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_the_package_runs_in_home_assistant(address: str, tmp_path: Path):
    python = python_named("KESTREL_TEST_HOMEASSISTANT", "homeassistant")
    told = printed(python, ROOT / "tests/tools/with_homeassistant.py", address, IMAGE, tmp_path)
    said = json.loads(told.splitlines()[-1])
    assert re.fullmatch(r"2 cars, gate open: \S.*", said["told"])
    assert said["missing"]["returncode"] == 1
    assert "no such $(file)" in json.loads(said["missing"]["stdout"])["error"]
