"""What a worker makes of the front's headers. tests/abuse/processes/test_front.py has the front itself."""

from urllib.parse import quote

import pytest

from kestrel_grpc.security.identity.callers import identity_of
from kestrel_grpc.security.identity.certificates import certificate_of, peer_of
from kestrel_grpc.security.identity.front_headers import CERTIFICATE_HEADER, is_of_front
from kestrel_grpc.security.identity.principal import address_of


@pytest.mark.parametrize(
    ("given", "address"), [("127.0.0.1:50000", "127.0.0.1"), ("[2001:db8::1]:7", "2001:db8::/64")]
)
def test_an_address_is_that_of_a_connection(given, address):
    assert address_of(peer_of(given)) == address


def test_callers_cannot_write_the_fronts_headers():
    ours = ("x-kestrel-peer", "x-forwarded-client-cert", "x-forwarded-for", "x-envoy-retry-on")
    assert all(map(is_of_front, ours))
    assert not any(map(is_of_front, ("x-kestrel-image", "x-request-id", "traceparent")))


def test_a_certificate_has_the_names_that_grpc_would_give(authority):
    pair = authority.issue("robot", names="DNS:a.example,URI:spiffe://d/robot")
    own, ca = pair.cert.read_text(), authority.ca.cert.read_text()
    header = f'Hash=ab;Chain="{quote(own + ca)}"'
    found = certificate_of({CERTIFICATE_HEADER: header})
    assert identity_of(found) == "spiffe://d/robot"
    assert found["x509_common_name"] == [b"robot"]
    assert found["x509_subject_alternative_name"] == [b"a.example", b"spiffe://d/robot"]
    assert certificate_of({}) == {}
