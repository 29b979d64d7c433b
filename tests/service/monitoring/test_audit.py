"""The audit log: one record for each administrative call, whatever it holds, and refusals while there can be none."""

import json
import logging
import os
import stat

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_engine import ConfigError
from kestrel_grpc.logs import appending
from kestrel_grpc.monitoring import audit as audit_room
from kestrel_grpc.monitoring.audit import AuditLog
from kestrel_grpc.security.identity.principal import Scope, is_administrative
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.service_names import ADMIN_METHODS
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.security.test_admin import Admin
from tests.service.statuses import failure, read

METHODS = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["AdminService"].methods
    if is_administrative(ADMIN_METHODS + method.name)
]
FIELDS = {
    "SetLogLevel": {"level": pb.LOG_LEVEL_ERROR, "module": "kestrel_engine.steps.loop"},
    "CancelRequest": {"request_id": "an-id"},
}
HOSTILE = 'x\r\n{"status": "OK"}\x1b[2J\u2028\x7f\x85'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
async def administered(serve, tmp_path, path):
    """A server with an audit log, its administrator, and a caller with the scope infer."""
    tokens = {scope: new_token() for scope in (Scope.ADMIN, Scope.INFER)}
    file = tmp_path / "tokens"
    file.write_text("\n".join(line_of(f"{s}-1", [s], token) for s, token in tokens.items()))
    security = SecurityConfig(auth_tokens=str(file))
    served = await serve(server_config={"security": security, "audit_log": str(path)})
    return served, *(Admin(served, (("authorization", f"Bearer {t}"),)) for t in tokens.values())


async def records(served, path):
    """A refused call is recorded when its status is sent."""
    assert await served.server.in_flight.wait_idle(60)
    return [json.loads(line) for line in path.read_text().splitlines()]


async def outcome(called):
    try:
        await called
        return "OK", ""
    except grpc.aio.AioRpcError as error:
        told = read(error)
        return told.code.name, told.reason


async def test_every_administrative_call_has_one_record_which_no_log_level_silences(
    administered, path
):
    served, admin, other = administered
    root, module = logging.getLogger(), logging.getLogger("kestrel_engine.steps.loop")
    levels = root.level, module.level
    try:
        root.setLevel(logging.CRITICAL + 1)
        ends = {
            name: await outcome(getattr(admin, name)(**FIELDS.get(name, {})))
            for name in sorted(METHODS, key="Drain".__eq__)
        }
    finally:
        root.setLevel(levels[0])
        module.setLevel(levels[1])
    await admin.GetStatistics()
    found = await records(served, path)
    by_name = {r["method"].rpartition("/")[2]: r for r in found}
    assert len(found) == len(METHODS)
    assert {n: (r["status"], r.get("reason", "")) for n, r in by_name.items()} == ends
    for record in found:
        assert record["principal"] == "admin-1" and record["peer"].startswith("ipv")
        assert record["request_id"] and record["time"].endswith("Z")
        assert record["after"] or record["status"] != "OK", record
    level = by_name["SetLogLevel"]
    assert level["request"] == {"level": "LOG_LEVEL_ERROR", "module": "kestrel_engine.steps.loop"}
    assert level["after"] == {"level": "LOG_LEVEL_ERROR"}
    drain = by_name["Drain"]
    assert (drain["before"], drain["after"]) == ({"state": "ready"}, {"state": "draining"})
    told = await failure(other.FlushCaches())
    last = (await records(served, path))[-1]
    assert (last["principal"], last["status"]) == ("infer-1", told.code.name)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_texts_of_callers_end_no_line_and_make_no_long_record(administered, path):
    served, admin, _ = administered
    for text in (HOSTILE, HOSTILE * 100, "\u2028" * 100_000, "https://user:secret@host/x"):
        await failure(admin.UnloadModel(model=text))
        settings = {f"{i}{text[:100]}": text for i in range(60)}
        await failure(admin.LoadModel(source=text, settings=settings))
    await records(served, path)
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b"" and len(lines) == 8
    for line in lines:
        record = json.loads(line)
        assert (record["principal"], bool(record["status"])) == ("admin-1", True)
        assert len(line) < 4096 and all(0x20 <= byte < 0x7F for byte in line)
        assert b"secret" not in line


async def test_while_records_cannot_be_written_administrators_are_refused(
    administered, path, monkeypatch, caplog
):
    served, admin, _ = administered
    real = appending.append
    monkeypatch.setattr(appending, "append", lambda path, line: real(path, line[:10]))
    await admin.FlushCaches()
    assert served.server.records.audit.waiting == 1
    assert "kestrel.v1.AdminService/FlushCaches" in caplog.text
    told = await failure(admin.CancelRequest(request_id="x"))
    assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "AUDIT_UNAVAILABLE")
    assert await admin.GetStatistics()
    assert await served.server.in_flight.wait_idle(60)
    monkeypatch.setattr(appending, "append", real)
    await admin.CancelRequest(request_id="y")
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    ends = [(json.loads(line)["status"]) for line in whole]
    assert ends == ["OK", "FAILED_PRECONDITION", "OK"]


async def test_a_file_that_was_moved_away_is_made_again(administered, path):
    served, admin, _ = administered
    await admin.FlushCaches()
    path.rename(path.with_suffix(".1"))
    await admin.FlushCaches()
    for file in (path, path.with_suffix(".1")):
        assert len(await records(served, file)) == 1
    path.unlink()
    path.symlink_to(path.with_suffix(".1"))
    told = await failure(admin.FlushCaches())
    assert told.reason == "AUDIT_UNAVAILABLE" and "link" in told.message


def _link(path):
    path.with_suffix(".real").touch()
    path.symlink_to(path.with_suffix(".real"))


def _writable(path):
    path.touch()
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_link, "link"),
        (os.mkfifo, "regular"),
        (os.mkdir, "directory"),
        (_writable, "every user"),
        (lambda path: os.chmod(path.parent / "x", 0), "Not a directory"),
    ],
)
def test_a_file_that_is_not_the_operators_own_is_refused(tmp_path, make, why):
    path = tmp_path / "x"
    if why == "Not a directory":
        path.touch()
        make(path)
        path = path / "audit"
    else:
        make(path)
    with pytest.raises(ConfigError, match=f"audit_log.*{why}"):
        AuditLog(str(path))


async def test_strangers_cannot_fill_the_disk(moved_clock, administered, path):
    served, admin, other = administered
    stranger = Admin(served, ())
    for _ in range(audit_room.ATTEMPTS + 5):
        await failure(stranger.Drain())
    await admin.FlushCaches()
    assert len(await records(served, path)) == audit_room.ATTEMPTS + 1
    moved_clock.advance(61)
    await failure(other.Drain())
    assert (await records(served, path))[-1]["unrecorded"] == 5
