"""Security's flags and variables become a SecurityConfig; what is invalid is named in one line."""

import pytest

from kestrel_grpc.security.config import SecurityConfig, TlsFiles
from kestrel_grpc.security.flags import add_security_flags, security_config
from kestrel_grpc.settings import Parser, SettingsError


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-cert", "c"], "TLS needs both --tls-cert and --tls-key"),
        (["--tls-client-ca", "c"], "TLS needs both --tls-cert and --tls-key"),
    ],
)
def test_what_is_invalid_is_named(flags, words):
    with pytest.raises(SettingsError) as caught:
        config(*flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
