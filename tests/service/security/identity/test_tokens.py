"""Tokens and their file, and over the wire: the scopes of callers, and the owners of images."""

import hmac
import logging

import grpc
import pytest

from kestrel_client import AsyncKestrelClient, PermissionDeniedError, Tls, UnauthenticatedError
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.cli.program import main
from kestrel_grpc.security.files import exposures
from kestrel_grpc.security.identity import callers
from kestrel_grpc.security.identity.principal import ALL_SCOPES, Principal, Scope, needed_scopes
from kestrel_grpc.security.identity.tokens import (
    TokenFileError,
    digest_of,
    line_of,
    new_token,
    read_credentials,
)
from kestrel_grpc.settings.security import SecurityConfig, TlsFiles
from tests.service.conftest import raw_image
from tests.service.statuses import failure, read


def query(image=None, **options):
    return pb.QueryRequest(
        images=[] if image is None else [image],
        query=pb.QueryTask(
            question="what?", max_tokens=2, sampling=common_pb2.Sampling(temperature=0)
        ),
        options=common_pb2.RequestOptions(**options),
    )


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


class TokenFile:
    """``add`` makes a token, writes its line and returns it."""

    def __init__(self, path):
        self.path = path
        path.write_text("# names, scopes, hashes\n\n")

    def add(self, name, *scopes):
        token = new_token()
        with self.path.open("a") as file:
            file.write(f"{line_of(name, scopes or (Scope.INFER,), token)}\n")
        return token

    def config(self, **fields):
        return {"security": SecurityConfig(auth_tokens=str(self.path), **fields)}


@pytest.fixture
def tokens(tmp_path):
    return TokenFile(tmp_path / "tokens")


def test_the_file_says_whose_tokens_are_which(tokens):
    one, two, old = tokens.add("a"), tokens.add("b", *Scope), tokens.add("a", Scope.METRICS)
    with tokens.path.open("a") as file:
        file.write("c infer,high cert:spiffe://site/camera 7\n")
    known = read_credentials(str(tokens.path))
    assert known.of_token(one) == Principal("a", frozenset({Scope.INFER}))
    assert known.of_token(two) == Principal("b", ALL_SCOPES)
    assert known.of_token(old) == Principal("a", frozenset({Scope.METRICS}))
    assert known.by_identity["spiffe://site/camera 7"].name == "c"
    for unknown in ("", new_token(), one[:-1], one + "x", digest_of(one).hex()):
        assert known.of_token(unknown) is None
    assert one not in tokens.path.read_text()


def test_tokens_are_long_and_never_the_same():
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(len(token) == 47 and token.startswith("kst_") for token in made)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a infer", "line 2: a line is NAME SCOPES"),
        ("a infer kst_secret", "line 2: the third part must be sha256:"),
        ("a infer cert:", "line 2: cert: needs the name in the certificate"),
        ("a infer sha256:12", "64 hexadecimal digits"),
        ("a rule sha256:" + 64 * "0", "scopes are infer, high, metrics, admin"),
        ("ä infer sha256:" + 64 * "0", "a name must have 1 to 128"),
        (
            "a infer sha256:" + 64 * "0" + "\nb infer sha256:" + 64 * "0",
            "line 3: an earlier line has the same token",
        ),
        ("a infer cert:x\nb infer cert:x", "line 3: an earlier line has the certificate 'x'"),
        ("a infer weight=0 cert:x", "line 2: weight=0: a weight is a number from 0.01 to 100"),
        ("a infer weight=nan cert:x", "line 2: weight=nan: a weight is"),
        ("a infer weight=much cert:x", "line 2: weight=much: a weight is"),
        ("a infer weight=2", "line 2: the third part must be"),
        ("a infer weight=2 cert:x\na infer cert:y", "line 3: a has weight=2 on an earlier line"),
    ],
)
def test_a_bad_line_is_named_and_not_told(tmp_path, line, words):
    path = tmp_path / "tokens"
    path.write_text(f"# tokens\n{line}\n", encoding="utf-8")
    with pytest.raises(TokenFileError) as caught:
        read_credentials(str(path))
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TokenFileError, match="absent: No such file"):
        read_credentials(str(tmp_path / "absent"))


