"""GET /metrics on the HTTP port: the same metrics as on the port of --metrics-listen, for the same readers."""

import httpx2
import pytest

from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.settings import telemetry
from kestrel_grpc.settings.security import SecurityConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig

TOKENS = {scope: new_token() for scope in Scope}


@pytest.fixture
def security(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("\n".join(line_of(s.value, [s], token) for s, token in TOKENS.items()))

    def make(**options) -> SecurityConfig:
        return SecurityConfig(auth_tokens=str(path), **options)

    return make


async def test_both_ports_have_the_same_series(http):
    served, client = await http(
        server_config={"telemetry": TelemetryConfig(prometheus="127.0.0.1:0")}
    )
    await client.post("/v1/query", json={"question": "Why?", "settings": {"max_tokens": 2}})
    here = await client.get("/metrics")
    assert here.headers["content-type"].startswith("text/plain; version=")
    url = f"http://{served.server.telemetry.metrics_address}/metrics"
    there = await client.get(url)
    names = {line.rpartition(" ")[0] for line in here.text.splitlines()}
    assert names == {line.rpartition(" ")[0] for line in there.text.splitlines()}
    assert 'rpc_method="kestrel.v1.VisionService/Query"' in here.text
    asked = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert (await client.get("/metrics", headers=asked)).text.endswith("# EOF\n")


async def test_a_scraper_needs_the_scope_if_callers_need_tokens(http, security):
    _, client = await http(server_config={"security": security()})

    async def scrape(token: str | None) -> httpx2.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return await client.get("/metrics", headers=headers)

    for token in (None, "wrong"):
        refused = await scrape(token)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    for scope in Scope:
        response = await scrape(TOKENS[scope])
        if scope in (Scope.METRICS, Scope.ADMIN):
            assert response.status_code == 200 and "kestrel_ready 1.0" in response.text
        else:
            assert response.status_code == 403
            assert "lacks the scope metrics or admin" in response.text
    _, client = await http(
        server_config={"security": security(open_services=("health", "metrics"))}
    )
    assert (await scrape(None)).status_code == 200


async def test_without_metrics_the_path_says_what_it_needs(http, monkeypatch):
    monkeypatch.setattr(telemetry, "_installed", lambda name: name != "prometheus_client")
    served, client = await http()
    assert served.server.telemetry is None, "no package, no warning, no cost"
    told = await client.get("/metrics")
    assert told.status_code == 404 and "pip install ./clients/python '.[telemetry]'" in told.text
