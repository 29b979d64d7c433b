"""Attacks by messages: compressed, unfinished, large, with many fields or long texts."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.internal import encoder

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.abuse.attacks.registry import MIB, QUERY, attack, ending_of, many
from tests.abuse.connections.hand_made_calls import Body, HandMadeCalls, bomb
from tests.abuse.inputs.edge_messages import length_delimited
from tests.abuse.target import OWN, Target, jpeg


def _ending(answer: bytes) -> str:
    """What the trailers of a call made by hand say, roughly."""
    for word in (b"needs a token", b"times its size", b"hold", b"limit", b"reset"):
        if word in answer:
            return word.decode()
    return "open" if not answer else "ended"


async def _by_hand(
    target: Target, connections: int, calls: int, body: Body, token: str, linger_s: float, end: bool
) -> Counter[str]:
    extra = {"authorization": f"Bearer {target.tokens[token]}"} if token else {}
    if body.compressed:
        extra["grpc_encoding"] = "gzip"

    async def connection(_: int) -> str:
        try:
            async with HandMadeCalls(target.address) as made:
                answers = await asyncio.gather(
                    *(
                        made.call(QUERY, body, end=end, linger_s=linger_s, **extra)
                        for _ in range(calls)
                    )
                )
        except OSError:
            return "connection refused"
        return ", ".join(sorted({_ending(answer) for answer in answers}))

    return await many(connections, connection)


@attack
async def bombs_of_strangers(target: Target) -> Counter[str]:
    """100 messages of 120 MiB as 119 KiB of gzip, without a token."""
    return await _by_hand(target, 10, 10, bomb(120 * MIB), "", 20, True)


@attack
async def bombs(target: Target) -> Counter[str]:
    """The same with a token."""
    return await _by_hand(target, 10, 10, bomb(120 * MIB), "rude", 20, True)


@attack
async def bombs_within_the_limit(target: Target) -> Counter[str]:
    """100 messages that unpack to 30 MiB."""
    return await _by_hand(target, 10, 10, bomb(30 * MIB), "rude", 20, True)


@attack
async def unfinished_messages(target: Target) -> Counter[str]:
    """60 messages of 32 MiB with a token, of which the last byte never comes."""
    return await _by_hand(target, 12, 5, Body(32 * MIB, 32 * MIB - 1, b"\x12"), "rude", 20, False)


@attack
async def unfinished_messages_of_strangers(target: Target) -> Counter[str]:
    return await _by_hand(target, 12, 5, Body(32 * MIB, 32 * MIB - 1, b"\x12"), "", 20, False)


@attack
async def large_messages(target: Target) -> Counter[str]:
    """60 whole messages of 30 MiB that are no image."""
    return await _by_hand(target, 12, 5, Body(30 * MIB, 30 * MIB), "rude", 20, True)


async def _raw_calls(target: Target, calls: Sequence[tuple[str, bytes]]) -> Counter[str]:
    """Unary calls of VisionService, by the method's name and the encoded message."""

    async def one(number: int) -> str:
        method, data = calls[number]
        async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
            call = channel.unary_unary(f"/kestrel.v1.VisionService/{method}")
            return await ending_of(call(data, metadata=target.metadata("rude"), timeout=60))

    return await many(len(calls), one)


def _repeated(kind: Any, name: str, value: bytes, num_bytes: int) -> bytes:
    """A field with the same value again and again."""
    number = kind.DESCRIPTOR.fields_by_name[name].number
    one = encoder.TagBytes(number, 2) + bytes([len(value)]) + value
    return one * (num_bytes // len(one))


@attack
async def small_fields(target: Target) -> Counter[str]:
    """24 messages of 32 MiB with millions of small fields, and 200 with almost as many as a message may have."""
    calls = []
    for size, count in ((32 * MIB, 8), (38_000, 67)):
        for method, kind, name, value in (
            ("Query", pb.QueryTask, "spatial_refs", b"\x0a\x00"),
            ("Query", pb.QueryTask, "history", b""),
            ("Detect", pb.DetectTask, "objects", b""),
        ):
            task = _repeated(kind, name, value, size)
            calls += [(method, length_delimited(2, task))] * count
    return await _raw_calls(target, calls)


@attack
async def long_texts(target: Target) -> Counter[str]:
    """16 calls with 256 names of 32 kB each, and 64 with 64 long turns."""
    text = "a " * 16_000
    names = pb.DetectRequest(detect={"objects": [f"{n} {text}"[:32_000] for n in range(256)]})
    names.image.encoded = jpeg(5)
    history = [pb.Turn(question=text, answer=text)] * 64
    turns = pb.QueryRequest(query=pb.QueryTask(question="what?", history=history))
    calls = [("Detect", names.SerializeToString())] * 16
    return await _raw_calls(target, [*calls, *[("Query", turns.SerializeToString())] * 64])


@attack
async def many_streams(target: Target) -> Counter[str]:
    """50 connections of 100 calls each, of which no message comes."""
    return await _by_hand(target, 50, 100, Body(1000, 0), "rude", 15, False)
