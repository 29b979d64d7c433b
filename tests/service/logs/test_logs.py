"""Logs: their two forms, the ids of calls, levels by module, events of the server, and secrets that they never hold."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import grpc
import numpy as np
import pytest
import pyvips

from kestrel_client import CaptionTask, KestrelClient, UnauthenticatedError
from kestrel_client._pb.kestrel.v1 import admin_service_pb2, admin_service_pb2_grpc
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import ModelLoadError
from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.edge.calls.current import current
from kestrel_grpc.logs.records import JsonFormatter, TextFormatter, set_up_logging, structured
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.logs import log_levels
from kestrel_grpc.settings.server import ServerConfig
from tests.fake_runtime import FakeRuntime
from tests.forking.process import ForkedProcess
from tests.service.conftest import LIMITS
from tests.service.statuses import failure
from tests.tiny import VARIABLES

ROOT = Path(__file__).parents[3]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SECRETS = {
    "key": "key-that-must-not-be-logged",
    "wrong": "wrong-token-that-must-not-be-logged",
    "cookie": "cookie-that-must-not-be-logged",
    "x-api-key": "header-that-must-not-be-logged",
    "question": "question-that-must-not-be-logged",
}


@pytest.fixture
def logs():
    """Sets logging up as the server does; what is written comes back, and all is as before in the end."""
    root, names = (
        logging.getLogger(),
        ("", "pyvips", "httpx", "httpx2", "kestrel_engine.steps.loop", "kestrel_grpc.access"),
    )
    before = root.handlers[:], {name: logging.getLogger(name).level for name in names}
    stream = io.StringIO()
    yield lambda levels, format: set_up_logging(levels, format, stream) or stream
    root.handlers[:] = before[0]
    for name, level in before[1].items():
        logging.getLogger(name).setLevel(level)


def entries(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_addresses_of_the_hubs_files_are_not_logged(logs):
    stream = logs("debug", "text")
    for transport in ("httpx", "httpx2"):
        logging.getLogger(transport).info("HTTP Request: GET https://files/x?signature=secret")
    assert "secret" not in stream.getvalue()
    logs("debug,httpx=info", "text")  # An operator may ask for them.
    assert logging.getLogger("httpx").isEnabledFor(logging.INFO)


FORGED = "a\nroot: \x1b[2Jb\r\u2028c\x85d"


def test_a_callers_text_ends_no_line(logs):
    stream = logs("info", "text")
    logger = logging.getLogger("kestrel_grpc.admin")
    logger.info("load model %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, second, *trace = stream.getvalue().splitlines()
    assert first.endswith(r"load model a\nroot: \x1b[2Jb\r\u2028c\x85d") and second.endswith(
        "failed"
    )
    assert trace[-1].startswith("    ") and all(line.startswith("    ") for line in trace)


def test_a_callers_text_ends_no_json_line(logs):
    stream = logs("info", "json")
    logging.getLogger("kestrel_grpc.admin").info("load model %s", FORGED)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == f"load model {FORGED}"


def test_levels_are_read_by_module():
    assert log_levels("info") == {"": "info"}
    assert log_levels("Warning, a.b=DEBUG,c=error") == {"": "warning", "a.b": "debug", "c": "error"}
    assert log_levels("a.b=debug") == {"": "info", "a.b": "debug"}
    for wrong in ("", "loud", "a=loud", "a=", "=info", "a..b=info", "info,debug", "a=info,a=info"):
        with pytest.raises(ValueError):
            log_levels(wrong)


def test_a_module_has_its_own_level(logs):
    stream = logs("warning,kestrel_engine.steps.loop=debug", "json")
    logging.getLogger("kestrel_engine.steps.loop").debug("heard")
    logging.getLogger("kestrel_engine.engine").info("not heard")
    logging.getLogger("pyvips.voperation").info("not heard")
    assert [entry["message"] for entry in entries(stream)] == ["heard"]


def record(message, *args, **extra):
    return logging.getLogger("a.b").makeRecord(
        "a.b", logging.WARNING, __file__, 1, message, args, extra.pop("exc_info", None), extra=extra
    )


def test_both_forms_of_a_record_within_a_call():
    call = Call(method="/x", peer="", context=None, request_id="r-1")
    call.trace_id = TRACE_ID
    token = current.set(call)
    try:
        text = TextFormatter().format(record("it is %s", "so"))
        named = TextFormatter().format(record("request r-1 failed"))
        told = json.loads(JsonFormatter().format(record("it is %s", "so")))
    finally:
        current.reset(token)
    assert text.endswith(f" W a.b: it is so request_id=r-1 trace_id={TRACE_ID}")
    assert named.endswith(f" W a.b: request r-1 failed trace_id={TRACE_ID}")
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert told == {
        "level": "WARNING",
        "logger": "a.b",
        "message": "it is so",
        "request_id": "r-1",
        "trace_id": TRACE_ID,
    }
    assert TextFormatter().format(record("outside")).endswith(" W a.b: outside")


def test_json_is_one_line_whatever_happens():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = JsonFormatter().format(record("a\nb", exc_info=sys.exc_info()))
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "a\nb" and "ValueError: two\nlines" in told["exception"]
    fields = structured("call", {"path": Path("x")})
    assert json.loads(JsonFormatter().format(record("words", **fields)))["path"] == "x"


async def test_what_is_logged_during_a_call_has_its_id(serve, logs):
    stream = logs("info", "json")

    def broken(fed):
        raise RuntimeError("broken")

    served = await serve(FakeRuntime(LIMITS, broken), server_config={"access_log": "text"})
    request = pb.QueryRequest(query=pb.QueryTask(question="?"))
    request.options.request_id = "r-7"
    assert (await failure(served.vision.Query(request))).code is grpc.StatusCode.INTERNAL
    # The access log has its line after the caller has its status.
    await served.server.stop(grace_s=5)
    told = [entry for entry in entries(stream) if entry.get("request_id") == "r-7"]
    assert {entry["logger"] for entry in told} == {
        "kestrel_grpc.edge.failures.endings",
        "kestrel_grpc.access",
    }
    access = told[-1]
    assert (access["event"], access["code"]) == ("call", "INTERNAL")
    assert access["method"] == "kestrel.v1.VisionService/Query"


async def test_the_life_of_a_server(serve, logs):
    stream = logs("info", "json")
    served = await serve()
    await served.server.stop(grace_s=0)
    await served.server.stop(grace_s=0)
    life = [entry for entry in entries(stream) if entry["logger"] == "kestrel_grpc.lifecycle"]
    assert [entry["event"] for entry in life] == ["listening", "ready", "draining", "stopped"]
    assert life[0]["addresses"] == list(served.server.addresses)
    assert (life[1]["model"], life[1]["dtype"]) == ("fake", served.engine.info.dtype)
    assert life[1]["load_s"] >= 0 and life[2]["requests"] == 0 and life[3]["served_s"] > 0


async def test_failures_are_events(serve, logs, monkeypatch):
    monkeypatch.setattr("kestrel_grpc.services.health.POLL_INTERVAL_S", 0.01)
    stream = logs("info", "text")
    served = await serve()
    await served.engine.shutdown(grace_s=0)
    await served.server._opened.following
    assert " E kestrel_grpc.lifecycle: failed error=the engine has died" in stream.getvalue()

    async def load():
        raise ModelLoadError("no such weights")

    # In text the command's last line tells the error; a reader of JSON needs it in the record.
    for log_format in ("text", "json"):
        config = ServerConfig(listen=("127.0.0.1:0",), log_format=log_format)
        server = KestrelServer(config, served.server.served.default.config, load)
        await server.start()
        with pytest.raises(ModelLoadError):
            await server.load()
        await server.stop(grace_s=0)
        told = " E kestrel_grpc.lifecycle: failed error=no such weights" in stream.getvalue()
        assert told == (log_format == "json")


def pictures(folder):
    """In formats that libvips reads in order and those for which it might spool."""
    noise = np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), np.uint8)
    image = pyvips.Image.new_from_array(noise, interpretation="srgb")
    for name, options in (
        ("a.jpg", {"interlace": True}),
        ("b.png", {"interlace": True}),
        ("c.tif", {"tile": True}),
        ("d.webp", {}),
    ):
        image.write_to_file(str(folder / name), **options)
        yield folder / name


@pytest.mark.slow
def test_a_session_logs_no_secret_and_writes_no_file(tmp_path):
    """The process as it is run, at the level debug, with telemetry on the console and temporary files forbidden."""
    (folder := tmp_path / "temporary").mkdir()
    (away := tmp_path / "pictures").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "OTEL_"))}
    environment |= {
        "TMPDIR": str(folder),
        "KESTREL_API_KEY": SECRETS["key"],
        "KESTREL_THREADS": "1",
        "KESTREL_DRAIN_DELAY": "0",
    }
    environment |= VARIABLES | {"OTEL_TRACES_EXPORTER": "console", "HOME": str(tmp_path)}
    flags = ("--listen", "127.0.0.1:0", "--log-level", "debug", "--log-format", "json")
    with (tmp_path / "log").open("wb") as log:
        process = ForkedProcess(
            [sys.executable, "-m", "kestrel_grpc", "serve", *flags, "--access-log"],
            stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
    try:
        ready = process.stdout.readline()
        target = ready.split("listening on ")[1].split(",")[0]
        # At the start, the server tries whether the folder can be written. Later, a file that comes and goes leaves its
        # mark on the folder.
        before = folder.stat().st_mtime_ns
        session(target, away)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == 0
    assert list(folder.iterdir()) == [] and folder.stat().st_mtime_ns == before
    text = (tmp_path / "log").read_text()
    told = [json.loads(line) for line in text.splitlines()]
    for secret in SECRETS.values():
        assert secret not in text and secret not in rest
    assert any(entry["level"] == "DEBUG" for entry in told)
    events = [e["event"] for e in told if e["logger"] == "kestrel_grpc.lifecycle"]
    assert events == ["listening", "ready", "draining", "stopped"]
    traced = [entry for entry in told if entry.get("trace_id") == TRACE_ID]
    flushed = [e for e in traced if "FlushCaches" in e.get("message", "")]
    assert len(flushed) == 1 and flushed[0]["request_id"] == "r-flush"
    assert sum(entry.get("event") == "call" for entry in traced) == 7


def session(target, folder):
    """Every way for an image to come, with all secrets sent along."""
    metadata = {
        "cookie": f"session={SECRETS['cookie']}",
        "x-api-key": SECRETS["x-api-key"],
        "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01",
    }
    with KestrelClient(target, token=SECRETS["key"], metadata=metadata) as client:
        for path in pictures(folder):
            client.query(path, SECRETS["question"], max_tokens=1)
        with client.stream_query(path, SECRETS["question"], max_tokens=1) as stream:
            stream.result()
        client.analyze(path, {"a": CaptionTask(max_tokens=1)})
    with KestrelClient(target, token=SECRETS["wrong"]) as client:
        with pytest.raises(UnauthenticatedError):
            client.list_models()
    with grpc.insecure_channel(target) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        pairs = {**metadata, "authorization": f"Bearer {SECRETS['key']}", "x-request-id": "r-flush"}
        stub.FlushCaches(admin_service_pb2.FlushCachesRequest(), metadata=tuple(pairs.items()))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "is_told"), [("os", True), ("kestrel_grpc.cli", False)])
def test_torch_does_not_warn_of_settings_that_we_use_on_purpose(first: str, is_told: bool):
    code = f"import {first}, torch; torch._C._set_sm_carveout_experimental(3)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    if is_told and not done.stderr:
        pytest.skip("this torch does not warn")
    assert ("experimental" in done.stderr) == is_told
    assert is_told or done.stderr == ""
