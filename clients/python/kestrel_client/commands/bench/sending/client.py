"""Client: the connections of one process and its event loop, for stages one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

from ..tally import Tally
from .client_health import ClientHealth
from .images import ImageSource
from .sender import ClientPlan, Connections, Sender, Stage

_PER_CONNECTION = 64
"""Calls in progress on one connection. A server allows 100 by default; further ones would wait in the client."""
_OPTIONS = (
    # Clients with the same target would otherwise share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A retry would hide a refusal, and add to the load.
    ("grpc.enable_retries", 0),
)


class Client:
    """A context manager. Its methods block; they run an event loop of this process."""

    def __init__(self, plan: ClientPlan) -> None:
        self._runner = asyncio.Runner()
        count = 1 + (plan.most_in_flight - 1) // _PER_CONNECTION
        self._clients = [plan.connect(channel_options=_OPTIONS) for _ in range(count)]
        self._images = ImageSource(plan.images, plan.unique_share)
        self._sender = Sender(plan, Connections(self._clients, _PER_CONNECTION), self._images)

    def describe(self) -> dict[str, Any]:
        """Connects, and describes the server and its model. Raises the SDK's KestrelError."""
        server = self._runner.run(self._clients[0].server_info())
        model = self._runner.run(self._clients[0].get_model())
        facts = ("device", "device_name", "dtype", "max_batch_size", "weights_fingerprint")
        return {**server.to_dict(), **{name: getattr(model, name) for name in facts}}

    def run(self, stage: Stage) -> tuple[Tally, ClientHealth]:
        """Raises CommandError."""
        return self._runner.run(self._sender.run(stage))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        async def close_all() -> None:
            for client in self._clients:
                await client.aclose()

        self._images.close()
        self._runner.run(close_all())
        self._runner.close()
