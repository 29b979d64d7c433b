"""Profiles over the wire: refused unless the operator gave a folder, bounded, and reported."""

import gzip
import json
import stat

import grpc

from kestrel_grpc.settings.debug import DebugConfig
from tests.service.conftest import EndlessRuntime
from tests.service.security.test_admin import CONFIG, METADATA, Admin, query
from tests.service.statuses import failure


def config(tmp_path, **bounds):
    return {**CONFIG, "debug": DebugConfig(profile_dir=str(tmp_path), **bounds)}


async def test_refused_without_a_folder_a_model_or_a_start(serve, tmp_path):
    admin = Admin(await serve(server_config=CONFIG))
    told = await failure(admin.StartProfile())
    assert told.code is grpc.StatusCode.FAILED_PRECONDITION
    assert told.reason == "PROFILE_UNAVAILABLE"
    assert told.message == "the server was started without --profile-dir"
    assert (await failure(admin.StopProfile())).message == "no profile was started"
    admin = Admin(await serve(load=False, server_config=config(tmp_path)))
    assert (await failure(admin.StartProfile())).message == "no model is ready"
    for field, value in (("duration_ms", 60_001), ("duration_ms", -1), ("steps", 0)):
        assert (await failure(admin.StartProfile(**{field: value}))).fields == [field]


async def test_it_records_steps_and_tells_of_its_file(serve, tmp_path):
    served = await serve(EndlessRuntime(), server_config=config(tmp_path))
    admin = Admin(served)
    started = await admin.StartProfile(duration_ms=60_000, steps=20)
    assert (await failure(admin.StartProfile())).message == "a profile is being recorded already"
    await served.vision.Query(query(max_tokens=60), metadata=METADATA)
    stopped = await admin.StopProfile()
    assert (stopped.file, stopped.steps) == (started.file, 20)
    assert (await admin.StopProfile()).file == started.file
    [path] = tmp_path.iterdir()
    assert (path.name, path.stat().st_size) == (started.file, stopped.size_bytes)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    again = await admin.StartProfile(duration_ms=100)
    assert again.file != started.file
    assert (await admin.StopProfile()).file == again.file


async def test_the_folder_has_a_bound(serve, tmp_path):
    (tmp_path / "old.trace.json.gz").write_bytes(bytes(100))
    admin = Admin(await serve(server_config=config(tmp_path, profile_max_bytes=100)))
    assert "is full" in (await failure(admin.StartProfile())).message
    admin = Admin(await serve(server_config=config(tmp_path, profile_max_bytes=110)))
    await admin.StartProfile()
    told = await failure(admin.StopProfile())
    assert told.reason == "PROFILE_UNAVAILABLE" and "the limit is 10" in told.message
    assert [path.name for path in tmp_path.iterdir()] == ["old.trace.json.gz"]


async def test_a_server_that_stops_writes_what_it_has(serve, tmp_path):
    served = await serve(server_config=config(tmp_path))
    started = await Admin(served).StartProfile(duration_ms=60_000)
    await served.server.stop(grace_s=0)
    assert [path.name for path in tmp_path.iterdir()] == [started.file]
