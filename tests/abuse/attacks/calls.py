"""Attacks by regular calls: too many, cancelled, stalled, about expensive images."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pyvips
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from tests.abuse.attacks.registry import MIB, attack, ending_of, many, open_stub
from tests.abuse.target import OWN, Target, jpeg, query


@attack
async def large_metadata(target: Target) -> Counter[str]:
    """500 calls with 15 KiB of metadata each."""
    metadata = (*target.metadata("rude"), ("x-much", "m" * 15_000))

    async def one(number: int) -> str:
        async with open_stub(target) as stub:
            return await ending_of(stub.Query(query(), metadata=metadata, timeout=20))

    return await many(500, one)


@attack
async def cancels(target: Target) -> Counter[str]:
    """3000 calls with an image, each cancelled within 20 ms."""
    rng = random.Random(1)
    images = [jpeg(1000 + number) for number in range(20)]

    async def caller(number: int) -> str:
        async with open_stub(target) as stub:
            for _ in range(100):
                call = stub.Query(query(rng.choice(images)), metadata=target.metadata("rude"))
                await asyncio.sleep(0.02 * rng.random())
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await call
        return "done"

    return await many(30, caller)


@attack
async def one_principal_with_700_calls(target: Target) -> Counter[str]:
    end = time.monotonic() + 15
    codes: Counter[str] = Counter()
    image = jpeg(77)

    async def caller(_: int) -> str:
        async with open_stub(target) as stub:
            while time.monotonic() < end:
                asked = query(image, 60)
                metadata = target.metadata("rude")
                ending = await ending_of(stub.Query(asked, metadata=metadata, timeout=30))
                codes[ending] += 1
                if ending != "OK":
                    await asyncio.sleep(0.1)
        return "done"

    await many(700, caller)
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
            put = ImageServiceStub(channel).PutImage
            return await ending_of(put(request, metadata=target.metadata("rude"), timeout=30))

    return await many(60, one)


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
                return f"{error.code().name}: {(error.details() or '')[:40]}"
        return "OK"

    return await many(40, one)


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
                    counted[error.code().name] += 1

            await asyncio.gather(*(watch() for _ in range(100)))
        return ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))

    return await many(30, connection)


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


def make_expensive_images() -> None:
    """Makes the images of `expensive` before it begins, because that takes 20 s."""
    if not _EXPENSIVE:
        _EXPENSIVE.update(expensive_images())


@attack
async def expensive(target: Target) -> Counter[str]:
    """Each expensive image eight times at once."""

    async def one(number: int) -> str:
        name = list(_EXPENSIVE)[number % len(_EXPENSIVE)]
        # Trailing bytes make each another image.
        data = _EXPENSIVE[name] + number.to_bytes(4, "big")
        async with open_stub(target) as stub:
            call = stub.Query(query(data), metadata=target.metadata("rude"), timeout=60)
            return f"{name}: {await ending_of(call)}"

    return await many(8 * len(_EXPENSIVE), one)
