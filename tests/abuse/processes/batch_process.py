"""A process that answers the batches of a store with what they ask, and reports each answer: PATH."""

from __future__ import annotations

import asyncio
import sys

from kestrel_grpc.batches.running import Answer, BatchRunner
from kestrel_grpc.batches.store import BatchStore, Waiting
from kestrel_grpc.settings.batches import BatchesConfig


async def answer(request: Waiting) -> Answer:
    await asyncio.sleep(0)
    print(request.number, flush=True)
    return Answer(200, f"id-{request.number}", request.body)


async def main(path: str) -> None:
    runner = BatchRunner(BatchStore(BatchesConfig(path=path)), 3)
    runner.answer = answer
    await runner.run()


asyncio.run(main(sys.argv[1]))