@pytest.mark.parametrize("key", ["short", "with a space in it, long enough", "ä" * 20])
def test_a_weak_key_is_refused(key):
    with pytest.raises(TokenFileError, match="KESTREL_API_KEY: must have at least 16"):
        callers.Callers(SecurityConfig(api_key=key))


def test_the_command_makes_a_token_and_its_line(tmp_path, capsys):
    assert main(["token", "camera", "--scopes", "admin,infer"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    assert line == line_of("camera", [Scope.INFER, Scope.ADMIN], token)
    path = tmp_path / "tokens"
    for name in ("a", "b"):
        assert main(["token", name, "--append", str(path)]) == 0
        (token,) = capsys.readouterr().out.splitlines()
        found = read_credentials(str(path)).of_token(token)
        assert found == Principal(name, frozenset({Scope.INFER}))
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["token", "a", "--scopes", "all"]) == 2
    assert main(["token", "a b"]) == 2
    assert main(["token", "a", "--append", str(tmp_path / "no" / "such")]) == 1


async def test_without_a_token_nothing_but_health_and_reflection_answers(serve, tokens):
    token = tokens.add("a")
    served = await serve(server_config=tokens.config())
    for metadata, reason in (
        ((), "CREDENTIALS_MISSING"),
        (bearer(new_token()), "CREDENTIALS_INVALID"),
        ((("authorization", f"Basic {token}"),), "CREDENTIALS_INVALID"),
        ((("authorization", "Bearer "),), "CREDENTIALS_INVALID"),
        (bearer(token) * 2, "CREDENTIALS_INVALID"),
        ((("authorization", token),), "CREDENTIALS_INVALID"),
    ):
        told = await failure(served.vision.Query(query(), metadata=metadata))
        assert (told.code, told.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        assert told.domain == "kestrel.internal"
        assert told.request_id
        assert token not in told.message
    told = await failure(served.vision.StreamQuery(query()))
    assert told.code is grpc.StatusCode.UNAUTHENTICATED
    told = await failure(served.images.UploadImage(iter(())))
    assert told.code is grpc.StatusCode.UNAUTHENTICATED
    response = await served.vision.Query(query(), metadata=bearer(token))
    assert response.usage.output_tokens == 2
    assert await answers(served, HEALTH)
    assert await answers(served, REFLECTION)


HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


async def answers(served, method, metadata=()):
    """Whether a call of health or reflection isn't refused for want of credentials."""
    try:
        if method == HEALTH:
            await served.channel.unary_unary(method)(b"", metadata=metadata)
        else:
            await served.send(method, [b""], metadata=metadata)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert read(error).reason == "CREDENTIALS_MISSING"
        return False
    return True


async def test_health_and_reflection_can_be_closed(serve, tokens):
    token = tokens.add("a", Scope.METRICS)
    served = await serve(server_config=tokens.config(open_services=()))
    for method in (HEALTH, REFLECTION):
        assert not await answers(served, method)
        assert await answers(served, method, bearer(token))


async def test_a_scope_that_is_missing_is_named(serve, tokens):
    metrics, infer = tokens.add("a", Scope.METRICS), tokens.add("b")
    high = tokens.add("c", Scope.INFER, Scope.HIGH)
    served = await serve(server_config=tokens.config())
    told = await failure(served.vision.Query(query(), metadata=bearer(metrics)))
    assert (told.code, told.reason) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")
    assert told.message == "a lacks the scope infer"
    urgent = query(priority=common_pb2.PRIORITY_HIGH)
    told = await failure(served.vision.Query(urgent, metadata=bearer(infer)))
    assert told.message == "b lacks the scope high"
    told = await failure(served.vision.StreamQuery(urgent, metadata=bearer(infer)))
    assert told.code is grpc.StatusCode.PERMISSION_DENIED
    assert (await served.vision.Query(urgent, metadata=bearer(high))).answers[0].text


def test_every_method_has_its_scopes():
    assert needed_scopes("/kestrel.v1.VisionService/Query") == (Scope.INFER,)
    assert needed_scopes("/kestrel.v1.AdminService/Drain") == (Scope.ADMIN,)
    assert Scope.METRICS in needed_scopes("/kestrel.v1.AdminService/GetStatistics")


async def test_images_and_prefixes_belong_to_their_principal(serve, tokens):
    a, b = tokens.add("a"), tokens.add("b")
    served = await serve(server_config=tokens.config())

    async def ask(token, image=None, **options):
        request = query(image or raw_image(), **options)
        return await served.vision.Query(request, metadata=bearer(token))

    first = await ask(a)
    assert first.usage.cached_tokens == 0
    assert (await ask(a)).usage.cached_tokens > 80
    assert (await ask(b)).usage.cached_tokens == 0, "b can't tell what a asked"
    assert (await ask(b)).usage.cached_tokens > 80
    assert (await ask(a, cache_salt="x")).usage.cached_tokens == 0
    kept = common_pb2.Image(image_id=first.info.images[0].image_id)
    assert (await ask(a, kept)).info.images[0].image_id == kept.image_id
    told = await failure(ask(b, kept))
    assert told.reason == "IMAGE_NOT_FOUND"
    delete = image_service_pb2.DeleteImageRequest(image_id=first.info.images[0].image_id)
    assert not (await served.images.DeleteImage(delete, metadata=bearer(b))).existed
    assert (await served.images.DeleteImage(delete, metadata=bearer(a))).existed


def test_namespaces_of_principals_and_salts_never_meet():
    names, salts = ("", "a", "a1", "1:a"), ("", "a", "1:a", "1:aa", "2:a1")
    pairs = [(name, salt) for name in names if name for salt in salts]
    spaces = {Principal(name, ALL_SCOPES).namespace(salt) for name, salt in pairs}
    assert len(spaces) == len(pairs)
    assert Principal("", ALL_SCOPES).namespace("s") == "s"


async def test_new_tokens_hold_without_a_restart_and_deleted_ones_end(serve, tokens, monkeypatch):
    monkeypatch.setattr(callers, "_CHECK_EVERY_S", 0.0)
    old = tokens.add("a")
    served = await serve(server_config=tokens.config())
    await served.vision.Query(query(), metadata=bearer(old))
    new = tokens.add("b")
    await served.vision.Query(query(), metadata=bearer(new))
    tokens.path.write_text(tokens.path.read_text() + "rubbish\n")
    await served.vision.Query(query(), metadata=bearer(old))
    tokens.path.write_text("")
    told = await failure(served.vision.Query(query(), metadata=bearer(old)))
    assert told.reason == "CREDENTIALS_INVALID"


async def test_one_key_does_everything(serve):
    key = "a-key-of-some-length"
    served = await serve(server_config={"security": SecurityConfig(api_key=key)})
    urgent = query(priority=common_pb2.PRIORITY_HIGH)
    assert (await served.vision.Query(urgent, metadata=bearer(key))).usage.output_tokens == 2
    assert key not in repr(served.server._config)


async def test_the_sdk_sends_its_token(serve, tokens, authority, server_pair):
    token = tokens.add("a")
    served = await serve(listen="0.0.0.0:0", server_config=tokens.config(tls=server_pair.tls()))
    address = served.server.addresses[0].replace("0.0.0.0", "localhost")
    trusted = Tls(root_certificates=authority.ca.cert)
    async with AsyncKestrelClient(address, tls=trusted, token=token, timeout=60) as client:
        assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2
        with pytest.raises(PermissionDeniedError, match="a lacks the scope high"):
            await client.query(None, "?", max_tokens=2, priority="high")
    async with AsyncKestrelClient(address, tls=trusted, timeout=60) as client:
        await client.wait_ready(5)
        with pytest.raises(UnauthenticatedError, match="needs a token"):
            await client.query(None, "?", max_tokens=2)


async def test_a_certificate_says_who_calls(
    serve, tokens, authority, server_pair, caplog, monkeypatch
):
    monkeypatch.setattr(callers, "_CHECK_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    with tokens.path.open("a") as file:
        file.write("seven infer cert:camera 7\nspiffe infer,high cert:spiffe://site/gate\n")
    tls = server_pair.tls(client_ca=authority.ca.cert)
    seven, stranger = authority.issue("camera 7", names=""), authority.issue("camera 8", names="")
    gate = authority.issue("whatever", names="URI:spiffe://site/gate")

    async def priority_high(served, pair):
        trusted = Tls(
            root_certificates=authority.ca.cert, certificate=pair.cert, private_key=pair.key
        )
        address = served.server.addresses[0]
        async with AsyncKestrelClient(address, tls=trusted, timeout=60) as client:
            await client.query(None, "?", max_tokens=2, priority="high")

    served = await serve(server_config=tokens.config(tls=tls))
    with pytest.raises(PermissionDeniedError, match="seven lacks the scope high"):
        await priority_high(served, seven)
    with pytest.raises(UnauthenticatedError, match="'camera 8' is not in the file of tokens"):
        await priority_high(served, stranger)
    await priority_high(served, gate)
    trusted = Tls(root_certificates=authority.ca.cert, certificate=gate.cert, private_key=gate.key)
    async with AsyncKestrelClient(served.server.addresses[0], tls=trusted, timeout=60) as client:
        await client.query(None, "?", max_tokens=2)
        lines = tokens.path.read_text().splitlines(keepends=True)
        tokens.path.write_text("".join(line for line in lines if "site/gate" not in line))
        with pytest.raises(UnauthenticatedError, match="is not in the file of tokens"):
            await client.query(None, "?", max_tokens=2)
    alone = await serve(server_config={"security": SecurityConfig(tls=tls), "access_log": "text"})
    await priority_high(alone, stranger)
    assert 'principal="cert:camera 8"' in caplog.messages[-1]


def test_looking_a_token_up_takes_the_same_work_for_all(tokens, monkeypatch):
    """No early end: neither where a hash first differs, nor for how many there are."""
    known_ones = [tokens.add(f"n{i}") for i in range(50)]
    known = read_credentials(str(tokens.path))
    compared = []
    compare = hmac.compare_digest

    def noted(one, other):
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for token in (known_ones[0], known_ones[-1], new_token()):
        known.of_token(token)
    assert compared == 3 * [(32, 32)], "one comparison in constant time for each"


def test_a_file_that_everyone_may_write_is_refused(tokens):
    tokens.add("a")
    tokens.path.chmod(0o602)
    with pytest.raises(TokenFileError, match="every user of this machine may write"):
        read_credentials(str(tokens.path))


async def test_a_file_that_everyone_may_read_is_warned_of(serve, tokens, tmp_path, caplog):
    tokens.add("a")
    tokens.path.chmod(0o604)
    await serve(server_config=tokens.config())
    assert (
        f"may read {tokens.path} and so learn the principals and their scopes: chmod o-r"
        in caplog.text
    )
    caplog.clear()
    tokens.path.chmod(0o640)
    await serve(server_config=tokens.config())
    assert "chmod o-r" not in caplog.text
    (key := tmp_path / "key.pem").write_text("")
    key.chmod(0o644)
    files = TlsFiles(certificate=str(tmp_path / "cert.pem"), private_key=str(key))
    (warning,) = exposures(SecurityConfig(auth_tokens=str(tokens.path), tls=files))
    assert f"may read the private key {key}" in warning
