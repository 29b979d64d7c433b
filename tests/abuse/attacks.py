"""Attacks on a server on this machine, each bounded in count and time, while a polite caller uses the server.

    python -m tests.abuse.attacks                 # all, against a server of their own with default flags
    python -m tests.abuse.attacks bombs watchers  # some

For each it prints the most memory of the server's whole process tree above its memory at rest, what is still held after
10 s, and p50, p95 and p99 of the polite caller, who asks about a 640 x 480 JPEG as soon as the answer before is there.
Figures need an otherwise idle machine. Loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyvips
from google.protobuf.internal import encoder
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.soaking.rude_sockets import PREFACE, frame
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.connections.hand_made_calls import Body, HandMadeCalls, bomb, head
from tests.abuse.target import OWN, Polite, Target, jpeg, query

MIB = 1024 * 1024
QUERY, CHECK = "/kestrel.v1.VisionService/Query", "/grpc.health.v1.Health/Check"


Attack = Callable[[Target], Awaitable[Counter[str]]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


async def _many(count: int, one: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """What ``count`` of them came to."""
    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


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

    return await _many(connections, connection)


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
            try:
                await call(data, metadata=target.metadata("rude"), timeout=60)
            except grpc.aio.AioRpcError as error:
                return _code(error)
        return "OK"

    return await _many(len(calls), one)


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
            ("Query", pb.QueryRequest, "spatial_refs", b"\x0a\x00"),
            ("Query", pb.QueryRequest, "history", b""),
            ("Detect", pb.DetectRequest, "objects", b""),
        ):
            calls += [(method, _repeated(kind, name, value, size))] * count
    return await _raw_calls(target, calls)


@attack
async def long_texts(target: Target) -> Counter[str]:
    """16 calls with 256 names of 32 kB each, and 64 with 64 long turns."""
    text = "a " * 16_000
    names = pb.DetectRequest(objects=[f"{n} {text}"[:32_000] for n in range(256)])
    names.image.encoded = jpeg(5)
    turns = pb.QueryRequest(question="what?", history=[pb.Turn(question=text, answer=text)] * 64)
    calls = [("Detect", names.SerializeToString())] * 16
    return await _raw_calls(target, [*calls, *[("Query", turns.SerializeToString())] * 64])


@attack
async def many_streams(target: Target) -> Counter[str]:
    """50 connections of 100 calls each, of which no message comes."""
    return await _by_hand(target, 50, 100, Body(1000, 0), "rude", 15, False)


@attack
async def many_connections(target: Target) -> Counter[str]:
    """1500 connections that say nothing."""

    async def connect(_: int) -> str:
        host, _, port = target.address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return "refused"
        try:
            async with asyncio.timeout(10):
                while await reader.read(1000):
                    pass
            return "closed"
        except TimeoutError:
            return "held"
        except OSError:
            return "reset"
        finally:
            writer.close()

    return await _many(1500, connect)


async def _raw(target: Target, data: Iterator[bytes], seconds: float, *, hold: bool = False) -> str:
    """A connection that sends frames as fast as they are taken, and reads along. ``hold``: it stays open to the end."""
    host, _, port = target.address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return "refused"

    async def read() -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass

    reading = asyncio.ensure_future(read())
    end, sent = time.monotonic() + seconds, 0
    try:
        writer.write(PREFACE + frame(4, 0, 0))
        for piece in data:
            writer.write(piece)
            sent += len(piece)
            await asyncio.wait_for(writer.drain(), 5)
            if time.monotonic() > end or reading.done():
                break
            await asyncio.sleep(0)
        if hold:
            await asyncio.wait({reading}, timeout=end - time.monotonic())
        return "closed" if reading.done() else "taken"
    except TimeoutError:
        return "held back"
    except OSError:
        return "closed"
    finally:
        reading.cancel()
        writer.close()


@attack
async def continuations(target: Target) -> Counter[str]:
    """Headers that never end: CONTINUATION after CONTINUATION."""

    def frames() -> Iterator[bytes]:
        yield frame(1, 0, 1, head(QUERY))
        block = b"\x00\x04abcd\x40" + b"x" * 64
        for _ in range(100_000):
            yield frame(9, 0, 1, block * 20) * 8

    return await _many(8, lambda _: _raw(target, frames(), 6))


@attack
async def header_tables(target: Target) -> Counter[str]:
    """One large header in the table, named by thousands of bytes of one byte each (HPACK bomb)."""

    def frames() -> Iterator[bytes]:
        stream = 1
        entry = b"\x40\x04bomb\x7f\x80\x1f" + b"x" * 4095
        yield frame(1, 4, stream, head(QUERY) + entry[:3000])
        while stream < 20_000:
            stream += 2
            yield frame(1, 4, stream, head(QUERY) + b"\xbe" * 12_000)

    return await _many(8, lambda _: _raw(target, frames(), 6))


@attack
async def pings_and_settings(target: Target) -> Counter[str]:
    def frames() -> Iterator[bytes]:
        for _ in range(100_000):
            yield (frame(6, 0, 0, bytes(8)) + frame(4, 0, 0)) * 50

    return await _many(8, lambda _: _raw(target, frames(), 6))


@attack
async def resets(target: Target) -> Counter[str]:
    """Calls reset as soon as made (rapid reset), with a token."""
    token = f"Bearer {target.tokens['rude']}"

    def frames() -> Iterator[bytes]:
        for stream in range(1, 60_001, 2):
            made = frame(1, 4, stream, head(QUERY, authorization=token))
            yield made + frame(3, 0, stream, (8).to_bytes(4, "big"))

    return await _many(8, lambda _: _raw(target, frames(), 8))


@contextlib.asynccontextmanager
async def _stub(target: Target) -> AsyncIterator[VisionServiceStub]:
    async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
        yield VisionServiceStub(channel)


def _code(error: grpc.aio.AioRpcError) -> str:
    return error.code().name


@attack
async def large_metadata(target: Target) -> Counter[str]:
    """500 calls with 15 KiB of metadata each."""
    metadata = (*target.metadata("rude"), ("x-much", "m" * 15_000))

    async def one(number: int) -> str:
        try:
            async with _stub(target) as stub:
                await stub.Query(query(), metadata=metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            return _code(error)
        return "OK"

    return await _many(500, one)


@attack
async def cancels(target: Target) -> Counter[str]:
    """3000 calls with an image, each cancelled within 20 ms."""
    rng = random.Random(1)
    images = [jpeg(1000 + number) for number in range(20)]

    async def caller(number: int) -> str:
        async with _stub(target) as stub:
            for _ in range(100):
                call = stub.Query(query(rng.choice(images)), metadata=target.metadata("rude"))
                await asyncio.sleep(0.02 * rng.random())
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await call
        return "done"

    return await _many(30, caller)


@attack
async def one_principal_with_700_calls(target: Target) -> Counter[str]:
    end = time.monotonic() + 15
    codes: Counter[str] = Counter()
    image = jpeg(77)

    async def caller(_: int) -> str:
        async with _stub(target) as stub:
            while time.monotonic() < end:
                try:
                    await stub.Query(query(image, 60), metadata=target.metadata("rude"), timeout=30)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[_code(error)] += 1
                    await asyncio.sleep(0.1)
        return "done"

    await _many(700, caller)
    return codes


@attack
async def stored_images(target: Target) -> Counter[str]:
    """Evicts: 60 images of 8 MB by PutImage."""
    rng = np.random.default_rng(5)

    async def one(_: int) -> str:
        pixels = rng.integers(0, 255, (1600, 1700, 3), np.uint8).tobytes()
        raw = common_pb2.RawImage(data=pixels, width=1700, height=1600)
        request = image_service_pb2.PutImageRequest(image=common_pb2.Image(raw=raw))
        async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
            try:
                await ImageServiceStub(channel).PutImage(
                    request, metadata=target.metadata("rude"), timeout=30
                )
            except grpc.aio.AioRpcError as error:
                return _code(error)
        return "OK"

    return await _many(60, one)


@attack
async def stalled_uploads(target: Target) -> Counter[str]:
    """40 uploads that send 6 MB and then nothing."""

    async def one(_: int) -> str:
        async def parts() -> AsyncIterator[image_service_pb2.UploadImageRequest]:
            yield image_service_pb2.UploadImageRequest(
                info=image_service_pb2.UploadInfo(size_bytes=30 * MIB)
            )
            for _ in range(6):
                yield image_service_pb2.UploadImageRequest(chunk=bytes(MIB))
            await asyncio.sleep(15)

        async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
            try:
                await ImageServiceStub(channel).UploadImage(
                    parts(), metadata=target.metadata("rude"), timeout=20
                )
            except grpc.aio.AioRpcError as error:
                return f"{_code(error)}: {(error.details() or '')[:40]}"
        return "OK"

    return await _many(40, one)


@attack
async def watchers(target: Target) -> Counter[str]:
    """3000 streams of strangers that watch health, over 30 connections."""

    async def connection(_: int) -> str:
        counted: Counter[str] = Counter()
        async with grpc.aio.insecure_channel(target.address, options=OWN) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def watch() -> None:
                try:
                    async with asyncio.timeout(12):
                        async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                            counted["told"] += 1
                except TimeoutError:
                    counted["held"] += 1
                except grpc.aio.AioRpcError as error:
                    counted[_code(error)] += 1

            await asyncio.gather(*(watch() for _ in range(100)))
        return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))

    return await _many(30, connection)


@attack
async def slow_readers(target: Target) -> Counter[str]:
    """200 streams of 700 tokens whose windows are closed."""
    token = f"Bearer {target.tokens['rude']}"
    request = pb.StreamQueryRequest(request=query(None, 700)).SerializeToString()
    body = b"\0" + len(request).to_bytes(4, "big") + request

    def frames() -> Iterator[bytes]:
        yield frame(4, 0, 0, b"\x00\x04" + bytes(4))
        path = "/kestrel.v1.VisionService/StreamQuery"
        for stream in range(1, 51, 2):
            yield frame(1, 4, stream, head(path, authorization=token)) + frame(0, 1, stream, body)

    return await _many(8, lambda _: _raw(target, frames(), 10, hold=True))


def expensive_images() -> dict[str, bytes]:
    """Small files that are expensive to decode."""
    flat = pyvips.Image.black(9900, 9900, bands=3).copy(interpretation="srgb")
    noise = pyvips.Image.gaussnoise(3000, 3000).cast("uchar").colourspace("srgb")
    made = {}
    for name, save in (
        ("avif flat", lambda: flat.heifsave_buffer(compression="av1", effort=0)),
        ("avif noise", lambda: noise.heifsave_buffer(compression="av1", effort=0, Q=90)),
        ("jpeg progressive", lambda: noise.jpegsave_buffer(interlace=True, Q=95)),
        ("png interlaced", lambda: flat.pngsave_buffer(interlace=True)),
        ("webp", lambda: flat.webpsave_buffer(Q=10, effort=0)),
        ("tiff", lambda: flat.tiffsave_buffer(compression="deflate")),
        ("gif", lambda: flat.crop(0, 0, 6000, 6000).gifsave_buffer()),
    ):
        with contextlib.suppress(pyvips.Error):
            made[name] = save()
    return made


_EXPENSIVE: dict[str, bytes] = {}
"""Made before the attack: that takes 20 s."""


@attack
async def expensive(target: Target) -> Counter[str]:
    """Each expensive image eight times at once."""

    async def one(number: int) -> str:
        name = list(_EXPENSIVE)[number % len(_EXPENSIVE)]
        # Trailing bytes make each another image.
        data = _EXPENSIVE[name] + number.to_bytes(4, "big")
        async with _stub(target) as stub:
            try:
                await stub.Query(query(data), metadata=target.metadata("rude"), timeout=60)
            except grpc.aio.AioRpcError as error:
                return f"{name}: {_code(error)}"
        return f"{name}: OK"

    return await _many(8 * len(_EXPENSIVE), one)


@dataclass
class Outcome:
    name: str
    ended: Counter[str]
    seconds: float
    rest_mib: float
    peak_mib: float
    after_mib: float
    polite: Polite
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        p = self.polite
        told = ", ".join(f"{what}: {count}" for what, count in self.ended.most_common(6))
        return (
            f"{self.name}: {self.seconds:.1f} s; memory +{self.peak_mib - self.rest_mib:.0f} MiB of "
            f"{self.rest_mib:.0f}, after 10 s +{self.after_mib - self.rest_mib:.0f}; polite {len(p.seconds)} calls, "
            f"p50 {p.percentile(0.5):.2f} p95 {p.percentile(0.95):.2f} p99 {p.percentile(0.99):.2f} s, "
            f"failed {dict(p.failed)}; {told}; {self.problems or 'log clean'}"
        )


async def run(
    target: Target, name: str, settle_s: float = 10.0, most_s: float = 90.0, pause_s: float = 0.0
) -> Outcome:
    """One attack, which is given up after ``most_s``, with the polite caller beside it."""
    if ATTACKS[name] is expensive and not _EXPENSIVE:
        _EXPENSIVE.update(await asyncio.to_thread(expensive_images))
    polite = Polite(target, pause_s)
    rest = target.memory()
    log_at = target.log.stat().st_size
    peak, over = rest, False

    async def look() -> None:
        nonlocal peak
        while not over:
            peak = max(peak, await asyncio.to_thread(target.memory))
            await asyncio.sleep(0.05)

    looking = asyncio.ensure_future(look())
    polite.start()
    began = time.monotonic()
    try:
        ended = await asyncio.wait_for(ATTACKS[name](target), most_s)
    except TimeoutError:
        ended = Counter({f"given up after {most_s:g} s": 1})
    seconds = time.monotonic() - began
    while len(polite.seconds) < 3 and time.monotonic() - began < 60:
        await asyncio.sleep(0.1)
    await asyncio.to_thread(polite.stop)
    await asyncio.sleep(settle_s)
    over = True
    await looking
    outcome = Outcome(name, ended, seconds, rest / MIB, peak / MIB, target.memory() / MIB, polite)
    if target.popen.poll() is not None:
        outcome.problems.append(f"the server ended with status {target.popen.returncode}")
    text = target.log.read_bytes()[log_at:].decode(errors="replace")
    outcome.problems += sorted(
        {line[24:150] for line in text.splitlines() if " E " in line[:30] or "Traceback" in line}
    )
    return outcome


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, Target(Path(folder)) as target:
        alone = Polite(target)
        alone.start()
        time.sleep(5)
        alone.stop()
        print(
            f"alone: {len(alone.seconds)} calls, p50 {alone.percentile(0.5):.2f} p95 {alone.percentile(0.95):.2f} "
            f"p99 {alone.percentile(0.99):.2f} s; {target.memory() / MIB:.0f} MiB",
            flush=True,
        )
        for name in names or ATTACKS:
            print(asyncio.run(run(target, name)), flush=True)
            if target.popen.poll() is not None:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
