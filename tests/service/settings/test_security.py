"""Security's flags and variables become a SecurityConfig; what is invalid is named in one line."""

import pytest

from kestrel_grpc.settings.flags import Parser, SettingsError
from kestrel_grpc.settings.security import (
    OPEN_SERVICES,
    CallLimits,
    ConnectionLimits,
    SecurityConfig,
    TlsFiles,
    add_security_flags,
    security_config,
)


def config(*flags, **environ):
    parser = Parser(prog="test")
    add_security_flags(parser, environ)
    return security_config(parser.parse_args(flags))


def test_without_flags_the_defaults_hold():
    assert config() == SecurityConfig()


def test_flags_and_variables_reach_their_fields():
    tls = TlsFiles(certificate="c", private_key="k", client_ca="a")
    told = config("--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--insecure-listen")
    assert (told.tls, told.insecure_listen) == (tls, True)
    environ = {"KESTREL_TLS_CERT": "c", "KESTREL_TLS_KEY": "k", "KESTREL_TLS_CLIENT_CA": "a"}
    assert config(**environ, KESTREL_INSECURE_LISTEN="on") == told
    assert not config("--insecure-listen=off", KESTREL_INSECURE_LISTEN="on").insecure_listen


def test_scrapers_certificates():
    pair = ("--tls-cert", "c", "--tls-key", "k")
    told = config(*pair, "--metrics-tls", "m")
    assert told.metrics_client_ca == "m" and not told.knows_callers
    assert told.tls == TlsFiles(certificate="c", private_key="k")
    assert config(*pair, KESTREL_METRICS_TLS="m").metrics_client_ca == "m"
    for flags, words in (
        (("--metrics-tls", "onn"), "--metrics-tls .'onn' is neither on nor off, .*TLS needs both"),
        (("--open", "none,health"), "--open=none,health: none must be the only value"),
    ):
        with pytest.raises(SettingsError, match=words):
            config(*flags)


def test_callers_and_their_limits():
    told = config(
        *("--auth-tokens", "t", "--open", "metrics", "--metrics-tls", "false"),
        *("--max-calls", "1", "--max-held-bytes", "2KiB", "--rate", "1.5"),
        *("--max-deadline", "4", "--write-timeout", "5"),
        *("--max-connection-age", "7"),
        KESTREL_API_KEY="k" * 20,
    )
    assert (told.auth_tokens, told.api_key) == ("t", "k" * 20)
    assert (told.open_services, told.metrics_tls) == (("metrics",), "off")
    assert [config().is_open(what) for what in OPEN_SERVICES] == [True, True, False]
    assert not any(map(config("--open", "none").is_open, OPEN_SERVICES))
    assert told.calls == CallLimits(calls=1, held_bytes=2048, rate=1.5, deadline_s=4, write_s=5)
    assert told.connections == ConnectionLimits(age_s=7)
    off = ("--max-calls", "--max-held-bytes", "--rate", "--max-deadline", "--write-timeout")
    told = config(*(word for flag in off for word in (flag, "0")), "--max-connection-age=0")
    assert told.calls == CallLimits(
        calls=None, held_bytes=None, rate=None, deadline_s=None, write_s=None
    )
    assert told.connections.age_s is None


def test_an_aged_connection_lets_the_longest_call_end():
    assert config().age_grace_s == 130
    assert config("--max-deadline", "600").age_grace_s == 610
    assert config("--max-deadline", "0").age_grace_s is None


def test_the_key_has_no_flag_that_others_could_see():
    with pytest.raises(SystemExit):
        config("--api-key", "k" * 20)
    assert config(KESTREL_API_KEY="").api_key is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "1000001"], "--rate=1000001.0: must be a finite number from 0 to 1000000"),
        (["--max-calls", "-1"], "--max-calls=-1: must be a whole number from 0 to"),
        (["--tls-cert", "c"], "TLS needs both --tls-cert and --tls-key"),
        (["--tls-client-ca", "c"], "TLS needs both --tls-cert and --tls-key"),
    ],
)
def test_what_is_invalid_is_named(flags, words):
    with pytest.raises(SettingsError) as caught:
        config(*flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
