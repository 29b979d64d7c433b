"""Budgets of tokens hold for all protocols together, and HTTP clients learn when theirs is renewed."""

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.settings.security import CallLimits, SecurityConfig


async def test_one_budget_for_all_protocols(wall, http):
    calls = CallLimits(token_budget="day=100")
    served, client = await http(server_config={"security": SecurityConfig(calls=calls)})
    task = pb.QueryTask(question="x" * 60, max_tokens=20)
    await served.vision.Query(pb.QueryRequest(query=task))
    chat = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 20, "model": ""}
    chat["model"] = served.engine.info.model
    answer = await client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 429 and "tokens a day" in answer.json()["error"]["message"]
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
