"""Attacks by constraints: slow to follow, or slow to compile."""

import json
import time
from collections import Counter
from collections.abc import Callable

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.abuse.attacks.registry import attack, ending_of, many, open_stub
from tests.abuse.target import Target

_AMBIGUOUS = 'start: e\ne: e e | e "+" e | "a" | "x" |'
_END_ID = 0


@attack
async def ambiguous_grammars(target: Target) -> Counter[str]:
    """24 callers with long answers under a grammar whose next token takes longer the longer the text is."""

    def ask(_: int) -> pb.QueryRequest:
        constraint = common_pb2.Constraint(grammar=_AMBIGUOUS)
        task = pb.QueryTask(question="What is it?", max_tokens=700, sampling={"temperature": 1})
        task.text.constraint.CopyFrom(constraint)
        task.text.logit_bias.add(id=_END_ID, bias=-100)
        return pb.QueryRequest(query=task)

    return await _callers(target, 24, 60, ask)


@attack
async def new_schemas(target: Target) -> Counter[str]:
    """60 callers, each with a deeply nested schema that no call had before."""

    def ask(number: int) -> pb.QueryRequest:
        schema: dict[str, object] = {"type": "integer"}
        words = {"type": "array", "items": {"type": "string", "pattern": "[a-z]{1,20}x*"}}
        for level in range(40):
            name = f"a{number}_{level}"
            schema = {"type": "object", "properties": {name: schema, "b": words}, "required": ["b"]}
        constraint = common_pb2.Constraint(json_schema=json.dumps(schema))
        task = pb.QueryTask(question="What is it?", max_tokens=1, sampling={"temperature": 0})
        task.text.constraint.CopyFrom(constraint)
        return pb.QueryRequest(query=task)

    return await _callers(target, 60, 15, ask)


async def _callers(
    target: Target, count: int, seconds: float, ask: Callable[[int], pb.QueryRequest]
) -> Counter[str]:
    """``ask`` makes a request of a number that no other one has."""
    end = time.monotonic() + seconds
    codes: Counter[str] = Counter()

    async def caller(number: int) -> str:
        async with open_stub(target) as stub:
            while (left := end - time.monotonic()) > 0:
                asked = ask(number)
                number += count
                call = stub.Query(asked, metadata=target.metadata("rude"), timeout=left)
                codes[await ending_of(call)] += 1
        return "done"

    await many(count, caller)
    return codes
