"""Revoked certificates are refused at once and everywhere; errors name the mistakes in a list."""

import logging
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kestrel_client import AsyncKestrelClient, Tls, UnauthenticatedError
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.admission.guard import Guard
from kestrel_grpc.security.identity import callers, revocation
from kestrel_grpc.security.identity.principal import CertificateRevoked
from kestrel_grpc.security.identity.revocation import RevocationLists
from kestrel_grpc.security.identity.tls_files import TlsError
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.certificates import make_authority
from tests.service.statuses import failure

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402

NOW = datetime.now(UTC)
YESTERDAY = NOW - timedelta(days=1)
QUERY = pb.QueryRequest(
    query=pb.QueryTask(question="what?", max_tokens=2, sampling={"temperature": 0})
)


@pytest.fixture(autouse=True)
def looks_every_time(monkeypatch):
    monkeypatch.setattr(revocation, "_CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(callers, "_CHECK_EVERY_S", 0.0)


def list_of(authority, *pairs, until=NOW + timedelta(days=1), extra=None, signer=None, reason=None):
    """A list of ``authority`` with the certificates of ``pairs``, PEM."""
    ca = x509.load_pem_x509_certificate(authority.ca.cert.read_bytes())
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject)
    builder = builder.last_update(NOW - timedelta(days=2)).next_update(until)
    for pair in pairs:
        shown = x509.load_pem_x509_certificate(pair.cert.read_bytes())
        entry = x509.RevokedCertificateBuilder().serial_number(shown.serial_number)
        entry = entry.revocation_date(YESTERDAY)
        if reason is not None:
            entry = entry.add_extension(x509.CRLReason(reason), critical=False)
        builder = builder.add_revoked_certificate(entry.build())
    if extra is not None:
        builder = builder.add_extension(extra, critical=True)
    key_file = (signer or authority).ca.key.read_bytes()
    key = serialization.load_pem_private_key(key_file, password=None)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def security(server_pair, authority, lists, **fields):
    tls = server_pair.tls(client_ca=authority.ca.cert, client_crl=lists)
    return {"security": SecurityConfig(tls=tls, **fields)}


def tls_of(authority, pair):
    return Tls(root_certificates=authority.ca.cert, certificate=pair.cert, private_key=pair.key)


def channel_of(address, authority, pair):
    credentials = grpc.ssl_channel_credentials(
        authority.ca.cert.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes()
    )
    return grpc.aio.secure_channel(address, credentials)


async def test_it_is_refused_by_a_connection_that_exists_as_soon_as_it_is_listed(
    serve, authority, server_pair, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "kestrel_grpc.security.identity.revocation")
    good, bad = authority.issue("good", names=""), authority.issue("bad", names="")
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority))
    served = await serve(server_config=security(server_pair, authority, lists))
    address = served.server.addresses[0]
    async with (
        AsyncKestrelClient(address, tls=tls_of(authority, good), timeout=60) as one,
        AsyncKestrelClient(address, tls=tls_of(authority, bad), timeout=60) as other,
    ):
        for client in (one, other):
            await client.query(None, "?", max_tokens=2)
        lists.write_bytes(list_of(authority, bad, reason=x509.ReasonFlags.key_compromise))
        with pytest.raises(UnauthenticatedError) as caught:
            await other.query(None, "?", max_tokens=2)
        assert caught.value.reason == "CERTIFICATE_REVOKED"
        serial = x509.load_pem_x509_certificate(bad.cert.read_bytes()).serial_number
        told = f"'CN=bad', serial {serial:X}, was revoked on {YESTERDAY:%Y-%m-%d} (keyCompromise)"
        assert told in str(caught.value)
        await one.query(None, "?", max_tokens=2)
        with pytest.raises(UnauthenticatedError):
            await other.delete_image("img_1")
        lists.write_bytes(b"rubbish")  # Half of a renewal: the old ones hold.
        with pytest.raises(UnauthenticatedError):
            await other.query(None, "?", max_tokens=2)
        assert "keeping the old revocation lists" in caplog.text
        lists.write_bytes(list_of(authority, good))
        await other.query(None, "?", max_tokens=2)
        with pytest.raises(UnauthenticatedError):
            await one.query(None, "?", max_tokens=2)


