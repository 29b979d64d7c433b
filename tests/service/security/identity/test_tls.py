"""TLS on real sockets, with the SDK as the client: trust, client certificates, renewal, exposure."""

import asyncio
import logging
import shutil
import ssl

import pytest

from kestrel_client import AsyncKestrelClient, Tls, UnavailableError
from kestrel_grpc.security.identity.tls import server_credentials
from kestrel_grpc.security.identity.tls_files import TlsError
from kestrel_grpc.security.listening import is_loopback
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.certificates import Pair


def security(pair, client_ca=None, **fields):
    return {"security": SecurityConfig(tls=pair.tls(client_ca=client_ca), **fields)}


async def served_name(address):
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(shown)


async def test_the_sdk_talks_tls(serve, authority, server_pair):
    served = await serve(server_config=security(server_pair))
    address = served.server.addresses[0]
    tls = Tls(root_certificates=authority.ca.cert)
    async with AsyncKestrelClient(address, tls=tls, timeout=60) as client:
        assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2
    async with AsyncKestrelClient(address, timeout=60) as plain:
        with pytest.raises(UnavailableError):
            await plain.query(None, "?", max_tokens=2)


async def test_a_unix_socket_stays_plain(serve, server_pair, tmp_path):
    address = f"unix:{tmp_path}/s"
    await serve(listen=address, server_config=security(server_pair))
    async with AsyncKestrelClient(address, timeout=60) as client:
        assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2


async def test_a_client_must_show_a_certificate_of_the_authority(serve, authority, server_pair):
    served = await serve(server_config=security(server_pair, authority.ca.cert))
    address = served.server.addresses[0]
    client_pair = authority.issue("camera 7", names="")
    known = Tls(
        root_certificates=authority.ca.cert,
        certificate=client_pair.cert,
        private_key=client_pair.key,
    )
    async with AsyncKestrelClient(address, tls=known, timeout=60) as client:
        assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2
    unknown = Tls(root_certificates=authority.ca.cert)
    async with AsyncKestrelClient(address, tls=unknown, timeout=60) as client:
        with pytest.raises(UnavailableError):
            await client.query(None, "?", max_tokens=2)


async def test_new_files_serve_new_connections_and_half_a_renewal_does_not(
    serve, authority, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "kestrel_grpc.security.identity.tls")
    old, new = authority.issue("old"), authority.issue("new")
    files = type(old)(tmp_path / "cert.pem", tmp_path / "key.pem")
    shutil.copy(old.cert, files.cert)
    shutil.copy(old.key, files.key)
    served = await serve(server_config=security(files))
    address = served.server.addresses[0]
    tls = Tls(root_certificates=authority.ca.cert)
    async with AsyncKestrelClient(address, tls=tls, timeout=60) as client:
        await client.query(None, "?", max_tokens=2)
        assert await served_name(address) == old.cert.read_text()
        shutil.copy(new.cert, files.cert)  # The key is still the old one.
        assert await served_name(address) == old.cert.read_text()
        assert await served_name(address) == old.cert.read_text()
        assert sum("keeping the old certificate" in r.message for r in caplog.records) == 1
        shutil.copy(new.key, files.key)
        assert await served_name(address) == new.cert.read_text()
        files.cert.unlink()
        assert await served_name(address) == new.cert.read_text()
        await client.query(None, "?", max_tokens=2)  # The old connection goes on.


def test_what_cannot_be_used_is_named(authority, server_pair, tmp_path):
    other = authority.issue("other")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_text(
        server_pair.key.read_text().replace("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE")
    )
    for cert, key, ca, words in (
        (server_pair.cert, other.key, None, "key values mismatch"),
        (server_pair.cert, tmp_path / "absent", None, "absent: No such file"),
        (rubbish, server_pair.key, None, "rubbish.pem"),
        (server_pair.cert, encrypted, None, "encrypted.key"),
        (server_pair.cert, server_pair.key, rubbish, "client CA"),
    ):
        with pytest.raises(TlsError, match=words) as caught:
            server_credentials(Pair(cert, key).tls(client_ca=ca))
        assert "\n" not in str(caught.value)


def test_what_is_loopback():
    for address in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a"):
        assert is_loopback(address) is True, address
    for address in ("0.0.0.0:1", "[::]:1", "192.168.1.1:1", "example.org:1"):
        assert is_loopback(address) is False, address


async def test_it_does_not_listen_beyond_loopback_unprotected(serve, authority, server_pair):
    with pytest.raises(AddressError, match=r"0\.0\.0\.0:0.*without TLS.*and credentials"):
        await serve(listen="0.0.0.0:0", load=False)
    with pytest.raises(AddressError, match="without credentials"):
        await serve(listen="0.0.0.0:0", load=False, server_config=security(server_pair))
    await serve(
        listen="0.0.0.0:0", server_config={"security": SecurityConfig(insecure_listen=True)}
    )
    await serve(listen="0.0.0.0:0", server_config=security(server_pair, authority.ca.cert))
