"""Security as users use it: ``serve`` with TLS and tokens, and the client commands with their flags for both."""

import re

import pytest

from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from tests.abuse.process import ServerProcess
from tests.service.command_line import here, kestrel


@pytest.fixture(scope="module")
def token():
    return new_token()


@pytest.fixture(scope="module")
def admin_token():
    return new_token()


@pytest.fixture
def served(tmp_path_factory, server_pair, token, admin_token):
    """The address of a server with TLS and two tokens, on all addresses. A test may drain it."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    lines = line_of("camera", [Scope.INFER], token), line_of("ops", [Scope.ADMIN], admin_token)
    path.write_text("\n".join(lines))
    tls = ("--tls-cert", str(server_pair.cert), "--tls-key", str(server_pair.key))
    flags = ("--auth-tokens", str(path), *tls)
    with ServerProcess(path.parent, *flags, listen="0.0.0.0:0") as process:
        yield process.address.replace("0.0.0.0", "localhost")
        process.stop(60)
    log = process.log.read_text()
    assert "Traceback" not in log
    assert token not in log


def test_a_question_over_tls_with_a_token(served, authority, token):
    flags = ("--server", served, "--ca", authority.ca.cert)
    question = ("query", "what?", "--max-tokens", 2)
    assert kestrel(*question, *flags, KESTREL_TOKEN=token).returncode == 0
    assert here("health", *flags).stdout == "SERVING\n"
    refused = here(*question, *flags)
    assert refused.returncode == 1
    assert "needs a token" in refused.stderr
    assert "[UNAUTHENTICATED]" in refused.stderr
    urgent = here(*question, *flags, "--priority", "high", KESTREL_API_KEY=token)
    assert "camera lacks the scope high [PERMISSION_DENIED]" in urgent.stderr


def test_a_server_is_managed_by_who_may(served, authority, token, admin_token):
    flags = ("--server", served, "--ca", authority.ca.cert)

    def admin(*words, using=admin_token):
        return here("admin", *flags, *words, KESTREL_TOKEN=using)

    here("query", "what?", "--max-tokens", 2, *flags, KESTREL_TOKEN=token)
    told = admin("statistics").stdout.splitlines()
    assert any(re.fullmatch("calls: [1-9][0-9]*", line) for line in told)
    assert any(line.startswith("uptime_ms: ") for line in told)
    assert any(re.fullmatch("Query output_tokens: [1-9][0-9]*", line) for line in told)
    assert admin("cancel", "nobody").stdout == "0 requests cancelled\n"
    assert admin("flush", "--stored-images").stdout == "flushed; 0 stored images deleted\n"
    assert admin("log-level", "debug").stdout == "log level debug, previously info\n"
    told = admin("log-level", "error", "kestrel_engine.steps.loop")
    assert told.stdout == "log level error, previously none of its own\n"
    assert "module: no module of this name writes logs" in admin("log-level", "error", "no").stderr
    assert "without --profile-dir [FAILED_PRECONDITION]" in admin("profile").stderr
    assert "without --capture-dir [FAILED_PRECONDITION]" in admin("capture", "start").stderr
    assert admin("capture", "stop").stdout == "0 captured, 0 lost\n"
    assert "there is no adapter 'mine'" in admin("load-adapter", "mine").stderr
    assert admin("unload-adapter", "mine").stdout == "mine was not loaded\n"
    bad = (
        ("profile", "--steps", -1),
        ("profile", "--steps", 2**40),
        ("capture", "start", "--requests", 0),
    )
    for words in bad:
        refused = admin(*words)
        assert refused.returncode == 2 and "must be a whole number from 1 to" in refused.stderr
    assert "not valid UTF-8" in admin("cancel", "\udcff").stderr
    assert "lacks the scope admin [PERMISSION_DENIED]" in admin("drain", using=token).stderr
    assert admin("drain").stdout == "draining: 0 requests are running or waiting\n"
    health = here("health", "--server", served, "--ca", authority.ca.cert, "--wait", 0.5)
    assert health.stdout == "NOT_SERVING\n"


@pytest.mark.slow_with("cannot read the tokens absent", "TLS needs both --tls-cert and --tls-key")
@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--listen", "0.0.0.0:0"], 1, "refusing to listen on 0.0.0.0:0"),
        (["--tls-cert", "absent", "--tls-key", "absent"], 1, "cannot read the certificate absent"),
        (["--tls-key", "k"], 2, "TLS needs both --tls-cert and --tls-key"),
        (["--auth-tokens", "absent"], 1, "cannot read the tokens absent"),
        (["--metrics-listen", "0.0.0.0:0"], 1, "refusing to serve metrics on 0.0.0.0:0"),
    ],
)
def test_a_server_that_cannot_protect_itself_does_not_start(flags, status, words):
    # With more connections, a low limit on open files would be a second line.
    flags = ["--max-connections", "100", *flags]
    done = kestrel("serve", *flags)
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    printed = here("serve", *flags, "--print-config")
    assert (printed.returncode, printed.stderr, printed.stdout) == (status, done.stderr, "")