async def test_neither_a_token_nor_an_open_door_helps(serve, authority, server_pair, tmp_path):
    good, bad = authority.issue("good", names=""), authority.issue("bad", names="")
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority, bad))
    key = "a-key-of-an-administrator"
    config = security(server_pair, authority, lists, api_key=key)
    served = await serve(server_config=config)
    address = f"localhost:{served.server.addresses[0].rpartition(':')[2]}"
    metadata = (("authorization", f"Bearer {key}"),)
    check = health_pb2.HealthCheckRequest()
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    async with (
        channel_of(address, authority, good) as known,
        channel_of(address, authority, bad) as revoked,
    ):
        await VisionServiceStub(known).Query(QUERY, metadata=metadata)
        told = await failure(VisionServiceStub(revoked).Query(QUERY, metadata=metadata))
        assert (told.code, told.reason) == (grpc.StatusCode.UNAUTHENTICATED, "CERTIFICATE_REVOKED")
        health, reflection = health_pb2_grpc.HealthStub, reflection_pb2_grpc.ServerReflectionStub
        assert (await health(known).Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await anext(aiter(health(known).Watch(check)))).status == 1
        answers = [a async for a in reflection(known).ServerReflectionInfo(iter([listing]))]
        assert len(answers[0].list_services_response.service) > 4
        for call in (
            health(revoked).Check(check),
            health(revoked).Watch(check),
            reflection(revoked).ServerReflectionInfo(iter([listing])),
        ):
            told = await failure(call)
            assert told.reason == "CERTIFICATE_REVOKED"


def test_one_between_it_and_its_authority_counts_as_well(authority, tmp_path):
    between, leaf = authority.issue("between"), authority.issue("leaf")
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority, between))
    found = RevocationLists(str(lists), [str(authority.ca.cert)])
    found.check([leaf.cert.read_bytes()])
    chain = leaf.cert.read_bytes() + between.cert.read_bytes()
    for shown in ([leaf.cert.read_bytes(), between.cert.read_bytes()], [chain]):
        with pytest.raises(CertificateRevoked, match="'CN=between'"):
            found.check(shown)


def test_several_authorities_and_their_lists(authority, tmp_path):
    other = make_authority(tmp_path)
    ours, theirs = authority.issue("ours"), other.issue("theirs")
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority, ours) + b"\n" + list_of(other, theirs))
    found = RevocationLists(str(lists), [str(authority.ca.cert), str(other.ca.cert)])
    for pair in (ours, theirs):
        with pytest.raises(CertificateRevoked):
            found.check([pair.cert.read_bytes()])


def test_an_old_list_still_refuses_who_is_on_it_and_is_told_of_once(authority, tmp_path, caplog):
    listed, other = authority.issue("listed"), authority.issue("other")
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority, listed, until=YESTERDAY))
    found = RevocationLists(str(lists), [str(authority.ca.cert)])
    for _ in range(3):
        found.check([other.cert.read_bytes()])
        with pytest.raises(CertificateRevoked):
            found.check([listed.cert.read_bytes()])
    assert caplog.text.count("expired at") == 1


def test_an_authority_without_a_list_is_told_of(authority, tmp_path, caplog):
    folder = tmp_path / "other"
    folder.mkdir()
    other = make_authority(folder)
    both = tmp_path / "both.pem"
    # Another name: what has the same one can't be told apart by it.
    text = other.issue("second authority").cert.read_text()
    both.write_text(authority.ca.cert.read_text() + text)
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority))
    RevocationLists(str(lists), [str(both)])
    assert "has no list from 'CN=second authority'" in caplog.text


def test_lists_that_cannot_be_used_are_named(authority, tmp_path):
    other = make_authority(tmp_path)
    partial = x509.IssuingDistributionPoint(
        full_name=[x509.UniformResourceIdentifier("http://a/1")],
        relative_name=None,
        only_contains_user_certs=True,
        only_contains_ca_certs=False,
        only_some_reasons=None,
        indirect_crl=False,
        only_contains_attribute_certs=False,
    )
    path, ca = tmp_path / "crl.pem", str(authority.ca.cert)
    for contents, words in (
        (None, "crl.pem: No such file"),
        (b"rubbish", "has no list in PEM form"),
        (list_of(authority)[:-60] + b"\n-----END X509 CRL-----\n", "cannot be used"),
        (list_of(authority, signer=other), "no client CA has signed the list"),
        (list_of(authority, extra=partial), "is a partial list or an update"),
        (list_of(authority, extra=x509.DeltaCRLIndicator(1)), "or an update"),
    ):
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(TlsError, match=words) as caught:
            RevocationLists(str(path), [ca])
        assert "\n" not in str(caught.value) and "crl.pem" in str(caught.value)
    path.write_bytes(list_of(authority))
    with pytest.raises(TlsError, match="client CA"):
        RevocationLists(str(path), [str(path)])


def test_without_the_package_the_extra_is_named(authority, server_pair, tmp_path, monkeypatch):
    lists = tmp_path / "crl.pem"
    lists.write_bytes(list_of(authority))
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    config = security(server_pair, authority, lists)["security"]
    with pytest.raises(TlsError, match=r"'\.\[crl\]'"):
        Guard(config, 1000)
