"""A local stand-in for the hub: it speaks its file endpoints, and remembers what it was asked."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

COMMIT = "a" * 40
OLDER = "b" * 40
REPO = "org/model"


@dataclass
class Stand:
    """What the stand-in serves and what it was asked. ``cut``: files whose next transfer breaks half-way."""

    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def add(self, file: str, content: bytes, *, repo: str = REPO, commit: str = COMMIT) -> None:
        self.files[repo, commit, file] = content

    def asked(self, method: str, file: str) -> list[dict[str, str]]:
        return [headers for m, f, headers in self.requests if (m, f) == (method, file)]


def handler_for(stand: Stand) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(send_body=False)

        def do_GET(self) -> None:
            self._answer(send_body=True)

        def log_message(self, *args: object) -> None:
            pass

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _answer(self, *, send_body: bool) -> None:
            path = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path.partition("?")[0])
            assert path is not None, self.path
            repo, revision, file = path[1], unquote(path[2]), path[3]
            stand.requests.append((self.command, file, dict(self.headers)))
            if repo in stand.refuse:
                return self._refuse(*stand.refuse[repo])
            if repo not in {r for r, _, _ in stand.files}:
                return self._refuse(401, "RepoNotFound")
            commit = stand.revisions.get(revision, revision)
            if commit not in {c for r, c, _ in stand.files if r == repo}:
                return self._refuse(404, "RevisionNotFound")
            content = stand.files.get((repo, commit, file))
            if content is None:
                return self._refuse(404, "EntryNotFound")
            first = 0
            if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                first = int(span[1])
            self.send_response(206 if span else 200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content) - first))
            self.send_header("Accept-Ranges", "bytes")
            if span:
                self.send_header(
                    "Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}"
                )
            self.end_headers()
            if send_body and file in stand.cut:
                stand.cut.remove(file)
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.close_connection = True
            elif send_body:
                self.wfile.write(content[first:])

    return Handler


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(stand))
    server.daemon_threads = True
    stand.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stand
    server.shutdown()
    thread.join()
    server.server_close()
