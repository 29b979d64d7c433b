"""What a target may be: a host alone gets the default port, a web address is refused with what to write."""

from __future__ import annotations

import pytest

from kestrel_client import InvalidRequestError, KestrelAdmin, KestrelClient
from kestrel_client.connection import Connection


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("127.0.0.1", "127.0.0.1:50051"),
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("vision.example", "vision.example:50051"),
        ("localhost:443", "localhost:443"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("dns:vision.example", "dns:vision.example:50051"),
        ("dns:///vision.example", "dns:///vision.example:50051"),
        ("dns:///vision.example:7", "dns:///vision.example:7"),
        ("ipv4:127.0.0.1:7", "ipv4:127.0.0.1:7"),
        ("ipv4:127.0.0.1:7,127.0.0.2:7", "ipv4:127.0.0.1:7,127.0.0.2:7"),
        ("unix:/run/kestrel.sock", "unix:/run/kestrel.sock"),
        ("unix:///run/kestrel.sock", "unix:///run/kestrel.sock"),
    ],
)
def test_the_default_port(target: str, address: str) -> None:
    assert Connection(target=target).address == address


@pytest.mark.parametrize("client", [KestrelClient, KestrelAdmin])
def test_a_web_address_is_refused(client: type) -> None:
    with pytest.raises(InvalidRequestError, match=r"takes HOST:PORT: 127\.0\.0\.1:50051$"):
        client("http://127.0.0.1:50051")
    with pytest.raises(InvalidRequestError, match=r"HOST:PORT, with TLS: example\.org$"):
        client("https://example.org/path")


@pytest.mark.parametrize("target", ["127.0.0.1:0", "dns:///host:65536", "[::1]:99999"])
def test_an_impossible_port_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"has port \d+; a port is 1 to 65535$"):
        Connection(target=target)


def test_a_number_in_a_path_is_no_port() -> None:
    assert Connection(target="unix:/run/kestrel:99999").address == "unix:/run/kestrel:99999"
