"""A local stand-in for the tuning API: its route of a checkpoint's address, and the files at these addresses."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY = "md-secret-key"


@dataclass
class TuningStand:
    """What the stand-in serves and what it was asked. ``statuses``: answers in place of the next ones, by the beginning
    of a path. ``address``: named in place of the file's. ``go``: a file's transfer waits for it."""

    files: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    address: str | None = None
    answer: bytes | None = None
    is_cut: bool = False
    has_length: bool = True
    go: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def asked(self, beginning: str) -> list[dict[str, str]]:
        return [headers for path, headers in self.requests if path.startswith(beginning)]


def handler_for(stand: TuningStand) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            stand.requests.append((self.path, dict(self.headers)))
            for beginning, statuses in stand.statuses.items():
                if self.path.startswith(beginning) and statuses:
                    return self._answer(statuses.pop(0), b"")
            route = re.fullmatch(
                r"/v1/tuning/finetunes/([^/]+)/checkpoints/(\d+)/download", self.path
            )
            if route is None:
                content = stand.files.get(self.path.removeprefix("/files/").partition("?")[0])
                assert stand.go.wait(60)
                return self._answer(403 if content is None else 200, content or b"")
            if self.headers.get("X-Moondream-Auth") != KEY:
                return self._answer(401, b"")
            name = f"{route[1]}@{route[2]}"
            if name not in stand.files:
                return self._answer(404, b"")
            address = stand.address or f"{stand.url}/files/{name}?signature=secret"
            self._answer(200, stand.answer or json.dumps({"url": address}).encode())

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            if status in (301, 302, 307):
                self.send_header("Location", "http://169.254.169.254/latest/meta-data")
            if stand.has_length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            is_cut = stand.is_cut and self.path.startswith("/files/")
            self.wfile.write(content[: len(content) // 2] if is_cut else content)

    return Handler


@pytest.fixture
def tuning() -> Iterator[TuningStand]:
    stand = TuningStand()
    stand.go.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(stand))
    server.daemon_threads = True
    stand.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stand
    stand.go.set()
    server.shutdown()
    thread.join()
    server.server_close()
