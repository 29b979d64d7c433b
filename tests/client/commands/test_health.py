"""``health`` names what is wrong, and what to do."""

import socket
from contextlib import ExitStack

import grpc
import pytest

from kestrel_client import UnavailableError
from kestrel_client.commands.connection import failure_text
from kestrel_client.commands.operation import health
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.abuse.process import ServerProcess
from tests.service.certificates import make_authority
from tests.service.command_line import here

OPERATOR = new_token()


@pytest.fixture(scope="module")
def servers(tmp_path_factory, authority, server_pair):
    """The addresses of three servers: without TLS; with TLS and a token; with TLS that asks for certificates."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "tokens").write_text(line_of("ops", [Scope.ADMIN], OPERATOR))
    tls = ("--tls-cert", server_pair.cert, "--tls-key", server_pair.key)
    flags = {
        "plain": (),
        "tls": (*tls, "--auth-tokens", folder / "tokens"),
        "mutual": (*tls, "--tls-client-ca", authority.ca.cert),
    }
    with ExitStack() as stack:
        addresses = {}
        for name, each in flags.items():
            (folder / name).mkdir()
            server = stack.enter_context(ServerProcess(folder / name, *map(str, each)))
            addresses[name] = server.address
        yield addresses


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The certificate of an authority that signed nothing here."""
    return make_authority(tmp_path_factory.mktemp("stranger")).ca.cert


def ask(address, *flags, **variables):
    return here("health", "--server", address, "--wait", 0.3, *flags, **variables)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("tls", (), "If it uses TLS, set --ca FILE or --tls"),
        ("tls", ("--tls",), "no trusted authority signed the server's certificate; set --ca"),
        ("tls", ("--ca", "{stranger}"), "no trusted authority signed"),
        ("tls", ("--ca", "/absent/ca.pem"), "can't read --ca /absent/ca.pem: No such file"),
        ("tls", ("--ca", "{key}"), "--ca {key} is not a PEM file"),
        ("tls", ("--ca", "{ca}", "--server-name", "example.org"), "set --server-name to a name"),
        ("plain", ("--tls",), "does not use TLS there; omit --tls, --ca"),
        ("plain", ("--ca", "{ca}"), "does not use TLS there; omit --tls, --ca"),
        ("mutual", ("--ca", "{ca}"), "set --client-cert and --client-key"),
    ],
)
def test_a_mismatch_of_tls_is_named(servers, authority, stranger, tmp_path, name, flags, words):
    (tmp_path / "text").write_text("not a certificate")
    files = {"ca": authority.ca.cert, "stranger": stranger, "key": tmp_path / "text"}
    done = ask(servers[name], *[flag.format(**files) for flag in flags])
    assert (done.returncode, done.stdout) == (1, "")
    assert words.format(**files) in done.stderr.splitlines()[-1]


def test_no_server_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = ask(f"127.0.0.1:{unused.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no server answers there; is 'kestrel-grpc serve' running?" in done.stderr
    assert "the host's name is not known" in ask("nowhere.invalid:1").stderr


def test_a_proxy_is_named():
    """gRPC goes by these variables, and its message names the proxy's address as if it were the server's."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        told = ask("192.0.2.1:50051", http_proxy=proxy).stderr
        told_of_two = ask(
            "192.0.2.1", http_proxy=proxy, https_proxy=proxy, no_proxy="example.org, .1.2"
        ).stderr
    assert (
        "the call went to the proxy of http_proxy; to call the server directly, add its host to no_proxy"
        in told
    )
    assert "the proxy of https_proxy" in told_of_two
    assert "secret" not in told


@pytest.mark.parametrize(
    ("server", "variables", "found"),
    [
        ("a.example", {"http_proxy": "http://p:1"}, "http_proxy"),
        ("[fd00::2]:9", {"http_proxy": "http://p:1", "grpc_proxy": "http://q:1"}, "grpc_proxy"),
        ("a.example:9", {"http_proxy": "http://p:1", "no_proxy": "b.example,.example"}, None),
        ("dns:///a.example:9", {"http_proxy": "http://p:1", "no_proxy": "a.example"}, None),
        (
            "a.example",
            {"http_proxy": "http://p:1", "no_proxy": "*", "no_grpc_proxy": "b"},
            "http_proxy",
        ),
        ("localhost", {"http_proxy": "http://p:1"}, None),
        ("a.example", {"HTTP_PROXY": "http://p:1"}, None),
    ],
)
def test_through_which_proxy_grpc_calls(monkeypatch, server, variables, found):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = failure_text(
        UnavailableError(grpc.StatusCode.UNAVAILABLE, "last error: refused"), server, None
    )
    assert ("the proxy of" in told) == (found is not None) and (found or "") in told


@pytest.mark.parametrize(
    ("server", "cause", "hint"),
    [
        ("a.test:1", "errors resolving proxy.example:1: not found", "the proxy of http_proxy"),
        ("a.test:1", "errors resolving a.test:1: not found", "check --server"),
        # no_proxy excepts its network.
        ("10.0.0.1:1", "ipv4:10.0.0.1:1: Connection refused", "no server answers there"),
    ],
)
def test_where_a_call_failed_that_may_have_gone_to_a_proxy(monkeypatch, server, cause, hint):
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:1")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    assert hint in failure_text(UnavailableError(grpc.StatusCode.UNAVAILABLE, cause), server, None)


def test_a_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(health, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = ask(f"127.0.0.1:{silent.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "does the server hang, or does a firewall drop the connection?" in done.stderr


def test_a_wrong_token_is_named(servers, authority):
    flags = (servers["tls"], "--ca", authority.ca.cert)
    assert ask(*flags).stdout == "SERVING\n", "health answers every caller"
    # Its token has no scope for ModelService, and is known.
    assert ask(*flags, KESTREL_TOKEN=OPERATOR).stdout == "SERVING\n"
    for variable in ("KESTREL_TOKEN", "KESTREL_API_KEY"):
        done = ask(*flags, **{variable: new_token()})
        assert (done.returncode, done.stdout) == (1, "")
        assert f"the token is not known to this server; {variable} held the token" in done.stderr
    unencrypted = ask("example.org:50051", KESTREL_TOKEN=OPERATOR)
    assert unencrypted.returncode == 2 and "set --tls, or --ca" in unencrypted.stderr


def test_a_drained_server_is_named(tmp_path, authority):
    address = f"unix:{tmp_path}/s.sock"
    (tmp_path / "tokens").write_text(line_of("ops", [Scope.ADMIN, Scope.INFER], OPERATOR))
    flags = ("--auth-tokens", str(tmp_path / "tokens"))
    with ServerProcess(tmp_path, *flags, listen=address) as server:
        assert here("admin", "drain", "--server", address, KESTREL_TOKEN=OPERATOR).returncode == 0
        known = ask(address, KESTREL_TOKEN=OPERATOR)
        assert (known.returncode, known.stdout) == (1, "NOT_SERVING\n")
        assert "answers, but it drains, so it takes no new requests" in known.stderr
        stranger = ask(address)
        assert (stranger.returncode, stranger.stdout) == (1, "NOT_SERVING\n")
        assert "it starts, drains or has failed; its log says which" in stranger.stderr
        server.stop(within_s=60)
