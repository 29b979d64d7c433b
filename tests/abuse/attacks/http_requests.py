"""Attacks by HTTP: bodies with two lengths, heads of many lines, requests in a row."""

import asyncio
import time
from collections import Counter

from tests.abuse.attacks.registry import MIB, attack, many
from tests.abuse.target import Target

_ROUTES = (b"/v1/query", b"/v1/responses", b"/v1/messages")
_GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


def _post(number: int) -> bytes:
    """The head of a request for one route after the other."""
    route = _ROUTES[number % len(_ROUTES)]
    kind = b"content-type: application/json\r\n"
    return b"POST " + route + b" HTTP/1.1\r\nhost: localhost\r\n" + kind


async def _send(target: Target, head: bytes, piece: bytes, count: int) -> str:
    """Sends a head and ``count`` pieces as fast as they are taken. Returns the status of the answer."""
    host, _, port = target.http_address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return "refused"
    try:
        writer.write(head)
        for _ in range(count):
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 20)
        return (await asyncio.wait_for(reader.read(12), 20)).decode()[9:] or "closed"
    except TimeoutError:
        return "held back"
    except OSError:
        return "closed"
    finally:
        writer.close()


@attack
async def two_lengths(target: Target) -> Counter[str]:
    """30 bodies of 40 MiB in chunks, of which Content-Length says that they have 10 bytes."""
    token = b"authorization: Bearer %b\r\n" % target.tokens["rude"].encode()
    lengths = b"content-length: 10\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return await many(
        30, lambda each: _send(target, _post(each) + token + lengths, piece, 40 * MIB // 0x10000)
    )


async def _repeat(target: Target, data: bytes, seconds: float) -> str:
    """Sends the same again and again, on new connections when the server ends one."""
    end, ended = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        ended = await _send(target, b"", data, 1)
    return ended


@attack
async def line_feed_heads(target: Target) -> Counter[str]:
    """Heads of 15,900 lines that end with LF alone, on 8 connections, without a token."""
    head = _GET.replace(b"\r\n", b"\n") + b"a:b\n" * 15_900 + b"\n"
    return await many(8, lambda _: _repeat(target, head, 6))


@attack
async def longest_heads(target: Target) -> Counter[str]:
    """Heads of as many lines as are allowed, 40 requests at once on 8 connections, without a token."""
    head = (_GET + b"a:b\r\n" * 95 + b"\r\n") * 40
    return await many(8, lambda _: _repeat(target, head, 6))


@attack
async def small_requests(target: Target) -> Counter[str]:
    """1000 requests at once on 8 connections, without a token."""
    return await many(8, lambda _: _repeat(target, (_GET + b"\r\n") * 1000, 6))


@attack
async def tiny_chunks(target: Target) -> Counter[str]:
    """Bodies of 1900 chunks of one byte, on 4 connections, with a token."""
    token = b"authorization: Bearer %b\r\n" % target.tokens["rude"].encode()
    body = b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1900 + b"0\r\n\r\n"
    return await many(4, lambda each: _repeat(target, _post(each) + token + body, 6))
