"""A list of servers that changes: what it may look like, and what is made of one that is broken."""

import gc
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kestrel_client import InvalidRequestError, KestrelClient, Tls, UnavailableError
from kestrel_client.connection import Connection
from kestrel_client.directory import Directory, read
from kestrel_grpc.cluster.directory import Server, as_json, endpoints

SERVERS = [
    Server(replica=name, address=address, node="n", model="m", version="v", serving=serving)
    for name, address, serving in (
        ("b", "10.0.0.8:2", True),
        ("a", "[::1]:1", True),
        ("c", "10.0.0.9:3", False),
    )
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "servers"


def test_what_the_cluster_serves_and_writes_is_read(file: Path) -> None:
    file.write_text(json.dumps(as_json(SERVERS)))
    assert read(str(file)) == ("10.0.0.8:2", "[::1]:1")  # The third drains.
    file.write_text(json.dumps(endpoints(SERVERS[:2])))
    assert read(str(file)) == ("10.0.0.8:2", "[::1]:1")
    file.write_text("10.0.0.8:2\n\n# a comment\n10.0.0.7:1\n10.0.0.8:2\n")
    assert read(str(file)) == ("10.0.0.7:1", "10.0.0.8:2")


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "names no server"),
        (b'{"servers": []}', "names no server"),
        (b"\xff", "is no list of servers"),
        (b"[1]", "is no list of servers"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "is no list of servers"),
        (b'{"servers": [{"address": 7}]}', "7 is not text"),
        (b'{"servers": 7}', "is no list of servers"),
        (b'{"resources": [{"endpoints": [{}]}]}', "KeyError: 'lb_endpoints'"),
        (b" " * (8 * 1024 * 1024 + 1), "has more than 8388608 bytes"),
        ("".join(f"10.0.0.1:{n}\n" for n in range(10_001)).encode(), "names 10001 servers"),
    ],
)
def test_a_broken_list(file: Path, content: bytes, why: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read(str(file))


@pytest.mark.parametrize(
    "source", ["http://127.0.0.1:1/kestrel", "http://[", "http://127.0.0.1:x/", "/nowhere", "/"]
)
def test_a_directory_that_cannot_be_read(source: str) -> None:
    with pytest.raises(UnavailableError, match="the directory of servers "):
        KestrelClient(f"directory:{source}")


def test_a_list_that_breaks_leaves_the_servers_as_they_are(file: Path, caplog) -> None:
    file.write_text("10.0.0.7:1\n")
    directory = Directory(str(file), every_s=3600)
    for content in ("", "{"):
        file.write_text(content)
        directory.look()
    assert directory.addresses == ("10.0.0.7:1",)
    assert [record.message for record in caplog.records] == [
        f"the directory of servers {file}: names no server; the servers stay as they are"
    ]
    file.write_text("10.0.0.8:1\n")
    directory.look()
    assert directory.addresses == ("10.0.0.8:1",)
    directory.close()


def test_its_thread_ends_with_the_client(file: Path) -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "kestrel-directory"]

    file.write_text("127.0.0.1:1\n")
    with KestrelClient(f"directory:{file}"):
        (thread,) = threads()
    thread.join(60)
    client = KestrelClient(f"directory:{file}")
    (thread,) = threads()
    del client
    gc.collect()
    thread.join(60)
    assert not threads()


def test_an_http_directory() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/kestrel" else 503)
            self.end_headers()
            self.wfile.write(json.dumps(as_json(SERVERS)).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}"
        assert read(f"{url}/kestrel") == ("10.0.0.8:2", "[::1]:1")
        with pytest.raises(ValueError, match="Service Unavailable"):
            read(f"{url}/other")
        http.shutdown()
        thread.join()


def test_what_a_list_must_have_holds_for_a_directory_too(file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="needs a file or an http"):
        Connection(target="directory:")
    with pytest.raises(InvalidRequestError, match="server_name"):
        Connection(target=f"directory:{file}", tls=True)
    Connection(target=f"directory:{file}", tls=Tls(server_name="kestrel"))
    file.write_text("vision.example:1\n")
    with pytest.raises(InvalidRequestError, match="a list takes IP addresses"):
        KestrelClient(f"directory:{file}")
    file.write_text("10.0.0.7:1\n")
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        KestrelClient(f"directory:{file}", token="secret")
    file.write_text("127.0.0.1:1\n")
    KestrelClient(f"directory:{file}", token="secret").close()
