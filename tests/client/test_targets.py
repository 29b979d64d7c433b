"""Targets of a client: a host alone gets the default port, and a web address is refused with the form to use."""

import json

import pytest

from kestrel_client import InvalidRequestError, KestrelAdmin, KestrelClient, Tls
from kestrel_client.connection import SERVICE_CONFIG, Connection


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
        (["10.0.0.1", "10.0.0.2:7"], "ipv4:10.0.0.1:50051,10.0.0.2:7"),
        (("localhost:7",), "ipv4:127.0.0.1:7"),
        (["::1", "[::1]:7"], "ipv6:[::1]:50051,[::1]:7"),
    ],
)
def test_the_default_port(target: str | list[str], address: str) -> None:
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


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([], "must not be empty"),
        (["10.0.0.1", "vision.example"], "IP addresses .* not 'vision.example'; .* 'dns:///NAME"),
        (["10.0.0.1", "::1"], "not both"),
        (["http://10.0.0.1"], "takes HOST:PORT"),
        (["10.0.0.1:0"], "has port 0"),
        (["10.0.0.1", "10.0.0.2:grpc"], "'10.0.0.2:grpc' needs a number as its port"),
        (["[::1]:"], "needs a number"),
        (["unix:/run/kestrel.sock"], "IP addresses"),
    ],
)
def test_a_list_that_is_refused(target: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Connection(target=target)


def test_several_servers_in_one_text_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"give a list: \['10.0.0.1', '10.0.0.2:7'\]$"):
        Connection(target="10.0.0.1, 10.0.0.2:7")


def test_several_servers_need_the_name_in_their_certificates() -> None:
    with pytest.raises(InvalidRequestError, match="server_name"):
        Connection(target=["10.0.0.1", "10.0.0.2"], tls=True)
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        Connection(target=["127.0.0.1", "10.0.0.2"], token="secret")
    Connection(target=["10.0.0.1"], tls=Tls(server_name="vision.example"), token="secret")


@pytest.mark.parametrize(
    ("target", "policy"),
    [
        ("127.0.0.1:7", "round_robin"),
        ("vision.example", "round_robin"),
        ("dns:///vision.example", "ring_hash_experimental"),
        ("ipv4:127.0.0.1:7,127.0.0.2:7", "ring_hash_experimental"),
        (["127.0.0.1:7"], "ring_hash_experimental"),
    ],
)
def test_the_policy(target: str | list[str], policy: str) -> None:
    options = dict(Connection(target=target).options)
    config = json.loads(str(options["grpc.service_config"]))
    assert list(config["loadBalancingConfig"][0]) == [policy]
    assert config["methodConfig"] == SERVICE_CONFIG["methodConfig"]


def test_the_places_of_a_server_do_not_depend_on_the_others() -> None:
    for servers in (2, 20):
        options = dict(Connection(target=[f"10.0.0.{n + 1}" for n in range(servers)]).options)
        (ring, _) = json.loads(str(options["grpc.service_config"]))["loadBalancingConfig"]
        places = ring["ring_hash_experimental"]
        assert places["minRingSize"] == places["maxRingSize"] == 256 * servers
        assert options["grpc.lb.ring_hash.ring_size_cap"] == 256 * servers


@pytest.mark.parametrize(
    ("target", "is_asked"),
    [("localhost:7", False), (["127.0.0.1", "127.0.0.2"], False), ("10.0.0.1", True)],
)
def test_no_proxy_is_asked_for_this_machine(target: str | list[str], is_asked: bool) -> None:
    assert dict(Connection(target=target).options).get("grpc.enable_http_proxy", 1) == is_asked
