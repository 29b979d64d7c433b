"""A process that answers the batches of a store with what they ask, and reports each answer: PATH."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from kestrel_grpc.batches import running
from kestrel_grpc.batches.answering import Answer, Form
from kestrel_grpc.batches.running import BatchRunner
from kestrel_grpc.batches.store import BatchStore
from kestrel_grpc.batches.tables import Waiting
from kestrel_grpc.settings.batches import BatchesConfig


async def answer(request: Waiting, form: Form, life: Any) -> Answer:
    await asyncio.sleep(0)
    print(request.number, flush=True)
    return Answer(True, b'{"request_id": "id-%d", "body": %s}' % (request.number, request.body))


async def main(path: str) -> None:
    runner = BatchRunner(BatchStore(BatchesConfig(path=path)), 3, lambda: 0)
    runner.life = runner.forms["/v1/responses"] = cast(Any, "not used")
    running.answer = answer
    await runner.run()


asyncio.run(main(sys.argv[1]))
