"""The files that follow the list of servers, with a directory over real HTTP."""

import asyncio
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kestrel_grpc.cluster.directory import as_json
from kestrel_grpc.cluster.follow import EVERY_S, DirectoryError, Follower, ask
from tests.cluster.test_directory import server


@pytest.fixture
def directory():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.server.status)
            self.end_headers()
            self.wfile.write(self.server.answer)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.status, http.answer = 200, b"{}"
        http.url = f"http://127.0.0.1:{http.server_port}/kestrel"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def says(directory, *servers):
    directory.status, directory.answer = 200, json.dumps(as_json(servers)).encode()


def test_files_follow_the_directory(directory, tmp_path, caplog):
    addresses, endpoints = tmp_path / "addresses", tmp_path / "eds.json"
    follower = Follower(directory.url, addresses, endpoints)
    assert not follower.follow()
    assert "is not the answer of a directory" in caplog.text
    assert not list(tmp_path.iterdir())
    says(directory, server("a", 1))
    assert follower.follow() and addresses.read_text() == "10.0.0.7:1\n"
    inode = addresses.stat().st_ino
    assert not follower.follow() and addresses.stat().st_ino == inode
    says(directory, server("a", 1), server("b", 2))
    assert follower.follow() and addresses.read_text() == "10.0.0.7:1\n10.0.0.7:2\n"
    assert (
        len(json.loads(endpoints.read_text())["resources"][0]["endpoints"][0]["lb_endpoints"]) == 2
    )
    # Neither an empty list nor a directory that starts empties the files. Each is reported once.
    caplog.clear()
    says(directory)
    assert not follower.follow() and not follower.follow()
    directory.status, directory.answer = 503, b"the directory has just started\n"
    assert not follower.follow()
    assert addresses.read_text() == "10.0.0.7:1\n10.0.0.7:2\n"
    assert len(caplog.records) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"addresses", "eds.json"}


async def test_a_follower_asks_every_second(still_clock):
    asked_at, stopping = [], asyncio.Event()

    def no_servers(url):
        asked_at.append(still_clock.now())
        return []

    asyncio.get_running_loop().call_later(3.5, stopping.set)
    await Follower("", ask=no_servers).run(stopping)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked_at)]
    assert gaps == pytest.approx([EVERY_S] * 3)


@pytest.mark.parametrize(
    "status, answer, message",
    [
        (200, b"\xff", "/kestrel: "),
        (200, b"[1]", "is not the answer of a directory"),
        (200, b"[" * 100_000, "/kestrel: "),
        (200, b" " * (8 * 1024 * 1024 + 1), "answers with more than 8388608 bytes"),
        (503, b"the directory has just started\n", "HTTP 503: the directory has just started"),
        (404, b"", "HTTP 404: Not Found; the path is the name of the application"),
    ],
)
def test_answers_that_are_no_directory_s(directory, status, answer, message):
    directory.status, directory.answer = status, answer
    with pytest.raises(DirectoryError, match=message):
        ask(directory.url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/kestrel",
        "http://[",
        "http://127.0.0.1:x/",
        "nonsense",
        "file:///etc/passwd",
    ],
)
def test_a_directory_that_does_not_answer(url):
    with pytest.raises(DirectoryError, match=f"^{re.escape(url)}: "):
        ask(url)
