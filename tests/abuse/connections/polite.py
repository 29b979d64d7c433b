"""Polite: a well-behaved caller beside an attack, and the server's memory meanwhile."""

from __future__ import annotations

import threading
import time

import grpc
import psutil

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.process import ServerProcess

MIB = 1 << 20


class Polite:
    """Calls, each on a connection of its own, in a thread, while a block runs; and the server's memory meanwhile."""

    def __init__(self, server: ServerProcess, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._process, self._address = psutil.Process(server.popen.pid), server.address
        self._metadata, self._stop = metadata, threading.Event()
        self.rest = self.peak = self.resident
        self.seconds: list[float] = []
        self.failed = 0

    def _call(self) -> None:
        request = pb.QueryRequest(query={"question": "?", "max_tokens": 2})
        while not self._stop.wait(0.02):
            began = time.monotonic()
            own = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(self._address, options=own) as channel:
                try:
                    VisionServiceStub(channel).Query(request, timeout=60, metadata=self._metadata)
                except grpc.RpcError:
                    self.failed += 1
            self.seconds.append(time.monotonic() - began)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self.resident)

    def __enter__(self) -> Polite:
        self._threads = [threading.Thread(target=each) for each in (self._watch, self._call)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def resident(self) -> int:
        return int(self._process.memory_info().rss)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]

    def __str__(self) -> str:
        grown = (self.peak - self.rest) / MIB
        return f"{grown:.0f} MiB more; {len(self.seconds)} polite calls, {self.failed} failed, p99 {self.p99:.2f} s"
