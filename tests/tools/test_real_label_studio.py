"""The bridge behind the real Label Studio, where a variable names a Python that has it."""

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.code_blocks import ROOT
from tests.environments import python_named
from tests.ports import free_port
from tests.tools.test_label_studio import CONFIG, bridge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
TOKEN = secrets.token_hex(20)


@pytest.fixture
def label_studio(tmp_path: Path) -> Iterator[httpx2.Client]:
    """A client of a new Label Studio."""
    program = python_named("KESTREL_TEST_LABEL_STUDIO", "label-studio").with_name("label-studio")
    port = free_port()
    user = (
        "--username", "a@example.org", "--password", secrets.token_hex(8), "--user-token", TOKEN,
    )  # fmt: skip
    variables = {
        "LABEL_STUDIO_BASE_DATA_DIR": str(tmp_path),
        "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true",
        "ML_BLOCK_LOCAL_IP": "false",
        "SSRF_PROTECTION_ENABLED": "false",
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
    }
    process = subprocess.Popen(
        [program, "start", "first", "--init", "--no-browser", "--internal-host", "127.0.0.1",
         "--port", str(port), *user],
        env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    headers = {"authorization": f"Token {TOKEN}"}
    with (
        process,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client,
    ):
        try:
            until = time.monotonic() + 200
            while not _is_up(client):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.5)
            yield client
        finally:
            process.kill()


def _is_up(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx2.TransportError:
        return False


async def test_label_studio_gets_predictions_of_an_uploaded_image(
    server: str, label_studio: httpx2.Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", TOKEN)
    home = str(label_studio.base_url).rstrip("/")
    async with (
        bridge("--server", server, "--label-studio", home, token="secret") as own,
        httpx2.AsyncClient(base_url=home, headers=label_studio.headers, timeout=60) as client,
    ):

        async def post(path: str, **body: Any) -> httpx2.Response:
            return await client.post(path, json=body)

        project = await post("/api/projects", title="Crescents", label_config=CONFIG)
        number = project.json()["id"]
        files = {"file": ("demo.jpg", IMAGE.read_bytes(), "image/jpeg")}
        imported = await client.post(f"/api/projects/{number}/import", files=files)
        assert imported.json()["task_count"] == 1
        backend = {
            "url": str(own.base_url),
            "project": number,
            "title": "kestrel",
            "auth_method": "BASIC_AUTH",
            "basic_auth_user": "anyone",
            "is_interactive": True,
        }
        wrong = await post("/api/ml", **backend, basic_auth_pass="wrong")
        assert wrong.status_code == 400 and "401" in wrong.text
        connected = await post("/api/ml", **backend, basic_auth_pass="secret")
        assert connected.json().get("readable_state") == "Connected", connected.text
        listed = (await client.get(f"/api/tasks?project={number}")).json()
        task = listed["tasks"][0]["id"]
        context = {"result": []}
        asked = f"/api/ml/{connected.json()['id']}/interactive-annotating"
        found = (await post(asked, task=task, context=context)).json()
        kinds = [region["type"] for region in found["data"]["result"]]
        assert kinds == ["rectanglelabels"] * 2 + ["keypointlabels"] * 2 + ["polygonlabels"]
        chosen = {"selectedItems": {"all": True, "excluded": []}}
        action = f"/api/dm/actions?id=retrieve_tasks_predictions&project={number}"
        assert (await post(action, **chosen)).json()["processed_items"] == 1
        (stored,) = (await client.get(f"/api/predictions?project={number}")).json()
        assert stored["model_version"].startswith("kestrel-tiny@") and stored["score"] > 0.5
        assert len(stored["result"]) == 5
        versions = await client.get(f"/api/ml/{connected.json()['id']}/versions")
        assert versions.json()["versions"] == [stored["model_version"]]
