"""The server under attack, and the polite caller who uses it meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from PIL import Image

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.tiny import VARIABLES

ROOT = Path(__file__).parents[2]
OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


class Target:
    """A context: ``kestrel-grpc serve`` in a process, and what is known of it from outside.

    ``start``: subprocess.Popen or ForkedProcess.
    """

    def __init__(
        self, folder: Path, *flags: str, start: type[subprocess.Popen[Any]] = subprocess.Popen
    ) -> None:
        self.tokens = {name: new_token() for name in ("rude", "polite")}
        path = folder / "tokens"
        scopes = [Scope.INFER, Scope.HIGH]
        path.write_text("".join(line_of(n, scopes, t) + "\n" for n, t in self.tokens.items()))
        path.chmod(0o600)
        self.log = folder / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "OTEL_"))}
        environ |= VARIABLES
        with self.log.open("wb") as log:
            self.popen = start(
                [
                    *(sys.executable, "-m", "kestrel_grpc", "serve", "--listen", "127.0.0.1:0"),
                    *("--http-listen", "127.0.0.1:0", "--auth-tokens", str(path)),
                    *("--drain-delay", "0", *flags),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environ,
            )
        assert self.popen.stdout is not None
        ready = self.popen.stdout.readline()
        assert "listening on " in ready, self.log.read_text()
        self.address = ready.partition("listening on ")[2].partition(",")[0]
        (line,) = [each for each in self.log.read_text().splitlines() if "protocol=http" in each]
        self.http_address = line.partition("addresses=")[2].split()[0]

    def memory(self) -> int:
        """Resident bytes of the process and its children."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.popen.pid)
            for process in (server, *server.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[name]}"),)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGINT)
            try:
                self.popen.wait(60)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def jpeg(seed: int, width: int = 640, height: int = 480) -> bytes:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (height // 16, width // 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(buffer, "JPEG")
    return buffer.getvalue()


def query(image: bytes | None = None, max_tokens: int = 3, **options: int) -> pb.QueryRequest:
    return pb.QueryRequest(
        images=[] if image is None else [common_pb2.Image(encoded=image)],
        query=pb.QueryTask(
            question="How many green crescents are there?",
            max_tokens=max_tokens,
            sampling={"temperature": 0},
        ),
        options=common_pb2.RequestOptions(**options),
    )


class Polite(threading.Thread):
    """Calls from a thread of its own until it is stopped, with ``pause_s`` between an answer and the next call."""

    def __init__(self, target: Target, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._target, self._pause_s, self._over = target, pause_s, threading.Event()
        self.seconds: list[float] = []
        self.failed: Counter[str] = Counter()

    def run(self) -> None:
        images = [jpeg(seed) for seed in range(40)]
        with grpc.insecure_channel(self._target.address, options=OWN) as channel:
            stub = VisionServiceStub(channel)
            number = 0
            while not self._over.is_set():
                began = time.monotonic()
                try:
                    asked = query(images[number % len(images)])
                    stub.Query(asked, metadata=self._target.metadata("polite"), timeout=60)
                except grpc.RpcError as error:
                    self.failed[error.code().name] += 1
                    time.sleep(0.05)
                self.seconds.append(time.monotonic() - began)
                number += 1
                self._over.wait(self._pause_s)

    def stop(self) -> None:
        self._over.set()
        self.join(70)

    def percentile(self, share: float) -> float:
        taken = sorted(self.seconds) or [float("inf")]
        return taken[min(len(taken) - 1, int(share * len(taken)))]
