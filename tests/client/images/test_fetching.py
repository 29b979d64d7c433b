"""http(s) addresses and open files as images: fetched here, with limits; a web server of ours answers."""

import io
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kestrel_client import InvalidImageError, RequestTooLargeError
from kestrel_client.images.fetching import fetch
from kestrel_client.images.image_forms import loaded, to_image


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/image":
                self.answer(200, "image/jpeg", b"any file")
            case "/page":
                self.answer(200, "text/html; charset=utf-8", b"<html>")
            case "/empty":
                self.answer(200, "image/png", b"")
            case "/moved":
                self.answer(302, "text/html", b"", Location="/image")
            case "/secret":
                self.answer(302, "text/html", b"", Location="file:///etc/passwd")
            case "/round":
                self.answer(302, "text/html", b"", Location="/round")
            case "/slow":
                self.send_response(200)
                self.end_headers()
                for _ in range(50):
                    try:
                        self.wfile.write(b"x")
                    except OSError:
                        return
                    time.sleep(0.02)
            case _:
                self.answer(404, "text/html", b"<html>no")

    def answer(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["/image", "/moved"])
def test_an_address_is_fetched(web: str, path: str) -> None:
    assert to_image(f"{web}{path}", 1000).encoded == b"any file"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere", "404 Not Found"),
        ("/page", "is a web page, not an image"),
        ("/empty", "is empty"),
        ("/secret", "can't fetch"),
        ("/round", "can't fetch"),
        ("/slow", r"can't fetch .*more than 0\.1 s"),
    ],
)
def test_what_cannot_be_fetched_is_told(web: str, path: str, words: str) -> None:
    with pytest.raises(InvalidImageError, match=words):
        fetch(f"{web}{path}", 1000, timeout_s=0.1 if path == "/slow" else 60)


def test_no_more_is_fetched_than_the_limit(web: str) -> None:
    with pytest.raises(InvalidImageError, match="more than the limit of 3 bytes"):
        fetch(f"{web}/image", 3)
    with pytest.raises(InvalidImageError, match=r"can't fetch http://127\.0\.0\.1:1/"):
        fetch("http://127.0.0.1:1/", 3)
    with pytest.raises(InvalidImageError, match=r"can't fetch http://:"):
        fetch("http://", 3)


def test_open_files_are_read_once_and_drawn_on_later(client: Any, tmp_path: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 4)).save(buffer, "BMP")
    data = buffer.getvalue()
    buffer.seek(0)
    result = client.detect(buffer, "cat")
    assert result.source == data and result.draw().size == (8, 4)
    assert client.put_image(io.BytesIO(data)).source == data
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file:
        assert loaded(file, 1000) == data
        with pytest.raises(InvalidImageError, match="position is at its end"):
            loaded(file, 1000)
    with pytest.raises(RequestTooLargeError):
        loaded(io.BytesIO(data), 10)
    with pytest.raises(InvalidImageError, match="text mode"):
        loaded(io.StringIO("x"), 10)  # type: ignore[arg-type]
