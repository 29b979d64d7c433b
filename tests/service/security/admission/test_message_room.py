"""Memory for messages: reserved before they are read, in turns by caller, never all of it for one caller."""

import asyncio

import pytest

from kestrel_engine import clock
from kestrel_grpc.security.admission.guard import _divided
from kestrel_grpc.security.admission.message_room import (
    Hold,
    MessageLimits,
    MessageRoom,
    MessagesFull,
)
from kestrel_grpc.security.identity.principal import address_of

pytestmark = pytest.mark.usefixtures("still_clock")


def room(max_bytes: int | None = 100, wait_s: float = 5.0, **options: int) -> MessageRoom:
    return MessageRoom(max_bytes, wait_s=wait_s, **options)


async def test_a_reservation_shrinks_to_what_came_and_ends_with_its_call() -> None:
    ours = room()
    hold = Hold(ours, "a")
    await hold.reserve(60)
    hold.settle(10)
    assert ours.held_bytes == 10
    await hold.reserve(30)
    assert ours.held_bytes == 30, "in place of what it held"
    hold.close()
    hold.close()
    assert (ours.held_bytes, ours.held) == (0, {})


async def test_one_caller_never_has_all_room() -> None:
    ours = room(wait_s=0.05)
    holds = [Hold(ours, "a") for _ in range(4)]
    for hold in holds[:3]:
        await hold.reserve(25)
    with pytest.raises(MessagesFull, match=r"hold 75 of 100 bytes; no room became free in 0\.05 s"):
        await holds[3].reserve(25)
    await Hold(ours, "b").reserve(25)
    assert (ours.held_bytes, ours.num_waiting, ours.limited) == (100, 0, 1)


async def test_whoever_holds_nothing_may_have_one_message_however_large() -> None:
    ours = room()
    await Hold(ours, "a").reserve(100)


async def test_room_is_given_out_in_turns() -> None:
    ours = room()
    first, second = Hold(ours, "x"), Hold(ours, "y")
    await first.reserve(50)
    await second.reserve(50)
    order: list[str] = []

    async def wait(who: str) -> None:
        hold = Hold(ours, who)
        await hold.reserve(50)
        order.append(who)
        await asyncio.sleep(0)
        hold.close()

    waiting = [asyncio.ensure_future(wait(who)) for who in ("a", "a", "a", "b", "c", "c")]
    await asyncio.sleep(0.01)
    assert (order, ours.num_waiting) == ([], 6)
    first.close()
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c", "a", "c", "a"]
    second.close()
    assert (ours.held_bytes, ours.num_waiting, len(ours.waiting)) == (0, 0, 0)


async def test_a_call_that_ends_while_it_waits_leaves_nothing() -> None:
    ours = room()
    hold = Hold(ours, "a")
    await hold.reserve(100)
    large = asyncio.ensure_future(Hold(ours, "b").reserve(100))
    small = asyncio.ensure_future(Hold(ours, "b").reserve(20))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    hold.settle(80)
    await small
    assert (ours.held_bytes, ours.num_waiting) == (100, 0)


async def test_a_call_that_ends_just_as_it_gets_room_gives_it_back() -> None:
    ours = room()
    hold = Hold(ours, "a")
    await hold.reserve(100)
    late = asyncio.ensure_future(Hold(ours, "b").reserve(100))
    await asyncio.sleep(0)
    hold.close()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (ours.held_bytes, ours.num_waiting) == (0, 0)


async def test_room_that_comes_free_just_as_a_wait_is_given_up_is_for_the_next() -> None:
    ours = room()
    hold, next_hold = Hold(ours, "a"), Hold(ours, "c")
    await hold.reserve(100)
    given_up = asyncio.ensure_future(Hold(ours, "b").reserve(100))
    following = asyncio.ensure_future(next_hold.reserve(100))
    await asyncio.sleep(0)
    given_up.cancel()
    hold.close()
    await asyncio.gather(given_up, return_exceptions=True)
    await following
    next_hold.close()
    assert (ours.held_bytes, ours.num_waiting, len(ours.waiting)) == (0, 0, 0)


async def test_who_sent_much_is_read_one_message_at_a_time_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "kestrel_grpc.security.admission.message_room.copy_s_per_byte", lambda: 0.005
    )
    monkeypatch.setattr("kestrel_grpc.security.admission.message_room._HEAVY_S", 0.3)
    ours = room(1000)
    holds = [Hold(ours, "a") for _ in range(2)]
    for hold in holds:
        await hold.reserve(50)
    for hold in holds:
        hold.arrived(20)  # Half of 0.4 s of the loop's time, 0.25 s of which may be ahead.
        hold.close()
    began = clock.now()
    await Hold(ours, "b").reserve(50)
    assert clock.now() == began, "others are not concerned"
    await holds[0].reserve(50)
    assert clock.now() - began == pytest.approx(0.15), "a pause"
    await holds[1].reserve(50)
    assert clock.now() - began == pytest.approx(0.7), "one at a time, until it is no longer heavy"
    for hold in holds:
        hold.close()
    assert ours.reading == {"b": 1}


async def test_so_many_wait_and_no_more() -> None:
    ours = room(max_waiting=1)
    await Hold(ours, "a").reserve(100)
    waiting = asyncio.ensure_future(Hold(ours, "b").reserve(1))
    await asyncio.sleep(0)
    with pytest.raises(MessagesFull, match="1 calls wait for room"):
        await Hold(ours, "c").reserve(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_without_a_limit_bytes_are_only_counted() -> None:
    ours = room(None)
    for _ in range(3):
        await Hold(ours, "a").reserve(10**12)
    assert ours.held_bytes == 3 * 10**12


@pytest.mark.parametrize(
    ("largest", "held", "ours", "strangers"),
    [
        (33, 1024, 892, 132),
        (33, 10_000, 8750, 1250),
        (33, 200, 134, 66),
        (33, 66, 66, 66),
        (33, 40, 40, 40),
        (33, None, None, 132),
    ],
)
def test_strangers_have_a_room_of_their_own(
    largest: int, held: int | None, ours: int | None, strangers: int
) -> None:
    assert _divided(MessageLimits(largest, held)) == (ours, strangers)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:5000", "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:9::]:5000", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:5000", "10.1.2.3"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("unix:", "unix"),
        ("unix:/run/kestrel.sock", "unix"),
        ("ipv6:nonsense", "ipv6"),
    ],
)
def test_callers_are_told_apart_by_address(peer: str, address: str) -> None:
    assert address_of(peer) == address
