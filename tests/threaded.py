"""A synchronous client with the methods of an asynchronous one, so that one test serves both."""

import asyncio


class Threaded:
    """Every call is in a thread: the event loop may be that of the server."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if name.startswith("stream_"):
            return lambda *args, **options: ThreadedStream(method, args, options)
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self._client.close()


class ThreadedStream:
    """A stream starts when it is asked for something."""

    def __init__(self, method, args, options):
        self._start = lambda: method(*args, **options)

    def __getattr__(self, name):
        if name == "_stream":
            self._stream = self._start()
            return self._stream
        return getattr(self._stream, name)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self._stream.close()

    async def __anext__(self):
        if (event := await asyncio.to_thread(lambda: next(self._stream, None))) is None:
            raise StopAsyncIteration
        return event

    def __aiter__(self):
        return self

    async def result(self):
        return await asyncio.to_thread(lambda: self._stream.result())


async def streamed(client, *args, **options):
    """The result of a streamed query of either client."""
    async with client.stream_query(*args, **options) as stream:
        return await stream.result()
