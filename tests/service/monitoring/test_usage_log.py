"""The usage log and the metrics of usage: the same sums, whatever becomes of the requests."""

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace

import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.requests import num_positions
from kestrel_engine.types.step import PREVIOUS
from kestrel_grpc.logs import appending
from kestrel_grpc.monitoring import usage_log
from kestrel_grpc.monitoring.usage_log import UsageLog
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.settings.security import SecurityConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.telemetry.usage import Usage
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure
from tests.service.telemetry.test_metrics import scrape

KINDS = {"input": "input_tokens", "image": "image_tokens", "cached": "cached_tokens"}
KINDS |= {"output": "output_tokens"}


class WorkRuntime(FakeRuntime):
    """Each row, position and crop takes a second of the device. ``worked_s``: of all steps."""

    worked_s = 0

    def collect(self, handle):
        result = super().collect(handle)
        positions = [[t for t in row.tokens if t is not PREVIOUS] for row in handle.prefill]
        seconds = {
            "vision_s": sum(piece.num_encoded for piece in handle.encode),
            "prefill_s": sum(map(num_positions, positions)),
            "decode_s": len(handle.decode),
        }
        self.worked_s += sum(seconds.values())
        return replace(result, **seconds)


def query(max_tokens=20, image=True):
    task = pb.QueryTask(question="what?", max_tokens=max_tokens)
    return pb.QueryRequest(images=[raw_image()] if image else [], query=task)


@pytest.fixture
async def metered(serve, tmp_path):
    """A server that measures usage, and the metadata of two callers."""
    tokens = {name: new_token() for name in ("one", "two")}
    file = tmp_path / "tokens"
    file.write_text("\n".join(line_of(name, [Scope.INFER], t) for name, t in tokens.items()))
    folder = tmp_path / "usage"
    folder.mkdir()
    config = {
        "security": SecurityConfig(auth_tokens=str(file)),
        "telemetry": TelemetryConfig(prometheus="127.0.0.1:0"),
        "usage_log": str(folder),
    }
    config["security"] = replace(config["security"], open_services=("health", "metrics"))
    served = await serve(WorkRuntime(LIMITS, never_ends), server_config=config)
    return served, folder, *((("authorization", f"Bearer {t}"),) for t in tokens.values())


def logged(folder):
    """The sums of all lines, by principal and field."""
    sums = Counter()
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            for name in ("requests", "device_s", *KINDS.values()):
                sums[fields["principal"], name] += fields[name]
    return sums


async def measured(served):
    found = await scrape(served)
    sums = Counter()
    for sample in found.samples["kestrel_usage_tokens_total"]:
        kind = KINDS[sample.labels["gen_ai_token_type"]]
        sums[sample.labels["kestrel_principal"], kind] += sample.value
    for sample in found.samples["kestrel_usage_device_time_seconds_total"]:
        sums[sample.labels["kestrel_principal"], "device_s"] += sample.value
    return sums


async def test_log_and_metrics_have_the_same_sums(metered):
    served, folder, one, two = metered
    runtime, vision = served.runtime, served.vision
    alone = await vision.Query(query(), metadata=one)
    usage = alone.usage
    crops = sum(piece.num_encoded for plan in runtime.plans for piece in plan.encode)
    # The first token comes from the prompt's last position. One more row may be out when the request ends.
    assert usage.device_ms == 1000 * (usage.input_tokens + crops + usage.output_tokens - 1)
    await served.server.records.usage.write()
    long = [vision.Query(query(200, image=False), metadata=who) for who in (one, two) * 3]
    streams = [vision.StreamQuery(query(200), metadata=who) for who in (one, two)]
    for stream in streams:
        await stream.read()
        stream.cancel()
    await failure(vision.Query(query(10**6), metadata=two))
    await asyncio.gather(*long)
    while not served.engine.stats.preemptions:  # They may have come one after the other.
        await asyncio.gather(*(vision.Query(query(200, image=False), metadata=one) for _ in long))
    runtime.fail_next = RuntimeError("x")
    await failure(vision.Query(query(image=False), metadata=two))
    assert await served.server.in_flight.wait_idle(60)
    await served.server.records.usage.write()
    sums = logged(folder)
    assert sums["one", "requests"] + sums["two", "requests"] >= 9
    found = await measured(served)
    assert found == {key: value for key, value in sums.items() if key[1] != "requests"}
    assert 0 < found["one", "device_s"] + found["two", "device_s"] <= runtime.worked_s
    assert found["one", "output_tokens"] >= 3 * 200 + 20
    assert [oct(path.stat().st_mode)[-3:] for path in folder.iterdir()] == ["600"]


@pytest.fixture
def log(tmp_path):
    return UsageLog(str(tmp_path), 1000)


def use(log, principal, tokens):
    log._add((principal, "m", ""), Usage(1, tokens))


async def test_what_cannot_be_written_is_in_the_next_lines(log, tmp_path, monkeypatch):
    real = appending.append
    use(log, 'a\n"\u2028', 1)
    use(log, "b", 2)
    calls = []

    def full(path, line):
        calls.append(line)
        return real(path, line if len(calls) == 1 else line[:5])

    monkeypatch.setattr(appending, "append", full)
    await log.write()
    assert log.waiting == 1
    monkeypatch.setattr(appending, "append", real)
    use(log, "b", 3)
    await log.write()
    [path] = tmp_path.iterdir()
    lines = path.read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) == 3 and [each["input_tokens"] for each in whole] == [1, 5]
    assert log.waiting == 0


async def test_files_are_by_hour_and_bounded_whatever_the_clock_does(log, tmp_path, monkeypatch):
    names = []
    for hour in (5, 3, 6, 7, 8, 9):
        monkeypatch.setattr(usage_log.clock, "wall", lambda hour=hour: 3600.0 * hour)
        use(log, "a", hour)
        await log.write()
        names.append({path.name for path in tmp_path.iterdir()})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert names[1] == {"usage-19700101T05Z.jsonl", "usage-19700101T03Z.jsonl"}
    assert "usage-19700101T09Z.jsonl" in names[-1] and "usage-19700101T03Z.jsonl" not in names[-1]
    os.symlink(tmp_path / "elsewhere", tmp_path / "usage-19700101T10Z.jsonl")
    monkeypatch.setattr(usage_log.clock, "wall", lambda: 36_000.0)
    use(log, "a", 1)
    await log.write()
    assert log.waiting == 1 and not (tmp_path / "elsewhere").exists()


async def test_many_principals_have_one_sum(log, tmp_path, monkeypatch):
    monkeypatch.setattr(usage_log, "MOST_KEYS", 2)
    for name in "abcd":
        use(log, name, 1)
    assert log.waiting == 4 and set(log._used) == {
        ("a", "m", ""), ("b", "m", ""), ("other", "m", "")
    }  # fmt: skip
