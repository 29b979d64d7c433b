"""SharedImages with a real Redis: limits, damage, hostile values. Breaker and FlightRoom by their rules."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel_grpc.images.shared.breaker import FAILURES, Breaker
from kestrel_grpc.images.shared.flight_room import FlightRoom, RoomFull
from kestrel_grpc.images.shared.redis_backend import owner_key
from kestrel_grpc.images.shared.shared_images import SharedImages
from kestrel_grpc.images.store import StoredImage
from kestrel_grpc.settings.shared_images import PASSWORD_VARIABLE, SharedImagesConfig
from tests.service.certificates import make_authority
from tests.service.images.shared.conftest import PASSWORD
from tests.waiting import until


def image(number, num_bytes=1000):
    return StoredImage(f"img_{number:032x}", bytes([number % 256]) * num_bytes, 60, 40)


class Shared:
    """Shared images, and what they report."""

    def __init__(self, server, tmp_path, **fields):
        password = tmp_path / "password"
        password.write_text(f"{PASSWORD}\n")
        fields = {"timeout_s": 60, **fields}
        config = SharedImagesConfig(url=server.url, password_file=str(password), **fields)
        self.events = []
        self.images = SharedImages.open(config, self.events.append)

    async def got(self, owner, number):
        found = await self.images.fetch(owner, image(number).image_id)
        return None if found.image is None else found.image.source

    @property
    def outcomes(self):
        return [event.outcome for event in self.events]


@pytest.fixture
async def shared(redis_server, tmp_path):
    opened = []

    def make(**fields):
        opened.append(Shared(redis_server, tmp_path, **fields))
        return opened[-1]

    yield make
    for each in opened:
        await each.images.close()


RIGHTS = re.findall(
    r"`(\+strlen .*?)`",
    Path(__file__).parents[4].joinpath("docs/run/scaling.md").read_text(),
    re.DOTALL,
)


@pytest.fixture
async def redis_client(redis_server):
    from redis.asyncio import Redis

    client = Redis(port=redis_server.port, password=PASSWORD)
    yield client
    await client.aclose()


async def test_an_owner_keeps_its_newest_images_in_its_bytes(shared, redis_client):
    """The limit holds for all servers together, and the other owner has its own."""
    one, other = shared(caller_bytes=5000), shared(caller_bytes=5000)
    await one.images.put("other", image(77))
    for number in range(12):
        await (one, other)[number % 2].images.put("tenant", image(number))
        await one.images.put("tenant", image(11 if number > 11 else number))  # Put again.
    kept = [number for number in range(12) if await one.got("tenant", number)]
    assert kept == [8, 9, 10, 11]
    assert await one.got("other", 77) == image(77).source
    assert await one.got("tenant", 77) is None
    index = f"kestrel:images:{{{owner_key('tenant')}}}"
    total = int(await redis_client.get(f"{index}:bytes"))
    keys = [key async for key in redis_client.scan_iter(f"{index}:img_*")]
    assert total == sum([await redis_client.strlen(key) for key in keys]) <= 5000
    assert all([0 < await redis_client.pttl(key) <= 3_600_000 for key in keys])
    assert await one.images.delete("tenant", image(9).image_id)
    # A mark of the deletion stands in its place.
    assert int(await redis_client.get(f"{index}:bytes")) == total - 1000
    assert await one.got("tenant", 9) is None and one.outcomes[-1] == "miss"
    assert not await other.images.delete("tenant", image(9).image_id)
    await one.images.put("tenant", image(9))  # As a server that still has it may.
    assert int(await redis_client.get(f"{index}:bytes")) == total
    assert await redis_client.zcard(index) == 4
    assert await one.images.delete("tenant", image(9).image_id)
    # The store lost its record: it counts anew.
    await redis_client.delete(f"{index}:bytes")
    await one.images.put("tenant", image(20))
    assert int(await redis_client.get(f"{index}:bytes")) == total + (total // 4 - 1000)


async def test_what_others_wrote_into_the_store_is_a_miss(shared, redis_client):
    one = shared(value_bytes=10_000)
    await one.images.put("tenant", image(1))
    names = {n: f"kestrel:images:{{{owner_key('tenant')}}}:{image(n).image_id}" for n in range(9)}
    value = await redis_client.get(names[1])
    stolen = f"kestrel:images:{{{owner_key('thief')}}}:{image(1).image_id}"
    await redis_client.set(stolen, value)
    await redis_client.set(names[2], value)
    await redis_client.set(names[3], value[:-1] + b"x")
    await redis_client.set(names[4], b"x" * 50_000)
    await redis_client.hset(names[5], "a", "b")
    await redis_client.set(names[6], b"")
    one.events.clear()
    assert await one.got("thief", 1) is None
    for number in (2, 3, 4, 5, 6):
        assert await one.got("tenant", number) is None
    assert one.outcomes == [*["damaged"] * 3, "too_large", "damaged", "miss"]
    assert one.images.breaker.is_closed, "the store itself works"
    assert await one.got("tenant", 1) == image(1).source
    assert (one.events[-1].outcome, one.events[-1].num_bytes) == ("hit", len(value))
    # An image that is too large is not written either.
    await one.images.put("tenant", image(7, 10_001))
    assert one.outcomes[-1] == "too_large" and await redis_client.get(names[7]) is None


async def test_a_large_image_goes_through(shared):
    one = shared()
    large = image(3, 8_000_000)
    await one.images.put("tenant", large)
    assert await one.got("tenant", 3) == large.source
    assert one.outcomes == ["stored", "hit"]


async def test_several_calls_share_one_read(shared):
    one = shared()
    await one.images.put("tenant", image(1))
    calls = [asyncio.create_task(one.got("tenant", 1)) for _ in range(10)]
    await asyncio.sleep(0)
    calls[0].cancel()
    assert await asyncio.gather(*calls[1:]) == [image(1).source] * 9
    assert one.outcomes == ["stored", "hit"]


async def test_many_operations_wait_for_a_connection(shared):
    one = shared()
    await asyncio.gather(*(one.images.put("tenant", image(number)) for number in range(60)))
    found = await asyncio.gather(*(one.got("tenant", number) for number in range(60)))
    assert found == [image(number).source for number in range(60)]
    assert one.outcomes == [*["stored"] * 60, *["hit"] * 60]


async def test_a_call_with_little_time_does_not_wait_for_its_write(shared, redis_server):
    one = shared()
    redis_server.freeze()
    await one.images.put("tenant", image(1), left_s=0.1)
    assert not one.outcomes
    redis_server.thaw()
    await until(lambda: one.outcomes == ["stored"])


async def test_a_wrong_password_is_a_failure_that_shows_no_password(redis_server, tmp_path, caplog):
    password = tmp_path / "wrong"
    password.write_text("wrong-secret")
    config = SharedImagesConfig(url=redis_server.url, password_file=str(password))
    events = []
    images = SharedImages.open(config, events.append)
    await images.put("tenant", image(1))
    assert not (await images.fetch("tenant", image(1).image_id)).answered
    await images.close()
    assert [event.outcome for event in events] == ["failed", "failed"]
    assert "Authentication" in caplog.text and "wrong-secret" not in caplog.text


async def test_a_user_of_redis_needs_the_documented_rights_only(
    redis_server, redis_client, monkeypatch
):
    await redis_client.execute_command(
        "ACL", "SETUSER", "images", "on", ">word", *RIGHTS[0].split()
    )
    monkeypatch.setenv(PASSWORD_VARIABLE, "word")
    address = redis_server.url.replace("://", "://images@")
    events = []
    images = SharedImages.open(
        SharedImagesConfig(url=address, timeout_s=60, caller_bytes=2500), events.append
    )
    for number in range(4):
        await images.put("tenant", image(number))
    assert (await images.fetch("tenant", image(3).image_id)).image is not None
    assert await images.delete("tenant", image(3).image_id)
    await images.close()
    assert [event.outcome for event in events] == [*["stored"] * 4, "hit", "deleted"]


async def test_tls(redis_server, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    authority = make_authority(tmp_path)
    redis_server.kill()
    redis_server.start(tls=authority.issue("redis"))
    address = redis_server.url.replace("redis://", "rediss://")
    events = []
    config = SharedImagesConfig(url=address, timeout_s=60)
    trusting = replace(config, ca_file=str(authority.ca.cert))
    for each in (trusting, config):
        images = SharedImages.open(each, events.append)
        await images.put("tenant", image(1))
        await images.close()
    assert [event.outcome for event in events] == ["stored", "failed"]
    assert "certificate" in caplog.text.lower()


def test_the_breaker_pauses_longer_each_time(still_clock):
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.enter()
        breaker.failed()
    pauses = []
    for _ in range(7):
        began = still_clock.now()
        while not breaker.enter():
            still_clock.advance(0.5)
        assert not breaker.enter(), "one operation tries it"
        pauses.append(still_clock.now() - began)
        breaker.failed()
        breaker.failed()  # One that had begun earlier.
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    still_clock.advance(30)
    assert breaker.enter()
    breaker.left()
    assert breaker.enter()
    breaker.succeeded()
    assert breaker.is_closed and breaker.enter() and breaker.enter()


async def test_the_room_bounds_bytes_and_no_owner_takes_all():
    room = FlightRoom(100, wait_s=0.02)
    async with room.reserved("greedy", 40):
        with pytest.raises(RoomFull):
            async with room.reserved("greedy", 20):
                pass
        async with room.reserved("other", 60):  # One value always may be as large as there is room.
            assert room.used_bytes == 100
            with pytest.raises(RoomFull):
                async with room.reserved("third", 1):
                    pass
    patient = FlightRoom(100, wait_s=60)
    entered = asyncio.Event()

    async def second():
        async with patient.reserved("b", 50):
            entered.set()

    async with patient.reserved("a", 60):
        waiting = asyncio.create_task(second())
        given_up = asyncio.create_task(second())
        await asyncio.sleep(0)
        given_up.cancel()
        assert not entered.is_set()
    await waiting
    assert entered.is_set() and room.used_bytes == patient.used_bytes == 0


async def test_a_store_that_does_not_answer_is_logged_at_the_start(caplog):
    pytest.importorskip("redis")
    events = []
    config = SharedImagesConfig(url="redis://127.0.0.1:1")
    images = SharedImages.open(config, events.append)
    images.start()
    await images.close()  # Waits for what has begun.
    assert [(event.operation, event.outcome) for event in events] == [("get", "failed")]
    assert "the shared image store failed (get: " in caplog.text
    assert "this server continues without it" in caplog.text
