"""EngineStream: a reader that waits gets each update before the request ends."""

import asyncio

from kestrel_engine import EngineStream, StreamUpdate


async def test_a_push_wakes_the_reader_that_waits():
    stream = EngineStream("a", lambda: None)
    for n, text in enumerate(("first", "second")):
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not reading.done()
        stream.push([(n, StreamUpdate(text=text))])
        async with asyncio.timeout(60):
            assert (await reading).text == text
    assert not stream.done
