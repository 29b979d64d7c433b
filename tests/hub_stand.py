"""A local stand-in for the hub: it speaks its file endpoints, and remembers what it was asked."""

import hashlib
import json
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
    """What the stand-in serves and what it was asked. ``cut``: files whose next transfer breaks half-way.
    ``told``: wrong checksums that it tells of files."""

    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)
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

        def _commit(self, repo: str, revision: str) -> str | None:
            """The commit; None if the call is refused."""
            commit = stand.revisions.get(revision, revision)
            if repo in stand.refuse:
                self._refuse(*stand.refuse[repo])
            elif repo not in {r for r, _, _ in stand.files}:
                self._refuse(401, "RepoNotFound")
            elif commit not in {c for r, c, _ in stand.files if r == repo}:
                self._refuse(404, "RevisionNotFound")
            else:
                return commit
            return None

        def _describe(self, repo: str, revision: str) -> None:
            """Answers with the files of a repository at a revision, as the hub's API does."""
            stand.requests.append((self.command, f"api {repo}", dict(self.headers)))
            commit = self._commit(repo, revision)
            if commit is None:
                return
            siblings = []
            for (other, at, file), content in stand.files.items():
                if (other, at) == (repo, commit):
                    digest = stand.told.get(file, hashlib.sha256(content).hexdigest())
                    lfs = {"sha256": digest, "size": len(content), "pointerSize": 130}
                    siblings.append({"rfilename": file, "size": len(content), "lfs": lfs})
            answer = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _answer(self, *, send_body: bool) -> None:
            plain = self.path.partition("?")[0]
            info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", plain)
            if info is not None:
                return self._describe(info[1], unquote(info[2] or "main"))
            path = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", plain)
            if path is None:
                return self._refuse(404, "")
            repo, revision, file = path[1], unquote(path[2]), path[3]
            stand.requests.append((self.command, file, dict(self.headers)))
            commit = self._commit(repo, revision)
            if commit is None:
                return
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
